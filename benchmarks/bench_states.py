"""What forward leaves for backward beside the inputs: nothing (`GLA_EXT_KEEP_OPERANDS=0`), the
operands it has made (the default), or the states (`save_states`): time and memory.
"""

import functools

import bench_cuda as bench
import torch
from gate import require_close
from timing import cold

TOLERANCE = 0.005  # two roundings of bf16


def run(x, save_states: bool, kept_bytes: int) -> dict[str, torch.Tensor]:
    """Forward + backward by the operators themselves, and what forward has saved."""
    op, inputs = torch.ops.gla_ext, (x.q, x.k, x.v, x.g, None, None, None)
    o, _, states, kept = op.chunk_gla_fwd(
        *inputs, None, False, False, save_states, False, kept_bytes
    )
    dq, dk, dv, dg, _, _ = op.chunk_gla_bwd(x.do, None, *inputs, states, None, False, False, kept)
    return {"o": o, "dq": dq, "dk": dk, "dv": dv, "dg": dg, "states": states, "kept": kept}


@torch.no_grad()
def measure(shape) -> dict:
    """Forward + backward where everything is computed again, where operands are kept, and where
    states are saved: times, and the bytes that wait for backward beside the inputs.
    """
    from fused import plan_of

    x = bench.draw(shape)
    kept = plan_of(x, backward=False, kept=True)["kept_bytes"]
    choices = {"recomputed": (False, 0), "saved": (True, 0)}
    if kept:
        choices["kept"] = (False, kept)
    results = {name: run(x, *choice) for name, choice in choices.items()}
    sizes = {
        name: found.pop("states").nbytes + found.pop("kept").nbytes
        for name, found in results.items()
    }
    for name in choices.keys() - {"recomputed"}:
        require_close(results[name], results["recomputed"], TOLERANCE, f"{name}, {shape}")
    del results
    calls = {name: functools.partial(run, x, *choice) for name, choice in choices.items()}
    return {"ms": cold(calls), "bytes": sizes}
