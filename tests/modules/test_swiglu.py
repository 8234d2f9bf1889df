"""SwiGLU and its linear map: values, gradients, layouts, and compiled, against fp64.

Equal bits (see common.py): own sums, and the same products.
"""

import math

import pytest
import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from common import CUDA_DTYPES, assert_close, raises
from dispatch import Calls
from modules import by_dtype, check, errors, results
from norm_inputs import BOUND, LAYOUTS, normal
from swiglu_inputs import exact, make, make_linear, plain, with_bias
from torch import nn

from gla_ext.layers.swiglu import swiglu, swiglu_linear
from gla_ext.model import GLAMLP, fuse_projections

ops = torch.ops.gla_ext
# On CUDA a row has 32 to 256 threads of 16 bytes twice; on CPU pieces of 1,024.
WIDTHS = (1, 7, 8, 64, 257, 1000, 1024, 1025, 4096, 5000)
MANY = [(70_000, 1, 12), (3, 24_000, 2, 20), (2, 40_001, 1, 8)]  # more rows than a CUDA grid has
SHAPES = [((2, 9, 3, D), None) for D in WIDTHS]
SHAPES += [((2, 9, 3, D), layout) for D in (64, 72, 77) for layout in (*LAYOUTS, "halves")]
SHAPES += [((2, 9, D), "halves") for D in (1, 60, 1100)] + [(MANY[0], "halves")]
SHAPES += [(shape, "part of a projection") for shape in MANY[1:]]


@pytest.mark.usefixtures("nan_in_fresh_memory")
@by_dtype
@pytest.mark.parametrize(("shape", "layout"), SHAPES, ids=str)
def test_values_and_gradients(device, shape, layout, dtype):
    """Of tensors alone, halves of one product, and of more rows with one stride and with two."""
    gate, up, dy = make(shape, device, dtype, None if layout == "halves" else layout)
    if layout == "halves":
        gate, up = torch.cat([gate, up], -1).chunk(2, -1)
    # Of one column there are few values, whose rounding does not average.
    factor = 2.0 if shape[-1] < 8 else 1.0
    y, *_ = check(swiglu, exact, [gate, up], dy, factor)
    if layout is not None and shape not in MANY:
        check(swiglu, exact, [gate.contiguous(), up], dy, factor)
        check(swiglu, exact, [gate, up], dy.contiguous(), factor)
        assert torch.equal(y, swiglu(gate.clone(), up.clone()))


@pytest.mark.parametrize("shape", [(3, 0), (2, 0, 5), (0,)], ids=str)
def test_nothing(device, shape):
    *inputs, dy = make(shape, device, torch.float32)
    assert all(t.shape == shape for t in results(swiglu, inputs, dy))


@by_dtype
def test_an_elements_bits_are_its_own(device, dtype):
    """Whatever its place, its neighbours, the strides and the number of threads."""
    gate, up, dy = make((6, 2100), device, dtype)
    whole = results(swiglu, [gate, up], dy)
    for part in (slice(0, 1), slice(3, 7), slice(5, 2099), slice(1024, None)):
        for strided in (lambda t: t, torch.Tensor.contiguous, lambda t: t[2:3]):
            cut = [strided(t[:, part]) for t in (gate, up, dy)]
            for got, of in zip(results(swiglu, cut[:2], cut[2]), whole, strict=True):
                assert torch.equal(got, strided(of[:, part]))


@pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
@pytest.mark.parametrize("scale", [0.1, 1, 8])
def test_no_further_from_the_truth_than_torch(device, scale, dtype):
    gate, up, dy = make((100, 1000), device, dtype)
    gate = scale * gate
    expected = results(exact, [gate.double(), up.double()], dy.double())
    ours, torchs = (errors(results(f, [gate, up], dy), expected) for f in (swiglu, plain))
    # Of fp32 torch rounds no step shorter than it computes it.
    bound = 1.03 if dtype == torch.float32 else 1.0
    assert all(a <= bound * b for a, b in zip(ours, torchs, strict=True)), (ours, torchs)


@pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
def test_gates_far_out(device, dtype):
    """What plain torch gives, and NaN where that has it alone."""
    far = [0.0, -0.0, 1e-3, 9.0, -9.0, 80.0, -80.0, 95.0, -95.0, 3e4, -3e4]
    most = torch.finfo(dtype).max
    gate = torch.tensor([*far, most, -most, math.inf, -math.inf, math.nan] * 2, dtype=dtype)
    gate, up = gate.to(device), normal(len(gate), seed=1, device=device, dtype=dtype)
    dy = torch.full_like(up, 0.25)
    found, expected = (results(f, [gate, up], dy) for f in (swiglu, plain))
    for got, want in zip(found, expected, strict=True):
        assert not (got.isnan() & ~want.isnan()).any()
        torch.testing.assert_close(got, want, rtol=4 * BOUND[dtype], atol=1e-6, equal_nan=True)


def test_a_product_that_overflows_spoils_no_gradient():
    """Of a closed gate, whose slope is 0: dy * up is infinite."""
    gate, large = torch.tensor([-200.0]), torch.tensor([1e30])
    _, dgate, dup = results(swiglu, [gate, large], large)
    assert dgate == 0 and dup == 0


def test_tensors_of_two_dtypes_are_promoted(device):
    gate, up, _ = make((4, 40), device, torch.float32)
    for a, b in ((gate.bfloat16(), up), (gate, up.half()), (gate.bfloat16(), up.half())):
        y = swiglu(a, b)
        assert y.dtype == torch.float32
        assert torch.equal(y, swiglu(a.float(), b.float()))
        weight = torch.ones(3, 40, device=device)
        assert_close(swiglu_linear(a, b, weight), F.linear(y, weight), 1e-6)
        assert torch.equal(torch.compile(swiglu, fullgraph=True, backend="eager")(a, b), y)


@by_dtype
@with_bias
@pytest.mark.parametrize("layout", LAYOUTS)
def test_linear(device, layout, biased, dtype):
    inputs, dy = make_linear((2, 9, 3, 40), 24, device, dtype, layout, biased)
    check(swiglu_linear, exact, inputs, dy, factor=2.0)


@by_dtype
def test_linear_has_the_bits_of_the_two(device, dtype):
    (gate, up, weight), _ = make_linear((5, 40), 24, device, dtype)
    expected = F.linear(swiglu(gate, up), weight)
    assert torch.equal(swiglu_linear(gate, up, weight), expected)
    with torch.inference_mode():
        assert torch.equal(swiglu_linear(gate, up, weight), expected)


@pytest.mark.parametrize(
    ("needed", "expected"),
    [
        ("gate up weight bias", {("swiglu_bwd", True): 1, "mm": 2, "sum": 1}),
        ("gate up", {("swiglu_bwd", False): 1, "mm": 1}),
        ("up bias", {("swiglu_bwd", False): 1, "mm": 1, "sum": 1}),
        ("weight", {"swiglu_fwd": 1, "mm": 1}),
        ("bias", {"sum": 1}),
    ],
)
def test_backward_does_what_is_asked_for(needed, expected):
    inputs, dy = make_linear((9, 40), 24, "cpu", torch.float64, biased=True)
    wanted = results(exact, inputs, dy)[1:]
    wanted = dict(zip(("gate", "up", "weight", "bias"), wanted, strict=True))
    leaves = dict(zip(wanted, (t.detach() for t in inputs), strict=True))
    needed = needed.split()
    for leaf in needed:
        leaves[leaf].requires_grad_()
    y = swiglu_linear(*leaves.values())
    with Calls() as calls:
        gradients = torch.autograd.grad(y, [leaves[leaf] for leaf in needed], dy)
    made = [(name, args[3]) if name == "swiglu_bwd" else name for name, args, _ in calls.made]
    counted = {"mm", "sum", "swiglu_fwd", ("swiglu_bwd", True), ("swiglu_bwd", False)}
    assert {name: made.count(name) for name in counted & set(made)} == expected
    for leaf, got in zip(needed, gradients, strict=True):
        assert_close(got, wanted[leaf], 1e-13, name=leaf)


