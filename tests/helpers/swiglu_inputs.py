"""SwiGLU and its linear map: inputs, and the truth."""

import pytest
import torch.nn.functional as F
from norm_inputs import laid_out, normal

with_bias = pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])


def exact(gate, up, weight=None, bias=None):
    """By the definitions."""
    y = gate / (1 + (-gate).exp()) * up
    return y if weight is None else F.linear(y, weight, bias)


def plain(gate, up, weight=None, bias=None):
    y = F.silu(gate) * up
    return y if weight is None else F.linear(y, weight, bias)


def make(shape, device, dtype, layout=None):
    """gate, up and the gradient of their product; with a layout the shape is [B, T, H, D]."""
    inputs = [normal(*shape, seed=i, device=device, dtype=dtype) for i in (1, 2, 3)]
    return inputs if layout is None else [laid_out(t, layout) for t in inputs]


def make_linear(shape, N, device, dtype, layout=None, biased=False):
    """gate, up, weight and perhaps a bias, and the gradient of the result."""
    *inputs, _ = make(shape, device, dtype, layout)
    of = {"device": device, "dtype": dtype}
    inputs.append(normal(N, shape[-1], seed=4, **of) / shape[-1] ** 0.5)
    if biased:
        inputs.append(normal(N, seed=5, **of))
    return inputs, normal(*shape[:-1], N, seed=6, **of)
