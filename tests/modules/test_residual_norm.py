"""A residual stream and its norm: values, gradients, layouts and errors, against fp64.

Equal bits (see common.py): own sums.
"""

import pytest
import torch
from common import DTYPES
from modules import check
from norm_inputs import EPS, LAYOUTS, exact, laid_out, normal

from gla_ext.layers.norms import RMSNorm, rms_norm, rms_norm_residual

# On CUDA a row has 32, 128 or 256 threads, or is read in a loop.
WIDTHS = (1, 7, 64, 256, 264, 1000, 1024, 2048, 2500)
KINDS = [(dtype, dtype) for dtype in DTYPES]
KINDS += [(dtype, torch.float32) for dtype in (torch.bfloat16, torch.float16)]
by_kind = pytest.mark.parametrize("dtype, stream", KINDS, ids=str)


def make(shape, device, dtype, stream, layout="contiguous"):
    x, residual = (
        normal(*shape, seed=i, device=device, dtype=d) for i, d in ((1, dtype), (2, stream))
    )
    if layout != "contiguous":
        x, residual = laid_out(x, layout), laid_out(residual, layout)
    dy, dstream = (
        normal(*shape, seed=i, device=device, dtype=d) for i, d in ((4, dtype), (5, stream))
    )
    return x, residual, normal(shape[-1], seed=3, device=device, dtype=dtype), dy, dstream


def call(*inputs):
    return rms_norm_residual(*inputs, EPS)


def by_definition(x, residual, weight=None):
    stream = x + residual
    return exact(stream, weight, None), stream


CASES = [((2, 9, V), "contiguous") for V in WIDTHS] + [((4, 4400, 64), "contiguous")]
CASES += [((2, 9, 3, 72), layout) for layout in LAYOUTS[1:]]


@by_kind
@pytest.mark.parametrize(("shape", "layout"), CASES, ids=str)
def test_values_and_gradients(device, shape, layout, dtype, stream):
    x, residual, weight, dy, dstream = make(shape, device, dtype, stream, layout)
    # What is normed is the stream as it is rounded.
    factor = {1: 6.0, 64: 4.0}.get(shape[-1], 2.0)
    check(call, by_definition, [x, residual, weight], [dy, dstream], factor)
    if layout != "contiguous":
        upstream = [laid_out(t, layout) for t in (dy, dstream)]
        check(call, by_definition, [x, residual.contiguous(), weight], upstream, factor)
    elif shape[1] == 9:
        check(call, by_definition, [x, residual, None], [dy, None], factor)
        check(call, by_definition, [x, residual, weight], [None, dstream], factor)


@by_kind
def test_is_the_sum_and_then_the_norm(device, dtype, stream):
    """The same bits."""
    x, residual, weight, _, _ = make((2, 90, 264), device, dtype, stream)
    y, total = rms_norm_residual(x, residual, weight, EPS)
    assert torch.equal(total, residual + x)
    assert torch.equal(y, rms_norm(total, weight, EPS).to(dtype))


def test_a_shorter_residual_is_cast(device):
    x, residual, weight, _, _ = make((3, 24), device, torch.float32, torch.bfloat16)
    y, stream = rms_norm_residual(x, residual, weight, EPS)
    assert y.dtype == stream.dtype == torch.float32
    assert torch.equal(stream, x + residual)


def test_module(device):
    x, residual, _, _, _ = make((3, 24), device, torch.float32, torch.float32)
    norm = RMSNorm(24, eps=EPS).to(device)
    y, stream = norm(x, residual, prenorm=True)
    assert torch.equal(norm(x, residual), y) and torch.equal(stream, residual + x)
    assert torch.equal(norm(x, prenorm=True)[0], norm(x)) and norm(x, prenorm=True)[1] is x
