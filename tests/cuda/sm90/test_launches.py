"""What calls launch on a GPU, beside the plan's word."""

import pytest
import torch
from common import make_inputs
from fused import BF16, mixed_gates, plan_of

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("hopper")]

SHAPES = {
    "narrow": (2, 300, 2, 64, 64),
    "paired forward": (2, 300, 2, 128, 256),
    "pairs of chunks": (2, 300, 2, 256, 512),
    "segments": (1, 6400, 1, 64, 64),
    "segments that sum the one before": (8, 2048, 4, 128, 256),
    "segments of linear sweeps": (1, 8192, 2, 256, 512),
    "paired segment parts": (1, 32768, 4, 128, 256),
    "gradients in a sweep": (2, 16384, 8, 128, 128),
    "gradients of small heads in a sweep": (2, 32768, 16, 64, 64),
}


def launched(call) -> tuple[list[str], tuple[torch.Tensor, ...]]:
    """The names of the kernels that call() launches, but torch's own, and what it returns."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        results = call()
        torch.cuda.synchronize()
    return [e.name for e in profile.events() if "gla_ext::cuda::" in e.name], results


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("kind", ["fused", "kept", "steps"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_as_many_as_the_plan_says(shape, kind, packed, monkeypatch):
    options = {"keeps": kind == "kept"}
    if kind == "steps":
        monkeypatch.setenv("GLA_EXT_CUDA_PATH", "steps")
        options["capability"] = "8.0"  # has the steps alone
    B, T, *sizes = shape
    rows, lengths = ((1, B * T), [T] * B) if packed else ((B, T), None)
    x = make_inputs(*rows, *sizes, BF16, 0.1, lengths=lengths, device="cuda")
    x = mixed_gates(x, "every other chunk")
    forward, backward = (plan_of(x, way, **options) for way in (False, True))
    op, inputs = torch.ops.gla_ext, (x.q, x.k, x.v, x.g, None, x.initial_state, x.cu_seqlens)
    names, (_, _, kept) = launched(
        lambda: op.chunk_gla_fwd(*inputs, None, True, False, False, forward["for_backward_bytes"])
    )
    assert len(names) == len(forward["kernels"]), names
    names, _ = launched(lambda: op.chunk_gla_bwd(x.do, x.dht, *inputs, None, False, False, kept))
    assert len(names) == len(backward["kernels"]), names
