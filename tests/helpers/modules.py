"""The operators of the modules: inputs, one comparator with fp64, and a table of all of them."""

import dataclasses
import functools
import math
from collections.abc import Callable

import conv_inputs
import loss_inputs
import pytest
import torch
import torch.nn.functional as F
from common import DTYPES
from dispatch import Calls
from norm_inputs import BOUND, EPS, normal
from norm_inputs import exact as exact_norm
from swiglu_inputs import exact as exact_swiglu
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from gla_ext.layers.gate_projection import gate_projection
from gla_ext.layers.norms import rms_norm, rms_norm_residual
from gla_ext.layers.swiglu import swiglu, swiglu_linear
from gla_ext.losses import cross_entropy_loss, fused_linear_cross_entropy_loss
from gla_ext.ops.short_convolution import short_convolution

ops = torch.ops.gla_ext
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def differentiable(t: Tensor | None) -> bool:
    return t is not None and t.is_floating_point()


def results(function, inputs, upstream) -> list[Tensor]:
    """The outputs of function, and the gradients of its inputs. Outputs whose upstream gradient is
    None are left out of backward.
    """
    leaves = [t.detach().requires_grad_() if differentiable(t) else t for t in inputs]
    outputs = function(*leaves)
    if isinstance(outputs, Tensor):
        outputs, upstream = [outputs], [upstream]
    there = list(filter(differentiable, leaves))
    gradients = torch.autograd.grad(
        [y for y, dy in zip(outputs, upstream, strict=True) if dy is not None],
        there,
        [dy for dy in upstream if dy is not None],
        materialize_grads=True,
    )
    return [*(y.detach() for y in outputs), *gradients]


def upstream_of(function, inputs) -> list[Tensor] | Tensor:
    """Gradients to hand to what function returns."""
    with torch.no_grad():
        outputs = function(*inputs)
    if isinstance(outputs, Tensor):
        return normal(*outputs.shape, seed=7, device=outputs.device, dtype=outputs.dtype)
    return [
        normal(*y.shape, seed=7 + i, device=y.device, dtype=y.dtype) for i, y in enumerate(outputs)
    ]


def in_double(inputs):
    return [t.double() if differentiable(t) else t for t in inputs]


def errors(found, expected) -> list[float]:
    """Of each relative to the root mean square of the expected."""
    return [
        ((got.double() - want).norm() / want.norm().clamp_min(1e-300)).item()
        for got, want in zip(found, expected, strict=True)
    ]


def check(function, exact, inputs, upstream=None, factor=1.0, of_gradients=1.0):
    """Values and gradients of function are those of exact in fp64, but for their rounding; outputs
    are contiguous, and each gradient has its input's shape and dtype. Returns the results.

    Args:
        upstream: Default: drawn.
        factor: how many roundings an error may have.
        of_gradients: times as many gradients may.
    """
    upstream = upstream_of(function, inputs) if upstream is None else upstream
    found = results(function, inputs, upstream)
    wide = upstream.double() if isinstance(upstream, Tensor) else in_double(upstream)
    expected = results(exact, in_double(inputs), wide)
    there = list(filter(differentiable, inputs))
    outputs = len(found) - len(there)
    assert found[0].dtype == inputs[0].dtype
    assert all(y.is_contiguous() for y in found[:outputs])
    for got, of in zip(found[outputs:], there, strict=True):
        assert got.dtype == of.dtype and got.shape == of.shape
    each = zip(found, expected, errors(found, expected), strict=True)
    for i, (got, want, error) in enumerate(each):
        assert got.shape == want.shape
        bound = factor * BOUND[got.dtype] * (of_gradients if i >= outputs else 1)
        assert error < bound, f"number {i}: {error:.1e}"
    return found


def kept(call):
    """What a call returns, and what autograd saves in it by address, so nothing twice."""
    saved = {}
    with saved_tensors_hooks(lambda t: saved.setdefault(t.data_ptr(), t), lambda t: t):
        result = call()
    return result, saved


def made_again(calls: Calls) -> list[bool]:
    """Whether the norm's backward makes its output again, call by call."""
    return [args[6:] == (True,) for args in calls.arguments("rms_norm_gate_bwd")]


@dataclasses.dataclass(frozen=True)
class Operator:
    """function(*make(device, dtype, rows, D)) is the operator's result, exact in fp64 the truth."""

    name: str  # in errors
    function: Callable
    exact: Callable
    make: Callable
    forward: object  # what is called, in a graph too
    by_row: tuple[int, ...]  # inputs that have rows, each with a gradient of its own
    casts: tuple[int, ...] = ()  # inputs that autocast casts
    widths: tuple[int, ...] = ()  # D at which a row's bits are its own


def _make_norm(device, dtype, rows=(2, 9), D=40):
    of = {"device": device, "dtype": dtype}
    return [normal(*rows, D, seed=1, **of), normal(D, seed=3, **of), normal(*rows, D, seed=2, **of)]


def _make_residual(*args):
    x, weight, residual = _make_norm(*args)
    return [x, residual, weight]


def _make_norm_linear(device, dtype, rows=(2, 9), D=8):
    """o of 3 heads, gate, weight and norm_weight."""
    of = {"device": device, "dtype": dtype}
    o, gate = (normal(*rows, *shape, seed=i, **of) for i, shape in enumerate([(3, D), (3 * D,)], 1))
    return [o, gate, normal(5, 3 * D, seed=4, **of) / 5, normal(D, seed=3, **of)]


