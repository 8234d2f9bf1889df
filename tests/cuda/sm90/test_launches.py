"""What calls launch on a GPU: the kernels of the plan, under the plan's names."""

import pytest
import torch
from common import make_inputs
from cuda_tools import kernel_of, launched
from fused import BF16, mixed_gates, plan_of

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("hopper")]

SHAPES = {
    "small heads": (2, 300, 2, 64, 64),
    "clusters": (2, 300, 2, 128, 256),
    "pairs of chunks": (2, 300, 2, 256, 512),
    "segments": (1, 6400, 1, 64, 64),
    "a segment that replays the first": (8, 2048, 4, 128, 256),
    "segments of prepared chunks": (1, 8192, 2, 256, 512),
    "cluster summaries": (1, 32768, 4, 128, 256),
    "gradients in a sweep": (2, 16384, 8, 128, 128),
    "gradients of small heads in a sweep": (2, 32768, 16, 64, 64),
}


def are(names: list[str], planned: list[str]) -> bool:
    """Whether profiled kernels are the planned ones, of which some are variants: "a.b" of "a"."""
    return len(names) == len(planned) and all(
        f"{kernel.removesuffix(' of values')}.".startswith(f"{name}.")
        for name, kernel in zip(names, planned, strict=True)
    )


def test_names():
    step = "void gla_ext::cuda::steps::merge_grads<(gla_ext::cuda::Access)0>(gla_ext::cuda::P)"
    assert kernel_of(step) == "merge_grads"
    assert are(["forward.fused", "scan"], ["forward.fused.for_backward", "scan"])
    assert not are(["scan"], ["scan", "scan"]) and not are(["scan"], ["scanner"])


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("kind", ["fused", "for backward", "steps"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_kernels_of_the_plan(shape, kind, packed, monkeypatch):
    options = {"for_backward": kind == "for backward"}
    if kind == "steps":
        monkeypatch.setenv("GLA_EXT_CUDA_PATH", "steps")
        options["capability"] = "8.0"  # has the steps alone
    B, T, *sizes = shape
    rows, lengths = ((1, B * T), [T] * B) if packed else ((B, T), None)
    x = make_inputs(*rows, *sizes, BF16, 0.1, lengths=lengths, device="cuda")
    x = mixed_gates(x, "every other chunk")
    forward, backward = (plan_of(x, way, **options) for way in (False, True))
    op, inputs = torch.ops.gla_ext, (x.q, x.k, x.v, x.g, None, x.initial_state, x.cu_seqlens)
    names, (_, _, for_backward) = launched(
        lambda: op.chunk_gla_fwd(*inputs, None, True, False, False, forward["for_backward_bytes"])
    )
    assert are(names, forward["kernels"]), names
    names, _ = launched(
        lambda: op.chunk_gla_bwd(x.do, x.dht, *inputs, None, False, False, for_backward)
    )
    assert are(names, backward["kernels"]), names
