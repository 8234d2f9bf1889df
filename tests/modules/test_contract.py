"""What the operators of all modules keep to: gradients, bits, compilers, autocast, transforms.

Equal bits (see common.py): own sums, and the same calls.
"""

import functools

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from common import assert_close, raises
from loss_inputs import linear_inputs
from loss_inputs import make as make_logits
from modules import (
    OPERATORS,
    by_dtype,
    by_operator,
    check,
    differentiable,
    kept,
    results,
    upstream_of,
)
from norm_inputs import EPS, laid_out, normal
from swiglu_inputs import plain
from wrapped import Wrapped

from gla_ext.layers.norms import GatedRMSNorm, plain_rms_norm, rms_norm
from gla_ext.layers.short_convolution import ShortConvolution
from gla_ext.layers.swiglu import swiglu, swiglu_linear
from gla_ext.model import GLAMLP

ops = torch.ops.gla_ext


def leaves_of(operator, *args):
    return [t.requires_grad_() if differentiable(t) else t for t in operator.make("cpu", *args)]


@by_operator("cross entropy in place")
def test_gradcheck(operator):
    leaves = leaves_of(operator, torch.float64, (1, 5), 3)
    assert torch.autograd.gradcheck(operator.function, leaves)
    if operator.forward == ops.cross_entropy_fwd.default:
        assert torch.autograd.gradgradcheck(operator.function, leaves)


# Of each: arguments of forward and of backward, in all ways that they may be absent.


def calls_of_norm(f):
    for B, optionals in ((2, (1, 1)), (0, (1, 1)), (2, (0, 1)), (2, (1, 0))):
        x, gate = (laid_out(f(B, 3, 2, 8), "part of a projection") for _ in range(2))
        weight, gate = f(8) if optionals[0] else None, gate if optionals[1] else None
        rstd = f(B, 3, 2)
        yield ops.rms_norm_gate_fwd, (x, weight, gate, "silu", EPS)
        yield ops.rms_norm_gate_bwd, (f(B, 3, 2, 8), x, weight, gate, rstd, "silu", True)


def calls_of_residual(f):
    for dtype, weight in ((torch.float32, f(8)), (torch.bfloat16, None)):
        x, stream, rstd = f(2, 3, 8, dtype=dtype), f(2, 3, 8), f(2, 3)
        yield ops.rms_norm_residual_fwd, (x, stream, weight, EPS)
        for dstream in (stream, None):
            yield ops.rms_norm_residual_bwd, (x, dstream, stream, weight, rstd)


def calls_of_norm_linear(f):
    for B, weight in ((2, f(8)), (0, None)):
        o, gate = (laid_out(f(B, 3, 3, 8), "part of a projection") for _ in range(2))
        yield ops.norm_gate_linear, (o, gate.flatten(-2), f(5, 24), weight, "silu", EPS)


def calls_of_swiglu(f):
    for B, bias in ((2, f(4)), (0, None)):
        gate, up = (laid_out(f(B, 3, 2, 8), "part of a projection") for _ in range(2))
        yield ops.swiglu_linear, (gate, up, f(4, 8), bias)
        yield ops.swiglu_fwd, (gate, up)
        yield ops.swiglu_bwd, (f(B, 3, 2, 8), gate, up, bias is None)


def calls_of_gate(f):
    for R, dtype, bias in (
        (16, torch.bfloat16, 1),
        (20, torch.bfloat16, 1),
        (16, torch.float32, 0),
    ):
        of = functools.partial(f, dtype=dtype)
        inputs = (of(2, 5, R), of(24, R), of(24) if bias else None, 16.0, -1.0)
        yield ops.gate_projection_fwd, inputs
        yield ops.gate_projection_bwd, (of(2, 5, 24), *inputs)


def calls_of_convolution(f):
    for W, N, given in ((4, None, True), (4, 2, True), (5, 2, False)):
        x, dy = (laid_out(f(1, 6, 8), "part of a projection") for _ in range(2))
        offsets = None if N is None else torch.tensor([0, 2, 5], device=x.device)
        bias, cache = (f(8), f(N or 1, 8, W)) if given else (None, None)
        inputs = (x, f(8, 1, W), bias, cache, offsets)
        yield ops.short_convolution_fwd, (*inputs, given)
        yield ops.short_convolution_bwd, (dy, cache, *inputs)


