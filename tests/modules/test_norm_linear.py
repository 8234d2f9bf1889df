"""The linear map of the norm of heads: values, gradients and what is kept, against fp64.

Equal bits (see common.py): own sums, and the same products.
"""

import math
import re

import pytest
import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from common import assert_close
from models import FUNCTIONS
from norm_inputs import BOUND, EPS, MadeAgain, exact, laid_out, normal
from swiglu_inputs import by_dtype, compiled_forward, errors, kept, results
from torch.utils.flop_counter import FlopCounterMode

import gla_ext.export

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


@by_dtype
@weighted
@pytest.mark.parametrize("rows", [(2, 9), (7,), (0,), ()], ids=str)
def test_values_and_gradients(device, rows, weighted, dtype):
    inputs, dy = make(device, dtype, weighted, rows)
    found = results(call, inputs, dy)
    expected = results(by_definition, [t.double() for t in inputs], dy.double())
    assert [t.dtype for t in found] == [dtype] * len(found)
    assert max(errors(found, expected)) < 4 * BOUND[dtype]


@by_dtype
@weighted
def test_the_bits_are_those_of_norm_and_map(device, weighted, dtype):
    """Rows of the gate lie among those of other projections."""
    inputs, dy = make(device, dtype, weighted, layout="heads of a projection")
    found, expected = (results(f, inputs, dy) for f in (call, composed))
    for i, (got, wanted) in enumerate(zip(found, expected, strict=True)):
        if device == "cuda" and i == 4:  # dnorm_weight, a sum over blocks, which may be others
            assert_close(got, wanted, max(BOUND[dtype], BOUND[torch.float32]))
        else:
            assert torch.equal(got, wanted), i


@pytest.mark.parametrize("activation", FUNCTIONS)
def test_activations(activation):
    inputs, dy = make()
    of = {"activation": activation}
    found = results(lambda *t: call(*t, **of), inputs, dy)
    expected = results(lambda *t: by_definition(*t, **of), inputs, dy)
    assert max(errors(found, expected)) < 1e-13


@weighted
def test_nothing_but_inputs_and_a_number_a_row_is_saved(device, weighted):
    inputs, _ = make(device, torch.float32, weighted)
    leaves = [t.requires_grad_() for t in inputs]
    _, saved = kept(lambda: call(*leaves))
    others = [t for address, t in saved.items() if address not in {x.data_ptr() for x in leaves}]
    assert len(saved) == len(leaves) + 1
    assert [tuple(t.shape) for t in others] == [(2, 9, 3)]


def results_of(trained, wanted, inputs, dy):
    """Gradients of inputs by their places, of which `trained` have one, and calls of the norm's
    backward with whether they make its output again.
    """
    leaves = [t.detach().requires_grad_(i in trained) for i, t in enumerate(inputs)]
    y = call(*leaves)
    with MadeAgain() as made:
        gradients = torch.autograd.grad(y, [leaves[i] for i in wanted], dy)
    return gradients, made.again


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


@weighted
def test_many_gradients_at_once(weighted):
    inputs, _ = make(weighted=weighted)
    leaves = [t.requires_grad_() for t in inputs]
    y = call(*leaves)
    dys = torch.stack([y.detach().sin(), y.detach().cos(), torch.zeros_like(y)])
    at_once = torch.autograd.grad(y, leaves, dys, retain_graph=True, is_grads_batched=True)
    one_by_one = [torch.autograd.grad(y, leaves, dy, retain_graph=True) for dy in dys]
    for got, *wanted in zip(at_once, *one_by_one, strict=True):
        assert_close(got, torch.stack(wanted), 1e-13)


@weighted
def test_gradcheck(weighted):
    inputs, _ = make(weighted=weighted, rows=(2,))
    assert torch.autograd.gradcheck(call, [t.requires_grad_() for t in inputs])


@weighted
@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("B", [2, 0])
def test_opcheck(device, B, requires_grad, weighted):
    inputs, _ = make(device, torch.float32, weighted, (B, 3), "heads of a projection")
    inputs = [t.requires_grad_(requires_grad) for t in inputs]
    norm_weight = [] if weighted else [None]
    args = (*inputs, *norm_weight, "silu", EPS)
    torch.library.opcheck(ops.norm_gate_linear.default, args)


@by_dtype
def test_autocast_casts_all_but_the_weight_of_the_norm(device, dtype):
    inputs, dy = make(device, dtype)
    short = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
    cast = short if dtype.itemsize < 8 else dtype
    with torch.autocast(device, short):
        found = results(call, inputs, dy.to(cast))
    expected = results(call, [*(t.to(cast) for t in inputs[:3]), inputs[3]], dy.to(cast))
    assert [t.dtype for t in found] == [cast, *[dtype] * 4]
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(found, expected, strict=True))


