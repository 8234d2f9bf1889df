"""What forward leaves for backward beside the inputs: nothing (`GLA_EXT_KEEP_OPERANDS=0`) or the
operands that it has made (the default): time and memory.
"""

import functools

import torch
from shared.gate import require_close
from shared.timing import cold

import gla_ext

TOLERANCE = 0.005  # two roundings of bf16


def run(x, for_backward_bytes: int) -> dict[str, torch.Tensor]:
    """Forward + backward by the operators themselves, and what forward has kept."""
    op, inputs = torch.ops.gla_ext, (x.q, x.k, x.v, x.g, None, None, None)
    o, _, kept = op.chunk_gla_fwd(*inputs, None, False, False, False, for_backward_bytes)
    dq, dk, dv, dg, _, _ = op.chunk_gla_bwd(x.do, None, *inputs, None, False, False, kept)
    return {"o": o, "dq": dq, "dk": dk, "dv": dv, "dg": dg, "kept": kept}


@torch.no_grad()
def measure(x) -> dict:
    """Forward + backward where everything is computed again and where operands are kept: times, and
    the bytes that wait for backward beside the inputs.
    """
    shape = (*x.q.shape, x.v.shape[-1])
    kept = gla_ext.plan(*shape, gate_dtype=x.g.dtype).for_backward_bytes
    calls = {"recomputed": functools.partial(run, x, 0)}
    if kept:
        calls["kept"] = functools.partial(run, x, kept)
    results = {name: call() for name, call in calls.items()}
    sizes = {name: found.pop("kept").nbytes for name, found in results.items()}
    if kept:
        require_close(results["kept"], results["recomputed"], TOLERANCE, f"kept, {shape}")
    del results
    return {"ms": cold(calls), "bytes": sizes}