def calls_of_losses(f):
    options = (-100, 0.1, 1.0, 3.0, 0.01)
    device = f(1).device
    logits, target, _ = make_logits(5, 24, device, torch.float32)
    loss, _, lse = ops.cross_entropy_fwd(logits, target, *options, False)
    yield ops.cross_entropy_fwd, (logits, target, *options, False)
    inputs, labels = linear_inputs(6, device, torch.float32)
    for grad in (True, False):
        yield ops.linear_cross_entropy_fwd, (*inputs, labels, *options[:4], 2, grad, grad)
    yield ops.cross_entropy_bwd, (loss, logits, target, lse, *options)
    yield ops.cross_entropy_bwd_, (loss, logits, target, lse, *options)
    yield ops.cross_entropy_with_grad_, (logits, target, *options)


CALLS = [calls_of_norm, calls_of_residual, calls_of_norm_linear, calls_of_swiglu, calls_of_gate]
CALLS += [calls_of_convolution, calls_of_losses]


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("calls", CALLS, ids=lambda f: f.__name__)
def test_opcheck(device, calls, requires_grad):
    def draw(*shape, dtype=torch.float32):
        return normal(*shape, seed=len(shape), device=device, dtype=dtype)

    for operator, arguments in calls(draw):
        forward = operator.__name__.endswith(("_fwd", "_linear"))
        if not forward and requires_grad:
            continue
        arguments = [
            x.detach().clone().requires_grad_(requires_grad)
            if isinstance(x, torch.Tensor) and x.is_floating_point() and forward
            else x
            for x in arguments
        ]
        torch.library.opcheck(operator.default, tuple(arguments))


OWN_SUMS = ("norm", "norm of a stream", "swiglu", "convolution", "cross entropy")
WIDTHS = [(name, D) for name, operator in OPERATORS.items() for D in operator.widths]


@by_dtype
@pytest.mark.parametrize(("name", "D"), WIDTHS)
def test_the_same_bits_in_every_run_and_for_every_row(device, name, D, dtype):
    if name == "gate" and device == "cuda" and dtype == torch.float32:
        pytest.skip("torch's products, whose bits depend on the number of rows")
    operator = OPERATORS[name]
    inputs = operator.make(device, dtype, (5, 70), D)
    upstream = upstream_of(operator.function, inputs)
    whole, again = (results(operator.function, inputs, upstream) for _ in range(2))
    assert all(map(torch.equal, whole, again))

    def own(tensors):
        return [t[3:4] for t in tensors]

    several = isinstance(upstream, list)
    parts = [t[3:4] if i in operator.by_row else t for i, t in enumerate(inputs)]
    found = results(operator.function, parts, own(upstream) if several else upstream[3:4])
    outputs = len(upstream) if several else 1
    for i in [*range(outputs), *(outputs + i for i in operator.by_row)]:
        assert torch.equal(found[i], whole[i][3:4]), i


@pytest.mark.parametrize("name", OWN_SUMS)
def test_threads_change_no_bit(name):
    operator = OPERATORS[name]
    inputs, before = operator.make("cpu", torch.float32, (2, 300), 1100), torch.get_num_threads()
    upstream, found = upstream_of(operator.function, inputs), []
    for count in (2, 1, 3):
        torch.set_num_threads(count)
        found.append(results(operator.function, inputs, upstream))
    torch.set_num_threads(before)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@by_operator("cross entropy of a map")
def test_an_expanded_gradient(device, operator):
    """As sum() and inductor hand it over, with strides of 0."""
    inputs = operator.make(device, torch.float32)
    upstream = upstream_of(operator.function, inputs)
    if isinstance(upstream, list):
        upstream = [y.new_ones(()).expand(y.shape) for y in upstream]
    else:
        upstream = upstream.new_ones(()).expand(upstream.shape)
    check(operator.function, operator.exact, inputs, upstream, factor=2.0)


ANY_RANK = [name for name in OPERATORS if name[0] != "c" and name[:6] != "packed"]


@pytest.mark.parametrize("rows", [(0,), (1,), (2, 0), ()], ids=str)
@pytest.mark.parametrize("name", ANY_RANK)
def test_no_and_one_row_and_a_vector(device, name, rows):
    operator = OPERATORS[name]
    inputs = operator.make(device, torch.float32, rows, 24)
    check(operator.function, operator.exact, inputs, factor=3.0)