def test_backward_under_autocast_is_in_the_dtypes_of_forward(device):
    inputs, dy = make(device, torch.float32)
    leaves = [t.requires_grad_() for t in inputs]
    expected = results(call, inputs, dy)[1:]
    y = call(*leaves)
    with torch.autocast(device, torch.bfloat16):
        found = torch.autograd.grad(y, leaves, dy)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_compiled_graph_keeps_no_norm():
    large = {}
    inputs, dy = make(dtype=torch.float32)
    for f in (call, composed):
        found, targets, shapes = compiled_forward(f, inputs, dy)
        large[f] = [s for s in shapes if math.prod(s) == 2 * 9 * 24]
        assert ops.norm_gate_linear.default not in targets
        assert max(errors(found, results(f, inputs, dy))) < BOUND[torch.float32]
    assert len(large[call]) == 2  # o and the gate
    assert len(large[composed]) == 3


def test_inductor(device):
    compiled = torch.compile(call, fullgraph=True, dynamic=True)
    for T in (9, 12):
        inputs, dy = make(device, torch.float32, rows=(2, T))
        for got, want in zip(results(compiled, inputs, dy), results(call, inputs, dy), strict=True):
            torch.testing.assert_close(got, want)


def test_compiled_autograd():
    inputs, dy = make(dtype=torch.float32)
    expected = results(call, inputs, dy)[1:]
    leaves = [t.detach().requires_grad_() for t in inputs]
    y = call(*leaves)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        y.backward(dy)
    for leaf, wanted in zip(leaves, expected, strict=True):
        assert_close(leaf.grad, wanted, 1e-6)


def raises(error, message):
    return pytest.raises(error, match="^" + re.escape(message))


def test_errors(device):
    (o, gate, weight, norm_weight), _ = make(device, torch.float32)
    name = "norm_gate_linear: expected "
    with raises(ValueError, name + "o to have at least 2 dimensions [..., H, V], got 1"):
        call(o[0, 0, 0], gate, weight, norm_weight)
    with raises(ValueError, name + "norm_weight to have shape [V] = [8], got [7]"):
        call(o, gate, weight, norm_weight[1:])
    with raises(ValueError, name + "gate to have shape [..., H * V] = [2, 9, 24], got [2, 9, 23]"):
        call(o, gate[..., 1:], weight, norm_weight)
    with raises(ValueError, name + "weight to have shape [N, D] = [5, 24], got [5, 23]"):
        call(o, gate, weight[:, 1:], norm_weight)
    with raises(TypeError, name + "gate to be torch.float32 like o, got torch.bfloat16"):
        call(o, gate.bfloat16(), weight, norm_weight)
    with raises(TypeError, name + "weight to be torch.float32 like o, got torch.bfloat16"):
        call(o, gate, weight.bfloat16(), norm_weight)
    with raises(ValueError, name + "weight on the device of o, "):
        call(o, gate, weight.to("meta"), norm_weight)
    with raises(ValueError, name + "activation to be one of relu, sigmoid, logsigmoid, "):
        call(o, gate, weight, norm_weight, activation="tanh")


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


def test_transforms_are_refused():
    (o, *rest), _ = make()
    with raises(NotImplementedError, "norm_gate_linear: torch.func transforms"):
        torch.func.grad(lambda o: call(o, *rest).sum())(o)
    with fwAD.dual_level(), raises(NotImplementedError, "norm_gate_linear: forward-mode AD"):
        call(fwAD.make_dual(o, o), *rest)


def test_vmap():
    (o, gate, weight, norm_weight), _ = make()
    mapped = torch.vmap(call, (0, 0, None, None))
    assert_close(mapped(o, gate, weight, norm_weight), call(o, gate, weight, norm_weight), 1e-14)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_flops(mode):
    with mode():
        inputs, _ = make(rows=(7,))
        inputs = [t.requires_grad_(mode is torch.enable_grad) for t in inputs]
        with FlopCounterMode(display=False) as counter:
            call(*inputs)
    assert counter.get_total_flops() == 2 * 7 * 24 * 5


@weighted
def test_it_decomposes(weighted):
    inputs, _ = make(weighted=weighted)
    decomposed = gla_ext.export.decompositions()[ops.norm_gate_linear.default]
    norm_weight = inputs[3] if weighted else None
    found = decomposed(*inputs[:3], norm_weight, "swish", EPS)
    assert_close(found, call(*inputs), 1e-13)
