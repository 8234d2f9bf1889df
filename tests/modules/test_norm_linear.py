"""The linear map of the norm of heads: values, gradients and what is kept, against fp64."""

import math
import re

import pytest
import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from common import CUDA_DTYPES, assert_close
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from models import FUNCTIONS
from norm_inputs import BOUND, EPS, MadeAgain, exact, laid_out, normal
from swiglu_inputs import by_dtype, errors, kept, results
from torch._dynamo.backends.common import aot_autograd

ops = torch.ops.gla_ext
weighted = pytest.mark.parametrize("weighted", [True, False], ids=["", "no weight"])


def make(device="cpu", dtype=torch.float64, weighted=True, rows=(2, 9), layout="contiguous"):
    """o, norm_weight, gate and weight, of 3 heads of 8 and an output of 5; and its gradient."""
    of = {"device": device, "dtype": dtype}
    o = normal(*rows, 3, 8, seed=1, **of)
    gate = normal(*rows, 3, 8, seed=2, **of)
    gate = (gate if layout == "contiguous" else laid_out(gate, layout)).flatten(-2)
    weight = normal(5, 24, seed=4, **of) / 5
    norm_weight = [normal(8, seed=3, **of)] if weighted else []
    return [o, *norm_weight, gate, weight], normal(*rows, 5, seed=5, **of)


def call(*inputs, activation="swish"):
    o, *norm_weight, gate, weight = inputs
    norm_weight = norm_weight[0] if norm_weight else None
    return ops.norm_gate_linear(o, norm_weight, EPS, activation, gate, weight)


def by_definition(*inputs, activation="swish"):
    o, *norm_weight, gate, weight = inputs
    norm_weight = norm_weight[0] if norm_weight else None
    y = exact(o, norm_weight, gate.unflatten(-1, o.shape[-2:]), activation)
    return F.linear(y.flatten(-2), weight)


def composed(*inputs):
    """By the operator of the norm, whose result autograd keeps."""
    o, *norm_weight, gate, weight = inputs
    norm_weight = norm_weight[0] if norm_weight else None
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
    rounding = 1 if dtype == torch.float64 or device == "cpu" else BOUND[torch.float32]
    for i, (got, wanted) in enumerate(zip(found, expected, strict=True)):
        if device == "cuda" and weighted and i == 2:  # a sum over blocks, which may be others
            assert_close(got, wanted, max(BOUND[dtype], rounding))
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


@weighted
@pytest.mark.parametrize("frozen", ["", "weight", "others"])
def test_the_norm_is_made_again_where_its_weight_is_trained(frozen, weighted):
    inputs, dy = make(weighted=weighted)
    expected = results(by_definition, inputs, dy)[1:]
    trained = [
        i for i in range(len(inputs)) if (i < len(inputs) - 1) != (frozen == "others") or not frozen
    ]
    leaves = [t.detach().requires_grad_(i in trained) for i, t in enumerate(inputs)]
    y = call(*leaves)
    with MadeAgain() as made:
        gradients = torch.autograd.grad(y, [leaves[i] for i in trained], dy)
    assert made.again == [frozen != "weight"]
    assert max(errors(gradients, [expected[i] for i in trained])) < 1e-13


@weighted
def test_gradcheck(weighted):
    inputs, _ = make(weighted=weighted, rows=(2,))
    assert torch.autograd.gradcheck(call, [t.requires_grad_() for t in inputs])


@weighted
@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("B", [2, 0])
def test_opcheck(device, B, requires_grad, weighted):
    inputs, _ = make(device, torch.float32, weighted, (B, 3), "heads of a projection")
    o, *norm_weight, gate, weight = (t.requires_grad_(requires_grad) for t in inputs)
    norm_weight = norm_weight[0] if norm_weight else None
    args = (o, norm_weight, EPS, "silu", gate, weight)
    torch.library.opcheck(ops.norm_gate_linear.default, args)


@pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
def test_autocast_changes_no_dtype(device, dtype):
    """The layer hands over what is in one dtype; backward is in those of forward."""
    inputs, dy = make(device, dtype)
    expected = results(call, inputs, dy)
    with torch.autocast(device, torch.float16 if dtype == torch.bfloat16 else torch.bfloat16):
        found = results(call, inputs, dy)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_compiled_graph_keeps_no_norm():
    large = {}
    inputs, dy = make(dtype=torch.float32)
    for f in (call, composed):

        def forward(graph, _, f=f):
            (outputs,) = next(n for n in graph.graph.nodes if n.op == "output").args
            shapes = [n.meta["val"].shape for n in outputs[1:]]
            large[f] = [s for s in shapes if math.prod(s) == 2 * 9 * 24]
            assert ops.norm_gate_linear.default not in [n.target for n in graph.graph.nodes]
            return make_boxed_func(graph)

        backend = aot_autograd(
            fw_compiler=forward,
            bw_compiler=lambda graph, _: make_boxed_func(graph),
            partition_fn=min_cut_rematerialization_partition,
        )
        compiled = torch.compile(f, fullgraph=True, backend=backend)
        expected = results(f, inputs, dy)
        assert max(errors(results(compiled, inputs, dy), expected)) < BOUND[torch.float32]
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
    assert all(torch.equal(t.grad, g) for t, g in zip(leaves, expected, strict=True))


def raises(error, message):
    return pytest.raises(error, match="^" + re.escape(message))


def test_errors(device):
    (o, norm_weight, gate, weight), _ = make(device, torch.float32)
    name = "norm_gate_linear: expected "
    with raises(ValueError, name + "o to have at least 2 dimensions [..., H, V], got 1"):
        call(o[0, 0, 0], norm_weight, gate, weight)
    with raises(ValueError, name + "norm_weight to have shape [V] = [8], got [7]"):
        call(o, norm_weight[1:], gate, weight)
    with raises(ValueError, name + "gate to have shape [..., H * V] = [2, 9, 24], got [2, 9, 23]"):
        call(o, norm_weight, gate[..., 1:], weight)
    with raises(ValueError, name + "weight to have shape [N, D] = [5, 24], got [5, 23]"):
        call(o, norm_weight, gate, weight[:, 1:])
    with raises(TypeError, name + "gate to be torch.float32 like o, got torch.bfloat16"):
        call(o, norm_weight, gate.bfloat16(), weight)
    with raises(TypeError, name + "weight to be torch.float32 like o, got torch.bfloat16"):
        call(o, norm_weight, gate, weight.bfloat16())
    with raises(ValueError, name + "weight on the device of o, "):
        call(o, norm_weight, gate, weight.to("meta"))
    with raises(ValueError, "rms_norm_gate: expected activation to be one of "):
        call(o, norm_weight, gate, weight, activation="tanh")


def test_what_is_not_differentiated():
    inputs, _ = make()
    leaves = [t.requires_grad_() for t in inputs]
    gradients = torch.autograd.grad(call(*leaves).square().sum(), leaves, create_graph=True)
    with raises(NotImplementedError, "rms_norm_gate: double backward is not supported"):
        gradients[0].sum().backward()
    o, *rest = inputs
    with raises(NotImplementedError, "norm_gate_linear: torch.func transforms"):
        torch.func.grad(lambda o: call(o, *rest).sum())(o)
    with fwAD.dual_level(), raises(NotImplementedError, "norm_gate_linear: forward-mode AD"):
        call(fwAD.make_dual(o.detach(), o.detach()), *rest)