@by_dtype
@by_operator()
def test_autocast(device, operator, dtype):
    """Only inputs of linear maps are cast; all gradients have their inputs' dtypes."""
    inputs = operator.make(device, dtype)
    short = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
    cast = [
        t.to(short) if i in operator.casts and t.dtype != torch.float64 else t
        for i, t in enumerate(inputs)
    ]
    upstream = upstream_of(operator.function, cast)
    with torch.autocast(device, short):
        found = results(operator.function, inputs, upstream)
    expected = results(operator.function, cast, upstream)
    there = list(filter(differentiable, inputs))
    outputs = expected[: -len(there)]
    assert [t.dtype for t in found] == [t.dtype for t in [*outputs, *there]]
    for got, want in zip(found, expected, strict=True):
        assert torch.equal(got, want.to(got.dtype))


@by_operator()
def test_backward_under_autocast_is_in_the_dtypes_of_forward(device, operator):
    inputs = operator.make(device, torch.float32)
    upstream = upstream_of(operator.function, inputs)
    leaves = [t.requires_grad_() if differentiable(t) else t for t in inputs]
    expected = results(operator.function, inputs, upstream)
    outputs = operator.function(*leaves)
    leaves = list(filter(differentiable, leaves))
    with torch.autocast(device, torch.bfloat16):
        found = torch.autograd.grad(outputs, leaves, upstream)
    assert all(map(torch.equal, found, expected[-len(leaves) :]))


