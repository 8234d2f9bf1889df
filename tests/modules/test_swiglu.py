"""SwiGLU and its linear map: values, gradients, layouts, what is kept, and errors, against fp64.

Equal bits (see common.py): own sums, and the same products.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from common import CUDA_DTYPES, assert_close
from norm_inputs import BOUND, LAYOUTS, normal
from swiglu_inputs import (
    Calls,
    by_dtype,
    check,
    errors,
    exact,
    kept,
    make,
    make_linear,
    plain,
    results,
    with_bias,
)

from gla_ext.layers.swiglu import swiglu, swiglu_linear

ops = torch.ops.gla_ext
# On CUDA a row has 32 to 256 threads of 16 bytes twice; on CPU pieces of 1,024.
WIDTHS = (1, 7, 8, 64, 257, 1000, 1024, 1025, 4096, 5000)


@pytest.mark.usefixtures("nan_in_fresh_memory")
@by_dtype
@pytest.mark.parametrize("D", WIDTHS)
def test_values_and_gradients(device, D, dtype):
    # Of one column there are few values, whose rounding does not average.
    *inputs, dy = make((2, 9, 3, D), device, dtype)
    check(swiglu, inputs, dy, factor=2.0 if D < 8 else 1.0)


@by_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("D", [64, 72, 77])
def test_layouts(device, D, layout, dtype):
    gate, up, dy = make((2, 9, 3, D), device, dtype, layout)
    check(swiglu, [gate, up], dy)
    check(swiglu, [gate.contiguous(), up], dy)
    check(swiglu, [gate, up], dy.contiguous())


@by_dtype
@pytest.mark.parametrize("D", [1, 60, 64, 1100])
def test_halves_of_one_product(device, D, dtype):
    both = normal(2, 9, 2 * D, seed=1, device=device, dtype=dtype)
    dy = normal(2, 9, D, seed=2, device=device, dtype=dtype)
    gate, up = both.chunk(2, -1)
    check(swiglu, [gate, up], dy, factor=2.0 if D == 1 else 1.0)
    assert torch.equal(swiglu(gate, up), swiglu(gate.clone(), up.clone()))


@by_dtype
@pytest.mark.parametrize("shape", [(70_000, 1, 12), (3, 24_000, 2, 20), (2, 40_001, 1, 8)], ids=str)
def test_many_rows(device, shape, dtype):
    """More than a CUDA grid has rows, with one stride and with two."""
    layout = "heads of a projection" if len(shape) == 4 else None
    gate, up, dy = make(shape, device, dtype, layout)
    if len(shape) == 3:
        gate, up = torch.cat([gate, up], -1).chunk(2, -1)
    check(swiglu, [gate, up], dy)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 5), (0,)], ids=str)
def test_nothing(device, shape):
    *inputs, dy = make(shape, device, torch.float32)
    assert all(t.shape == shape for t in results(swiglu, inputs, dy))
    inputs, dy = make_linear((0, 8), 5, device, torch.float32, biased=True)
    y, *gradients = results(swiglu_linear, inputs, dy)
    assert y.shape == (0, 5)
    assert [g.shape for g in gradients] == [t.shape for t in inputs]
    assert not any(g.any() for g in gradients)


def test_a_vector(device):
    *inputs, dy = make((24,), device, torch.float32)
    check(swiglu, inputs, dy)
    check(swiglu_linear, *make_linear((24,), 5, device, torch.float32))


def test_an_expanded_gradient(device):
    """As sum() hands it over, with strides of 0."""
    *inputs, dy = make((2, 9, 40), device, torch.float32)
    check(swiglu, inputs, dy[:1, :1, :1].expand(dy.shape))


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


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_no_bit(threads):
    *inputs, dy = make((7, 9000), "cpu", torch.float32)
    found, before = [], torch.get_num_threads()
    for count in (2, threads):
        torch.set_num_threads(count)
        found.append(results(swiglu, inputs, dy))
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_results_are_rounded_once(dtype):
    *inputs, dy = make((50, 100), "cpu", dtype)
    wide = results(swiglu, [t.float() for t in inputs], dy.float())
    for got, want in zip(results(swiglu, inputs, dy), wide, strict=True):
        assert torch.equal(got, want.to(dtype))


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
    check(swiglu_linear, *make_linear((2, 9, 3, 40), 24, device, dtype, layout, biased), factor=2.0)


@by_dtype
def test_linear_has_the_bits_of_the_two(device, dtype):
    (gate, up, weight), _ = make_linear((5, 40), 24, device, dtype)
    expected = F.linear(swiglu(gate, up), weight)
    assert torch.equal(swiglu_linear(gate, up, weight), expected)
    with torch.inference_mode():
        assert torch.equal(swiglu_linear(gate, up, weight), expected)


@with_bias
def test_nothing_but_inputs_is_saved(device, biased):
    inputs, _ = make_linear((2, 9, 40), 24, device, torch.float32, biased=biased)
    leaves = [t.requires_grad_() for t in inputs]
    _, saved = kept(lambda: swiglu_linear(*leaves))
    assert set(saved) == {t.data_ptr() for t in leaves[:3]}
    _, saved = kept(lambda: swiglu(*leaves[:2]))
    assert set(saved) == {t.data_ptr() for t in leaves[:2]}


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
    counted = {"mm", "sum", "swiglu_fwd", ("swiglu_bwd", True), ("swiglu_bwd", False)}
    assert {name: calls.made.count(name) for name in counted & set(calls.made)} == expected
    for leaf, got in zip(needed, gradients, strict=True):
        assert_close(got, wanted[leaf], 1e-13, name=leaf)


def test_gradcheck():
    inputs, _ = make_linear((2, 3, 5), 4, "cpu", torch.float64, biased=True)
    leaves = [t.requires_grad_() for t in inputs]
    assert torch.autograd.gradcheck(swiglu, leaves[:2])
    assert torch.autograd.gradcheck(swiglu_linear, leaves[:3])
    assert torch.autograd.gradcheck(swiglu_linear, leaves)


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("B", [2, 0])
@with_bias
def test_opcheck(device, biased, B, requires_grad):
    *pair, dy = make((B, 3, 2, 8), device, torch.float32, "heads of a projection")
    pair = [t.requires_grad_(requires_grad) for t in pair]
    inputs, _ = make_linear((B, 3, 8), 4, device, torch.float32, biased=biased)
    inputs = [t.requires_grad_(requires_grad) for t in inputs]
    torch.library.opcheck(ops.swiglu_linear.default, (*inputs, *[None] * (not biased)))
    torch.library.opcheck(ops.swiglu_fwd.default, pair)
    if not requires_grad:
        torch.library.opcheck(ops.swiglu_bwd.default, (dy, *pair, biased))


@by_dtype
def test_autocast_is_that_of_the_linear_map(device, dtype):
    inputs, dy = make_linear((9, 40), 24, device, dtype, biased=True)
    short = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
    with torch.autocast(device, short):
        found = results(swiglu_linear, inputs, dy.to(dtype if dtype.itemsize == 8 else short))
        assert torch.equal(swiglu(*inputs[:2]), swiglu(*inputs[:2]))
        assert swiglu(*inputs[:2]).dtype == dtype
    cast = short if dtype.itemsize < 8 else dtype
    expected = results(swiglu_linear, [t.to(cast) for t in inputs], dy.to(cast))
    assert [t.dtype for t in found] == [cast, *[dtype] * 4]
    for got, want in zip(found, expected, strict=True):
        assert torch.equal(got, want.to(got.dtype))


def test_backward_under_autocast_is_in_the_dtypes_of_forward(device):
    inputs, dy = make_linear((9, 40), 24, device, torch.float32, biased=True)
    leaves = [t.requires_grad_() for t in inputs]
    expected = results(swiglu_linear, inputs, dy)[1:]
    y = swiglu_linear(*leaves)
    with torch.autocast(device, torch.bfloat16):
        found = torch.autograd.grad(y, leaves, dy)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@by_dtype
def test_plain_operations_round_once(dtype):
    gate, up, _ = make((50, 100), "cpu", dtype)
    wide = torch.promote_types(dtype, torch.float32)
    expected = plain(gate.to(wide), up.to(wide)).to(dtype)
    weight = torch.eye(100, dtype=dtype)  # a product with it rounds nothing
    assert torch.equal(torch.vmap(swiglu)(gate, up), expected)
    assert torch.equal(torch.vmap(swiglu_linear, (0, 0, None))(gate, up, weight), expected)