@by_dtype
def test_results_are_rounded_once(dtype):
    """Those of plain operations too."""
    gate, up, dy = make((50, 100), "cpu", dtype)
    wide = torch.promote_types(dtype, torch.float32)
    expected = results(swiglu, [gate.to(wide), up.to(wide)], dy.to(wide))
    for got, want in zip(results(swiglu, [gate, up], dy), expected, strict=True):
        assert torch.equal(got, want.to(dtype))
    by_torch = plain(gate.to(wide), up.to(wide)).to(dtype)
    weight = torch.eye(100, dtype=dtype)  # a product with it rounds nothing
    assert torch.equal(torch.vmap(swiglu)(gate, up), by_torch)
    assert torch.equal(torch.vmap(swiglu_linear, (0, 0, None))(gate, up, weight), by_torch)


@pytest.mark.parametrize(
    ("function", "operator"), [(swiglu, "swiglu_fwd"), (swiglu_linear, "swiglu_linear")]
)
def test_transforms_take_plain_operations_and_the_operators_refuse_them(function, operator):
    inputs, _ = make_linear((3, 8), 4, "cpu", torch.float64)
    inputs = inputs[: 2 + (function is swiglu_linear)]
    call = getattr(ops, operator)
    name = call.default.name().split("::")[1].removesuffix("_fwd")
    rest = [*inputs[1:], *[None] * (function is swiglu_linear)]

    def total(f):
        return lambda gate: f(gate, *inputs[1:]).sum()

    expected = torch.func.grad(total(plain))(inputs[0])
    assert torch.equal(torch.func.grad(total(function))(inputs[0]), expected)
    with raises(NotImplementedError, name + ": torch.func transforms"):
        torch.func.grad(lambda gate: call(gate, *rest).sum())(inputs[0])
    compiled = torch.compile(torch.func.grad(total(function)), fullgraph=True, backend="aot_eager")
    assert_close(compiled(inputs[0]), expected, 1e-14)
    with fwAD.dual_level():
        dual = fwAD.make_dual(inputs[0], inputs[0].cos())
        tangents = [fwAD.unpack_dual(f(dual, *inputs[1:])).tangent for f in (function, plain)]
        assert torch.equal(*tangents)
        with raises(NotImplementedError, name + ": forward-mode AD"):
            call(dual, *rest)
    stacked = torch.stack([inputs[0], inputs[1]])
    found = torch.vmap(lambda gate: function(gate, *inputs[1:]))(stacked)
    assert_close(found[1], plain(inputs[1], *inputs[1:]), 1e-14)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("strict", [True, False])
def test_export(strict, grad):
    mlp, x = GLAMLP(8, 16), normal(2, 5, 8, seed=1, dtype=torch.float32)
    shapes = ({1: torch.export.Dim("T", min=2)},)
    with torch.set_grad_enabled(grad):
        program = torch.export.export(mlp, (x,), dynamic_shapes=shapes, strict=strict)
    targets = [node.target for node in program.run_decompositions().graph.nodes]
    assert targets.count(ops.swiglu_fwd.default) == 1
    longer = normal(2, 9, 8, seed=1, dtype=torch.float32)
    torch.testing.assert_close(program.module()(longer), mlp(longer))


def make_mlp():
    torch.manual_seed(0)
    return GLAMLP(24, 40)


@pytest.mark.parametrize("fused", [False, True])
def test_a_decoded_token_has_one_operator_between_its_products(fused):
    mlp, x = make_mlp(), torch.randn(3, 1, 24)
    if fused:
        fuse_projections(mlp)
    with torch.no_grad(), Calls() as calls:
        mlp(x)
    assert calls.count("swiglu_fwd") == 1 and calls.count("mm") == 3 - fused
    views = {"t", "view", "_unsafe_view", "split_with_sizes", "split", "as_strided", "slice"}
    assert set(calls.names()) - views <= {"mm", "swiglu_fwd", "detach"}


@pytest.mark.parametrize("change", ["hook", "bias"])
def test_a_down_projection_that_is_more_than_its_weight_is_called(change):
    """layers/test_plain_modules.py has what else there may be."""
    mlp, x, seen = make_mlp(), torch.randn(2, 9, 24), []
    expected = mlp(x)
    if change == "hook":
        mlp.down_proj.register_forward_hook(lambda *_: seen.append(1))
    else:
        mlp.down_proj.bias = nn.Parameter(torch.randn(24))
        expected = expected + mlp.down_proj.bias
    assert_close(mlp(x), expected, 1e-6)
    assert seen == [1] * (change == "hook")