@by_operator()
def test_one_dynamic_graph_for_many_lengths(device, operator):
    """The operator is in it, but for the norm of a stream, of which inductor makes a kernel."""
    graphs = []

    def backend(graph, inputs):
        graphs.append([node.target for node in graph.graph.nodes])
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(operator.function, fullgraph=True, dynamic=True, backend=backend)
    for T in (7, 5, 12):
        inputs = operator.make(device, torch.float32, (2, T))
        upstream = upstream_of(operator.function, inputs)
        with torch._dynamo.config.patch(error_on_recompile=True):
            found = results(compiled, inputs, upstream)
        for got, wanted in zip(found, results(operator.function, inputs, upstream), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    expected = operator.name != "rms_norm_residual"
    # Some floats make dynamo begin again: the last graph is the one that stays.
    assert any(operator.forward in (t, getattr(t, "default", t)) for t in graphs[-1]) == expected


@pytest.mark.parametrize("name", ["norm", "swiglu and map", "convolution"])
def test_inductor(device, name):
    operator = OPERATORS[name]
    compiled = torch.compile(operator.function, fullgraph=True, dynamic=True)
    for T in (9, 12):
        inputs = operator.make(device, torch.float32, (2, T))
        upstream = upstream_of(operator.function, inputs)
        if name == "convolution":  # where it lies in a projection
            inputs[0] = laid_out(inputs[0], "part of a projection")
        pair = (results(f, inputs, upstream) for f in (compiled, operator.function))
        for got, wanted in zip(*pair, strict=True):
            torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("name", ["norm and map", "swiglu and map"])
def test_compiled_autograd(name):
    operator = OPERATORS[name]
    leaves = leaves_of(operator, torch.float32)
    y = operator.function(*leaves)
    expected = results(operator.function, leaves, torch.ones_like(y))[1:]
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        y.backward(torch.ones_like(y))
    for leaf, wanted in zip(leaves, expected, strict=True):
        assert_close(leaf.grad, wanted, 1e-6)


@by_operator("norm and map", "cross entropy", "cross entropy in place")
def test_double_backward_is_refused(operator):
    leaves = leaves_of(operator, torch.float32)
    name = operator.name.removesuffix("_linear") if "swiglu" in operator.name else operator.name
    with raises(NotImplementedError, name + ": double backward is not supported"):
        outputs = operator.function(*leaves)
        y = outputs if isinstance(outputs, torch.Tensor) else outputs[0]
        (dx,) = torch.autograd.grad(y.square().sum(), leaves[0], create_graph=True)
        dx.sum().backward()


@pytest.mark.parametrize("name", ["norm", "norm of a stream", "norm and map", "convolution"])
def test_transforms_are_refused(name):
    operator = OPERATORS[name]
    x, *rest = operator.make("cpu", torch.float32)

    def total(x):
        y = operator.function(x, *rest)
        return (y if isinstance(y, torch.Tensor) else y[0]).sum()

    with raises(NotImplementedError, operator.name + ": torch.func transforms"):
        torch.func.grad(total)(x)
    with fwAD.dual_level(), raises(NotImplementedError, operator.name + ": forward-mode AD"):
        total(fwAD.make_dual(x, x))


@pytest.mark.parametrize("name", ["norm", "norm of a stream", "norm and map", "gate"])
def test_vmap(name):
    operator = OPERATORS[name]
    inputs = operator.make("cpu", torch.float64, (3, 4))
    in_dims = tuple(0 if i in operator.by_row else None for i in range(len(inputs)))
    found = torch.vmap(operator.function, in_dims)(*inputs)
    torch.testing.assert_close(found, operator.function(*inputs), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("place", [0, 1])
def test_subclasses_take_plain_operations(place, dtype):
    """In bf16 too, of which autograd keeps nothing wider."""
    gate, up, weight, _ = OPERATORS["swiglu and map"].make("cpu", dtype)
    for function, inputs in ((swiglu, [gate, up]), (swiglu_linear, [gate, up, weight])):
        wrapped = [Wrapped(t) if i == place else t for i, t in enumerate(inputs)]
        assert torch.equal(function(*wrapped).inner, plain(*inputs))
    assert torch.equal(rms_norm(Wrapped(up), None, EPS).inner, plain_rms_norm(up, None, EPS))


CHECKED = {
    "norm alone": (rms_norm, rms_norm),
    "norm": (torch.vmap(rms_norm, (0, None)), rms_norm),
    "swiglu_linear": (torch.vmap(swiglu_linear, (0, 0, None)), plain),
}


@pytest.mark.parametrize("name", CHECKED)
def test_checks_of_plain_operations_make_no_graph_for_a_size(name):
    """And a norm without a gate is plain operations where it is compiled."""
    graphs = []

    def backend(graph, _):
        graphs.append([node.target for node in graph.graph.nodes])
        return graph

    function, expected = CHECKED[name]
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    for B, T, D in ((2, 7, 8), (4, 5, 12), (3, 12, 9)):
        gate, up, weight, _ = OPERATORS["swiglu and map"].make("cpu", torch.float32, (B, T), D)
        inputs = [gate, up, weight] if name == "swiglu_linear" else [gate, weight[0]]
        torch.testing.assert_close(compiled(*inputs), expected(*inputs))
    assert len(graphs) == 1
    assert not any("gla_ext" in str(target) for target in graphs[0])


SAVED = {"norm": 3, "norm and map": 4, "swiglu": 2, "swiglu and map": 3}
ROWS = {"norm": [(2, 9)], "norm and map": [(2, 9, 3)]}


@pytest.mark.parametrize("name", SAVED)
def test_nothing_but_inputs_and_a_number_a_row_is_saved(device, name):
    operator = OPERATORS[name]
    inputs = [t.requires_grad_() for t in operator.make(device, torch.float32)]
    for leaves in (inputs, inputs[: len(inputs) - ("and" in name)]):  # with the last, and without
        if operator.forward == ops.norm_gate_linear.default and len(leaves) == 3:
            call = functools.partial(ops.norm_gate_linear, *leaves, None, "swish", EPS)
        else:
            call = functools.partial(operator.function, *leaves)
        _, saved = kept(call)
        of_inputs = {t.data_ptr() for t in leaves[: SAVED[name]]}
        others = [tuple(t.shape) for address, t in saved.items() if address not in of_inputs]
        assert of_inputs <= set(saved) and others == ROWS.get(name, [])


MODULES = {
    "norm": lambda: GatedRMSNorm(8),
    "convolution": lambda: ShortConvolution(8, 4),
    "swiglu and map": lambda: GLAMLP(8, 16),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_call_the_operators(name):
    """Compiled whole, with the operator in the graph."""
    module, graphs = MODULES[name](), []

    def backend(graph, _):
        graphs.append([node.target for node in graph.graph.nodes])
        return graph

    inputs = [torch.randn(2, 5, 8)] * (1 + (name == "norm"))
    torch.compile(module, fullgraph=True, backend=backend)(*inputs)
    assert OPERATORS[name].forward in graphs[0]