def _make_linear(device, dtype, rows=(2, 9), D=40):
    """gate, up, weight and bias."""
    of = {"device": device, "dtype": dtype}
    gate, up = (normal(*rows, D, seed=i, **of) for i in (1, 2))
    return [gate, up, normal(24, D, seed=4, **of) / D**0.5, normal(24, seed=5, **of)]


def _make_projection(device, dtype, rows=(2, 9), D=40):
    of = {"device": device, "dtype": dtype}
    return [normal(*rows, 16, seed=1, **of), normal(D, 16, seed=2, **of), normal(D, seed=3, **of)]


def _make_convolution(device, dtype, rows=(2, 9), D=40, W=4, N=None):
    return list(conv_inputs.make(*rows, D, W, device, dtype, N=N)[:4])


def _make_packed(device, dtype, rows=(2, 9), D=40):
    T = math.prod(rows)
    offsets = torch.tensor([0, 2, 2, T - 1], device=device)
    return [*_make_convolution(device, dtype, (1, T), D, N=3), offsets]


def _make_logits(device, dtype, rows=(2, 9), D=40):
    return list(loss_inputs.make(math.prod(rows), D, device, dtype)[:2])


def _make_linear_loss(device, dtype, rows=(2, 9), D=16):
    """x, weight and bias of 9 labels, and the labels."""
    x, _, weight, bias = _make_linear(device, dtype, (math.prod(rows),), D)
    labels = torch.arange(len(x), device=device) % 9
    labels[1] = -100
    return [x, weight[:9], bias[:9], labels]


def _convolve(x, weight, bias, cache, offsets=None):
    return short_convolution(x, weight, bias, cache, True, offsets)


LOSS = {
    "logit_softcapping": 3.0,
    "logit_scale": 1.3,
    "label_smoothing": 0.2,
    "lse_square_scale": 0.1,
}
OPERATORS = {
    "norm": Operator(
        "rms_norm_gate",
        lambda x, weight, gate: rms_norm(x, weight, EPS, gate),
        exact_norm,
        _make_norm,
        ops.rms_norm_gate_fwd.default,
        (0, 2),
        widths=(64, 100, 2500),
    ),
    "norm of a stream": Operator(
        "rms_norm_residual",
        lambda *inputs: rms_norm_residual(*inputs, EPS),
        lambda x, residual, weight: (exact_norm(x + residual, weight, None), x + residual),
        _make_residual,
        ops.rms_norm_residual_fwd.default,
        (0, 1),
        widths=(264,),
    ),
    "norm and map": Operator(
        "norm_gate_linear",
        lambda *inputs: ops.norm_gate_linear(*inputs, "swish", EPS),
        lambda o, gate, weight, norm_weight: F.linear(
            exact_norm(o, norm_weight, gate.unflatten(-1, o.shape[-2:])).flatten(-2), weight
        ),
        _make_norm_linear,
        ops.norm_gate_linear.default,
        (0, 1),
        casts=(0, 1, 2),
    ),
    "swiglu": Operator(
        "swiglu",
        swiglu,
        exact_swiglu,
        lambda *args: _make_linear(*args)[:2],
        ops.swiglu_fwd.default,
        (0, 1),
        widths=(64, 77),
    ),
    "swiglu and map": Operator(
        "swiglu_linear",
        swiglu_linear,
        exact_swiglu,
        _make_linear,
        ops.swiglu_linear.default,
        (0, 1),
        casts=(0, 1, 2, 3),
    ),
    "gate": Operator(
        "gate_projection",
        gate_projection,
        lambda h, weight, bias: F.logsigmoid(F.linear(h, weight, bias)) / 16,
        _make_projection,
        ops.gate_projection_fwd.default,
        (0,),
        casts=(0, 1, 2),
        widths=(520,),
    ),
    "convolution": Operator(
        "ShortConvolution",
        _convolve,
        conv_inputs.exact,
        _make_convolution,
        ops.short_convolution_fwd.default,
        (0, 3),
        widths=(72,),
    ),
    "convolution of 6 taps": Operator(
        "ShortConvolution",
        _convolve,
        conv_inputs.exact,
        functools.partial(_make_convolution, W=6),
        ops.short_convolution_fwd.default,
        (0, 3),
        widths=(72,),
    ),
    "packed convolution": Operator(
        "ShortConvolution",
        _convolve,
        lambda *inputs: conv_inputs.exact(*inputs[:4], inputs[4].tolist()),
        _make_packed,
        ops.short_convolution_fwd.default,
        (),
    ),
    "cross entropy": Operator(
        "cross_entropy",
        lambda logits, target: cross_entropy_loss(logits, target, **LOSS)[0],
        lambda logits, target: loss_inputs.exact(logits, target, **LOSS)[0],
        _make_logits,
        ops.cross_entropy_fwd.default,
        (0,),
    ),
    "cross entropy in place": Operator(
        "cross_entropy",
        lambda logits, target: cross_entropy_loss(logits * 1, target, inplace_backward=True)[0],
        lambda logits, target: loss_inputs.exact(logits, target)[0],
        _make_logits,
        ops.cross_entropy_fwd.default,
        (0,),
    ),
    "cross entropy of a map": Operator(
        "linear_cross_entropy",
        lambda x, weight, bias, target: fused_linear_cross_entropy_loss(x, target, weight, bias),
        lambda x, weight, bias, target: F.cross_entropy(F.linear(x, weight, bias), target),
        _make_linear_loss,
        ops.linear_cross_entropy_fwd.default,
        (),
        casts=(0, 1, 2),
    ),
}


def by_operator(*but):
    """Over all operators but some."""
    found = {name: operator for name, operator in OPERATORS.items() if name not in but}
    return pytest.mark.parametrize("operator", found.values(), ids=found)
