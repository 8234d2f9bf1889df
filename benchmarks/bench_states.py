"""States saved by forward or computed again in backward (`save_states`): time and memory."""

import functools

import bench_cuda as bench
import torch
from gate import require_close
from timing import cold

TOLERANCE = 0.005  # two roundings of bf16


def run(x, save_states: bool) -> dict[str, torch.Tensor]:
    """Forward + backward by the operators themselves, and what forward has saved."""
    op, inputs = torch.ops.gla_ext, (x.q, x.k, x.v, x.g, None, None, None)
    o, _, states = op.chunk_gla_fwd(*inputs, None, False, False, save_states, False)
    dq, dk, dv, dg, _, _ = op.chunk_gla_bwd(x.do, None, *inputs, states, None, False, False)
    return {"o": o, "dq": dq, "dk": dk, "dv": dv, "dg": dg, "states": states}


@torch.no_grad()
def measure(shape) -> dict:
    """Forward + backward whose states are computed again and whose states are saved: times, and
    the bytes that wait for backward beside the inputs.
    """
    x, choices = bench.draw(shape), {"recomputed": False, "saved": True}
    results = {name: run(x, saved) for name, saved in choices.items()}
    kept = {name: found.pop("states").nbytes for name, found in results.items()}["saved"]
    require_close(results["saved"], results["recomputed"], TOLERANCE, f"saved, {shape}")
    del results
    calls = {name: functools.partial(run, x, y) for name, y in choices.items()}
    return {"ms": cold(calls), "kept_bytes": kept}
