"""What CUDA memory a call keeps and takes."""

import pytest
import torch
from common import make_inputs, ours
from cuda_tools import peak_bytes
from large import large_inputs

from gla_ext import chunk_gla
from gla_ext.ops import chunk as ops

SHAPES = {
    "main": (8, 2048, 4, 128, 256),
    "wide": (2, 2048, 4, 256, 512),
    "many heads": (4, 2048, 16, 64, 64),
}
GRAIN = 512  # bytes: torch rounds an allocation up to a multiple


@pytest.mark.parametrize("states", [False, True])
def test_nothing_but_inputs_is_saved(device, states):
    x = make_inputs(2, 130, 3, 20, 28, states=states, device=device)
    x = x.map(lambda t: t.requires_grad_())
    saved = []

    def pack(t):
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        chunk_gla(x.q, x.k, x.v, x.g, initial_state=x.initial_state, output_final_state=states)
    inputs = {t.data_ptr() for t in vars(x).values() if t is not None}
    assert saved
    assert all(t.data_ptr() in inputs for t in saved if t.numel())


@pytest.mark.cuda
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_keeps_its_outputs_alone(shape, monkeypatch):
    """And operands, which `sm90/test_for_backward.py` is about."""
    monkeypatch.setattr(ops, "_for_backward_bytes", 0)
    x = large_inputs(*SHAPES[shape]).map(lambda t: t.requires_grad_())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    o, final_state = chunk_gla(x.q, x.k, x.v, x.g, output_final_state=True)
    kept = torch.cuda.memory_allocated() - before
    assert kept <= o.nbytes + final_state.nbytes + 4 * GRAIN


def peak(shape) -> int:
    """The most that forward and backward have allocated beside their inputs, bytes."""
    x = large_inputs(*shape)
    return peak_bytes(lambda: ours(x))


def peak_of_fla(B, T, H, K, V) -> int:
    """The same of FLA 0.6.0 in bf16, added up from its source: in its last backward kernel it holds
    o, dv, dg and, in fp32, b, A, dA, S, dS, and dq and dk both before and after.
    """
    states = 2 * 4 * K * V / 64
    return int(B * T * H * (states + 2 * 4 * 64 + 5 * 4 * K + 2 * K + 2 * 2 * V))


@pytest.mark.cuda
@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("shape", SHAPES)
def test_peak_is_below_flas(shape):
    assert peak(SHAPES[shape]) < peak_of_fla(*SHAPES[shape])


@pytest.mark.cuda
def test_peak_is_linear_in_tokens():
    B, T, H, K, V = SHAPES["main"]
    peaks = [peak((B, n * T, H, K, V)) for n in (1, 2, 4)]
    assert peaks[2] - peaks[1] <= 2.02 * (peaks[1] - peaks[0])
