"""The linear map of the norm of heads: values, gradients and what is kept, against fp64.

Equal bits (see common.py): own sums, and the same products.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from common import assert_close, raises
from dispatch import Calls
from models import FUNCTIONS
from modules import by_dtype, check, errors, kept, made_again, results
from norm_inputs import BOUND, EPS, exact, laid_out, normal

ops = torch.ops.gla_ext
weighted = pytest.mark.parametrize("weighted", [True, False], ids=["", "no weight"])


def make(device="cpu", dtype=torch.float64, weighted=True, rows=(2, 9), layout="contiguous"):
    """o, gate, weight and norm_weight, of 3 heads of 8 and an output of 5; and its gradient."""
    of = {"device": device, "dtype": dtype}
    o = normal(*rows, 3, 8, seed=1, **of)
    gate = normal(*rows, 3, 8, seed=2, **of)
    gate = (gate if layout == "contiguous" else laid_out(gate, layout)).flatten(-2)
    weight = normal(5, 24, seed=4, **of) / 5
    norm_weight = [normal(8, seed=3, **of)] if weighted else []
    return [o, gate, weight, *norm_weight], normal(*rows, 5, seed=5, **of)


def call(o, gate, weight, norm_weight=None, activation="swish"):
    return ops.norm_gate_linear(o, gate, weight, norm_weight, activation, EPS)


def by_definition(o, gate, weight, norm_weight=None, activation="swish"):
    y = exact(o, norm_weight, gate.unflatten(-1, o.shape[-2:]), activation)
    return F.linear(y.flatten(-2), weight)


def composed(o, gate, weight, norm_weight=None):
    """By the operator of the norm, whose result autograd keeps."""
    y, _ = ops.rms_norm_gate_fwd(o, norm_weight, gate.unflatten(-1, o.shape[-2:]), "swish", EPS)
    return F.linear(y.flatten(-2), weight)


CASES = [((2, 9), "swish"), ((7,), "swish")] + [((2, 9), activation) for activation in FUNCTIONS]


@by_dtype
@weighted
@pytest.mark.parametrize(("rows", "activation"), CASES, ids=str)
def test_values_and_gradients(device, rows, activation, weighted, dtype):
    inputs, dy = make(device, dtype, weighted, rows)
    ours, truth = (partial(f, activation=activation) for f in (call, by_definition))
    check(ours, truth, inputs, dy, factor=4.0)


@by_dtype
@weighted
def test_the_bits_are_those_of_norm_and_map(device, weighted, dtype):
    """Rows of the gate lie among those of other projections."""
    inputs, dy = make(device, dtype, weighted, layout="part of a projection")
    found, expected = (results(f, inputs, dy) for f in (call, composed))
    for i, (got, wanted) in enumerate(zip(found, expected, strict=True)):
        if device == "cuda" and i == 4:  # dnorm_weight, a sum over blocks, which may be others
            assert_close(got, wanted, max(BOUND[dtype], BOUND[torch.float32]))
        else:
            assert torch.equal(got, wanted), i


def results_of(trained, wanted, inputs, dy):
    """Gradients of inputs by their places, of which `trained` have one, and calls of the norm's
    backward with whether they make its output again.
    """
    leaves = [t.detach().requires_grad_(i in trained) for i, t in enumerate(inputs)]
    y = call(*leaves)
    with Calls() as calls:
        gradients = torch.autograd.grad(y, [leaves[i] for i in wanted], dy)
    return gradients, made_again(calls)


@pytest.mark.parametrize(
    ("wanted", "again"),
    [
        ((0, 1, 2, 3), [True]),
        ((0,), [False]),
        ((1,), [False]),
        ((3,), [False]),
        ((2,), []),
        ((2, 3), [True]),
        ((0, 1, 2), [True]),
    ],
    ids=str,
)
def test_backward_does_what_is_asked_for(wanted, again):
    inputs, dy = make()
    expected = results(by_definition, inputs, dy)[1:]
    for trained in (wanted, range(4)):
        gradients, made = results_of(trained, wanted, inputs, dy)
        assert made == again
        assert max(errors(gradients, [expected[i] for i in wanted])) < 1e-13
    if 3 not in wanted:
        inputs, dy = make(weighted=False)
        expected = results(by_definition, inputs, dy)[1:]
        gradients, made = results_of(wanted, wanted, inputs, dy)
        assert made == again
        assert max(errors(gradients, [expected[i] for i in wanted])) < 1e-13


def test_a_map_that_is_trained_alone_keeps_its_input():
    """Less than the inputs of the norm; and its weight, which it does not keep, may be changed."""
    (o, gate, weight, norm_weight), dy = make()
    weight.requires_grad_()
    y, saved = kept(lambda: call(o, gate, weight, norm_weight))
    assert [t.numel() for t in saved.values()] == [o.numel()]
    with torch.no_grad():
        weight.zero_()
    expected = torch.autograd.grad(by_definition(o, gate, weight, norm_weight), weight, dy)[0]
    assert_close(torch.autograd.grad(y, weight, dy)[0], expected, 1e-13)


def test_what_is_differentiated_twice():
    """The gradient of the map's weight; those of the norm are not."""
    inputs, dy = make()
    leaves = [t.requires_grad_() for t in inputs]
    found = []
    for f in (call, by_definition):
        (gradient,) = torch.autograd.grad(f(*leaves), leaves[2], dy, create_graph=True)
        found.append(torch.autograd.grad(gradient.square().sum(), [leaves[0], leaves[3]]))
    assert max(errors(*found)) < 1e-12
    gradients = torch.autograd.grad(call(*leaves).square().sum(), leaves, create_graph=True)
    with raises(NotImplementedError, "rms_norm_gate: double backward is not supported"):
        gradients[0].sum().backward()
