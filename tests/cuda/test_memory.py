"""What CUDA memory a call keeps and takes."""

import pytest
import torch
from common import ours
from cuda_tools import peak_bytes
from large import large_inputs

from gla_ext import chunk_gla, recurrent_gla_step_
from gla_ext.ops import chunk as ops

pytestmark = pytest.mark.cuda

SHAPES = {
    "main": (8, 2048, 4, 128, 256),
    "wide": (2, 2048, 4, 256, 512),
    "many heads": (4, 2048, 16, 64, 64),
}
GRAIN = 512  # bytes: torch rounds an allocation up to a multiple


def kept_by(call) -> int:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    outputs = call()
    kept = torch.cuda.memory_allocated() - before
    return kept - sum(x.nbytes for x in outputs)


@pytest.mark.parametrize("shape", SHAPES)
def test_forward_keeps_its_outputs_alone(shape, monkeypatch):
    """And operands, which `sm90/test_for_backward.py` is about."""
    monkeypatch.setattr(ops, "_for_backward_bytes", 0)
    x = large_inputs(*SHAPES[shape]).map(lambda t: t.requires_grad_())
    gv = torch.zeros_like(x.v, requires_grad=True)
    assert kept_by(lambda: chunk_gla(x.q, x.k, x.v, x.g, output_final_state=True)) <= 4 * GRAIN
    assert kept_by(lambda: chunk_gla(x.q, x.k, x.v, x.g, gv=gv)[:1]) <= 4 * GRAIN


@pytest.mark.parametrize("V", [128, 256])
def test_a_step_takes_the_memory_of_its_output(V):
    """In place of a pool of any size."""
    x = large_inputs(64, 1, 4, 64, V, states=True)
    pool = torch.zeros(96, 4, 64, V, device="cuda")
    slots = torch.arange(64, device="cuda") - 1
    size = peak_bytes(lambda: recurrent_gla_step_(x.q, x.k, x.v, x.g, state=pool, slots=slots))
    assert size <= x.v.nbytes + GRAIN


def peak(shape) -> int:
    """The most that forward and backward have allocated beside their inputs, bytes."""
    x = large_inputs(*shape)
    return peak_bytes(lambda: ours(x))


def peak_of_fla(B, T, H, K, V) -> int:
    """The same for FLA 0.6.0 in bf16, added up from its source. Its last backward kernel holds o,
    dv and dg; in fp32 b, A, dA, S and dS; and, also in fp32, dq and dk twice: its inputs and its
    outputs.
    """
    states = 2 * 4 * K * V / 64
    return int(B * T * H * (states + 2 * 4 * 64 + 5 * 4 * K + 2 * K + 2 * 2 * V))


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("shape", SHAPES)
def test_peak_is_below_flas(shape):
    assert peak(SHAPES[shape]) < peak_of_fla(*SHAPES[shape])


def test_peak_is_linear_in_tokens():
    B, T, H, K, V = SHAPES["main"]
    peaks = [peak((B, n * T, H, K, V)) for n in (1, 2, 4)]
    assert peaks[2] - peaks[1] <= 2.02 * (peaks[1] - peaks[0])
