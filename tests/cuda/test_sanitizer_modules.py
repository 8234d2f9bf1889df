"""Kernels of the layer's other operators at small shapes, for compute-sanitizer: see
`test_sanitizer.py`.
"""

import functools

import pytest
import torch
from common import BAD_OFFSETS, CUDA_DTYPES, assert_close
from conv_inputs import make as make_convolution
from cuda_tools import move
from loss_inputs import make as make_logits
from norm_inputs import EPS, laid_out, make, normal

pytestmark = [pytest.mark.cuda, pytest.mark.sanitizer]

by_dtype = pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
ops = torch.ops.gla_ext


NORM_SHAPES = {  # V, gated, layout
    "8 lanes": (64, True, "part of a projection"),
    "16 lanes": (120, True, "contiguous"),
    "a warp": (256, True, "part of a projection"),
    "2 warps": (512, False, "contiguous"),
    "4 warps": (1000, True, "contiguous"),
    "a block": (2048, True, "contiguous"),
    "a loop": (2504, True, "contiguous"),
    "a loop beyond shared memory": (8200, True, "contiguous"),
    "odd": (65, True, "contiguous"),
    "odd and wide": (2501, True, "contiguous"),
    "misaligned": (72, True, "misaligned"),
    "without a gate": (65, False, "contiguous"),
}


def both(call, *inputs, times=1.0):
    """Results of the CPU and of CUDA, in pairs, with some more rounding allowed."""
    with torch.no_grad():
        wanted, got = call(*inputs), call(*map(move, inputs))
    for a, b in zip(got, wanted, strict=True):
        assert_close(a.cpu(), b, times * (2e-6 if a.dtype == torch.float32 else 4e-3))


@by_dtype
@pytest.mark.parametrize("V, gated, layout", NORM_SHAPES.values(), ids=NORM_SHAPES)
def test_norms(V, gated, layout, dtype):
    """Rows that fill neither a block nor what a thread has at once, against the CPU's results."""

    def call(*inputs):
        *inputs, dy = inputs
        y, rstd = ops.rms_norm_gate_fwd(*inputs, "swish", EPS)
        backward = functools.partial(ops.rms_norm_gate_bwd, dy, *inputs, rstd)
        return y, rstd, *backward("swish", False)[:3], *backward("swish", True)

    x, weight, gate, dy = make((1, 9, 3, V), "cpu", dtype, layout)
    both(call, x, weight, gate if gated else None, dy)


SWIGLU_SHAPES = {  # D, layout
    "whole packs": (72, "contiguous"),
    "a tail": (77, "contiguous"),
    "halves": (64, "part of a projection"),
    "halves and a tail": (65, "part of a projection"),
    "more than a block": (5000, "part of a projection"),
    "misaligned": (72, "misaligned"),
}


@by_dtype
@pytest.mark.parametrize("D, layout", SWIGLU_SHAPES.values(), ids=SWIGLU_SHAPES)
def test_swiglu(D, layout, dtype):
    """Rows that end within what a thread has at once, against the CPU's results."""

    def call(gate, up, dy):
        return ops.swiglu_fwd(gate, up), *ops.swiglu_bwd(dy, gate, up, True)

    gate, _, up, dy = make((1, 9, 3, D), "cpu", dtype, layout)
    both(call, gate, up, dy)


CONV_SHAPES = {  # B, T, D, offsets, layout
    "a slice": (2, 37, 72, None, "part of a projection"),
    "a tile and more": (1, 9, 264, None, "contiguous"),
    "odd": (2, 21, 13, None, "contiguous"),
    "misaligned": (2, 21, 24, None, "misaligned"),
    "a token": (3, 1, 40, None, "contiguous"),
    "no token": (2, 0, 40, None, "contiguous"),
    "packed": (1, 40, 40, [0, 5, 5, 6, 8, 36], "part of a projection"),
    "packed and odd": (1, 40, 13, [0, 5, 5, 6, 8, 36], "contiguous"),
}


def convolved(x, weight, bias, cache, dy, dstate, cu_seqlens):
    inputs = (x, weight, bias, cache, cu_seqlens)
    outputs = ops.short_convolution_fwd(*inputs, True)
    return *outputs, *ops.short_convolution_bwd(dy, dstate, *inputs)


@by_dtype
@pytest.mark.parametrize("W", [1, 3, 4, 6])
@pytest.mark.parametrize("B, T, D, offsets, layout", CONV_SHAPES.values(), ids=CONV_SHAPES)
def test_short_convolutions(B, T, D, offsets, layout, W, dtype):
    """Runs that end within what a thread loads at once, against the CPU's results."""
    N = B if offsets is None else len(offsets) - 1
    cu_seqlens = None if offsets is None else torch.tensor(offsets)
    both(convolved, *make_convolution(B, T, D, W, "cpu", dtype, layout=layout, N=N), cu_seqlens)


@pytest.mark.parametrize("W", [4, 6])
@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("what", BAD_OFFSETS)
def test_short_convolutions_with_bad_offsets(what, offsets_dtype, W):
    inputs = make_convolution(1, 165, 24, W, "cpu", torch.bfloat16, N=7)
    offsets = torch.tensor(BAD_OFFSETS[what], dtype=offsets_dtype)
    with torch.no_grad():
        convolved(*map(move, (*inputs, offsets)))
    torch.cuda.synchronize()


@by_dtype
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
    "V, layout",
    [
        (64, "contiguous"),
        (65, "contiguous"),
        (1000, "contiguous"),
        (2501, "contiguous"),
        (72, "misaligned"),
    ],
)
def test_norms_of_a_residual_stream(V, layout, wide, dtype):
    stream = torch.float32 if wide else dtype
    x, residual, dy, dstream = (
        normal(1, 9, 1, V, seed=i, dtype=d) for i, d in enumerate((dtype, stream, dtype, stream))
    )

    if layout != "contiguous":
        x, residual = laid_out(x, layout), laid_out(residual, layout)

    def call(x, residual, weight, dy, dstream):
        y, stream, rstd = ops.rms_norm_residual_fwd(x, residual, weight, EPS)
        return y, stream, *ops.rms_norm_residual_bwd(dy, dstream, stream, weight, rstd)

    both(call, x, residual, normal(V, seed=5, dtype=dtype), dy, dstream, times=3)


@by_dtype
@pytest.mark.parametrize("V", [7, 2048, 2500])
@pytest.mark.parametrize("layout", ["contiguous", "a part of wider rows"])
def test_cross_entropy(V, layout, dtype):
    options = (-100, 0.1, 1.3, 3.0, 0.01)

    def call(logits, target, dloss):
        loss, z_loss, lse = ops.cross_entropy_fwd(logits, target, *options, False)
        gradient = ops.cross_entropy_bwd(dloss, logits, target, lse, *options)
        together = logits.clone()
        again = ops.cross_entropy_with_grad_(together, target, *options)
        return loss, z_loss, lse, gradient, together, again

    both(call, *make_logits(5, V, "cpu", dtype, layout), times=3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("R, K", [(16, 512), (16, 72), (5, 33), (1, 1030)])
def test_gate_projection(R, K, dtype):
    h = normal(37, R + 8, seed=1, dtype=dtype)[:, 8:]
    weight, bias = normal(K, R, seed=2, dtype=dtype), normal(K, seed=3, dtype=dtype)

    def call(h, weight, bias, dg):
        g = ops.gate_projection_fwd(h, weight, bias, 16.0, -0.5)
        return g, *ops.gate_projection_bwd(dg, h, weight, bias, 16.0, -0.5)

    both(call, h, weight, bias, normal(37, K, seed=4, dtype=dtype), times=3)
