"""What forward leaves for backward beside the inputs: nothing (`GLA_EXT_KEEP_OPERANDS=0`) or the
operands that it has made (the default): time and memory.
"""

import functools

import bench_cuda as bench
import torch
from shared.gate import require_close
from shared.timing import cold

TOLERANCE = 0.005  # two roundings of bf16


def run(x, for_backward_bytes: int) -> dict[str, torch.Tensor]:
    """Forward + backward by the operators themselves, and what forward has kept."""
    op, inputs = torch.ops.gla_ext, (x.q, x.k, x.v, x.g, None, None, None)
    o, _, kept = op.chunk_gla_fwd(*inputs, None, False, False, False, for_backward_bytes)
    dq, dk, dv, dg, _, _ = op.chunk_gla_bwd(x.do, None, *inputs, None, False, False, kept)
    return {"o": o, "dq": dq, "dk": dk, "dv": dv, "dg": dg, "kept": kept}


@torch.no_grad()
def measure(shape) -> dict:
    """Forward + backward where everything is computed again and where operands are kept: times, and
    the bytes that wait for backward beside the inputs.
    """
    import gla_ext

    x = bench.draw(shape)
    kept = gla_ext.plan(*shape, gate_dtype=x.g.dtype).for_backward_bytes
    choices = {"recomputed": 0} | ({"kept": kept} if kept else {})
    results = {name: run(x, size) for name, size in choices.items()}
    sizes = {name: found.pop("kept").nbytes for name, found in results.items()}
    if kept:
        require_close(results["kept"], results["recomputed"], TOLERANCE, f"kept, {shape}")
    del results
    calls = {name: functools.partial(run, x, size) for name, size in choices.items()}
    return {"ms": cold(calls), "bytes": sizes}
