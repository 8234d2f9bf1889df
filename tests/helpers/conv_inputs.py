"""Inputs of the short convolution in different layouts, and its results against fp64 torch."""

import itertools

import torch
from norm_inputs import BOUND, laid_out, normal
from torch import Tensor
from torch.nn.functional import conv1d, silu

from gla_ext.layers.short_convolution import ShortConvolution

NAMES = ("y", "state", "dx", "dweight", "dbias", "dcache")


LAYOUTS = ("contiguous", "part of a projection", "tokens first", "sliced", "misaligned")


def make(B, T, D, W, device, dtype, *, bias=True, weight_dtype=None, layout="contiguous", N=None):
    """x, weight, bias, cache of N sequences, and the gradients of y and of the state."""
    of = {"device": device, "dtype": dtype}
    parameters = of | {"dtype": weight_dtype or dtype}
    N = B if N is None else N
    return (
        laid_out(normal(B, T, D, seed=1, **of), layout),
        normal(D, 1, W, seed=2, **parameters) / W**0.5,
        normal(D, seed=3, **parameters) if bias else None,
        normal(N, D, W, seed=4, **of),
        laid_out(normal(B, T, D, seed=5, **of), layout),
        normal(N, D, W, seed=6, **of),
    )


def exact(x, weight, bias=None, cache=None, offsets=None):
    """y and the state in fp64, a sequence after the other; offsets is a list."""
    D, _, W = weight.shape
    if offsets is None:
        rows = [(row, n) for n, row in enumerate(x)]
    else:
        pairs = itertools.pairwise([*offsets, x.shape[1]])
        rows = [(x[0, start:end], n) for n, (start, end) in enumerate(pairs)]
    count = len(rows) - (offsets is not None)  # what follows the last offset has no state
    none = x.flatten(0, 1)[:0]
    ys, states = [none], [none.unsqueeze(-1).expand(-1, -1, W)]
    for row, n in rows:
        before = x.new_zeros(W, D) if cache is None or n == count else cache[n].mT
        inputs = torch.cat([before, row]).mT  # [D, W + T]
        ys.append(silu(conv1d(inputs[None], weight, bias, groups=D)[0, :, 1:]).mT)
        if n < count:
            states.append(inputs[None, :, inputs.shape[1] - W :])
    y = torch.cat(ys)
    return y.view(x.shape) if offsets is None else y[None], torch.cat(states)


def module(weight: Tensor, bias: Tensor | None) -> ShortConvolution:
    """A convolution with these very tensors, of which torch.autograd.grad takes gradients."""
    conv = ShortConvolution(weight.shape[0], weight.shape[2], bias is not None)
    del conv.weight, conv.bias
    conv.weight, conv.bias = weight, bias
    return conv


def results(x, weight, bias, cache, dy, dstate, cu_seqlens=None, apply=None) -> dict[str, Tensor]:
    """y, the state and every gradient, by name; of an absent input none."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in (x, weight, bias, cache)]
    apply = apply or (lambda x, w, b, cache: module(w, b)(x, cache, True, cu_seqlens))
    y, state = apply(*leaves)
    there = [t for t in leaves if t is not None]
    gradients = iter(torch.autograd.grad((y, state), there, (dy, dstate), materialize_grads=True))
    found = [y.detach(), state.detach(), *(t if t is None else next(gradients) for t in leaves)]
    return {name: t for name, t in zip(NAMES, found, strict=True) if t is not None}


def check(x, weight, bias, cache, dy, dstate, offsets=None, index=torch.int64, factor=1.0):
    """Results of the operator, their dtypes, and that they are contiguous."""
    cu_seqlens = None if offsets is None else torch.tensor(offsets, dtype=index, device=x.device)
    found = results(x, weight, bias, cache, dy, dstate, cu_seqlens)
    doubles = [None if t is None else t.double() for t in (x, weight, bias, cache, dy, dstate)]
    expected = results(*doubles, apply=lambda *leaves: exact(*leaves, offsets))
    assert torch.equal(found["state"].double(), expected["state"])
    for name, got in found.items():
        wanted = expected[name]
        of_parameter = name in ("dweight", "dbias")
        assert got.dtype == (weight if of_parameter else x).dtype, name
        assert got.shape == wanted.shape, name
        assert got.is_contiguous(), name
        # Sums over tokens in fp32, whose products are of inputs that were not rounded.
        bound = max(BOUND[got.dtype], BOUND[torch.float32] if x.dtype != torch.float64 else 0)
        error = (got.double() - wanted).norm() / wanted.norm().clamp_min(1e-300)
        assert error < factor * bound, f"{name}: {error:.1e}"
