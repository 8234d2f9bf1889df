"""The gate's low-rank projection: values, gradients, layouts and errors, against fp64.

Equal bits (see common.py): own sums.
"""

import math
import re

import pytest
import torch
from common import DTYPES
from norm_inputs import BOUND, laid_out, normal

from gla_ext.layers.gate_projection import gate_projection, plain_gate_projection

ops = torch.ops.gla_ext
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# On CUDA a warp has 32 columns and a block of backward 512.
WIDTHS = (1, 7, 32, 72, 512, 520, 1030)


def exact(h, weight, bias=None, normalizer=16, clamp_min=None):
    """In fp64, by the definitions."""
    z = h @ weight.T if bias is None else h @ weight.T + bias
    g = -(1 + (-z).exp()).log() / normalizer
    return g if clamp_min is None else g.maximum(g.new_tensor(clamp_min))


def make(rows, R, K, device, dtype):
    h = normal(*rows, R, seed=1, device=device, dtype=dtype)
    weight = normal(K, R, seed=2, device=device, dtype=dtype)
    bias = normal(K, seed=3, device=device, dtype=dtype)
    return [h, weight, bias], normal(*rows, K, seed=4, device=device, dtype=dtype)


def error(found, expected):
    return ((found.double() - expected).norm() / expected.norm().clamp_min(1e-300)).item()


def check(inputs, dg, factor=1.0, function=gate_projection, **options):
    leaves = [t.detach().requires_grad_() for t in inputs if t is not None]
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    found, expected = function(*leaves, **options), exact(*doubles, **options)
    assert found.is_contiguous()
    gradients = torch.autograd.grad(found, leaves, dg)
    wanted = torch.autograd.grad(expected, doubles, dg.double())
    for of, got, want in zip([dg, *leaves], [found, *gradients], [expected, *wanted], strict=True):
        assert got.dtype == of.dtype and got.shape == of.shape
        # On CUDA dz is rounded before products, as of two operations.
        assert error(got, want) < factor * (2 if of is not dg else 1) * BOUND[of.dtype]


@by_dtype
@pytest.mark.parametrize("R", [1, 5, 16, 20])
@pytest.mark.parametrize("K", WIDTHS)
def test_values_and_gradients(device, K, R, dtype):
    inputs, dg = make((2, 45), R, K, device, dtype)
    # One number may be the small sum of large terms.
    check(inputs, dg, factor=20.0 if R * K == 1 else 2.0)


def without_near(dg, inputs, clamp_min):
    """dg, but 0 where rounding would decide whether the bound holds."""
    z = inputs[0].double() @ inputs[1].double().T + inputs[2].double()
    near = (torch.nn.functional.logsigmoid(z) / 16 - clamp_min).abs() < 1e-4
    return dg.masked_fill(near, 0)


@by_dtype
@pytest.mark.parametrize("clamp_min", [-0.03, 0.0, -1000.0])
def test_clamped(device, clamp_min, dtype):
    inputs, dg = make((90,), 16, 72, device, dtype)
    check(inputs, without_near(dg, inputs, clamp_min), factor=2.0, clamp_min=clamp_min)


def operator(h, weight, bias=None, clamp_min=None):
    return ops.gate_projection_fwd.default(h, weight, bias, 16.0, clamp_min)


@by_dtype
@pytest.mark.parametrize("R", [5, 16, 20])
@pytest.mark.parametrize("rows", [(), (2, 45), (0,)])
def test_the_operator_takes_what_has_no_kernel(device, rows, R, dtype):
    """Called directly, since on CUDA the function passes it only what its kernels take."""
    inputs, dg = make(rows, R, 72, device, dtype)
    check(inputs, dg, factor=2.0, function=operator)
    check([*inputs[:2], None], dg, factor=2.0, function=operator)
    dg = without_near(dg, inputs, -0.03)
    check(inputs, dg, factor=2.0, function=operator, clamp_min=-0.03)


@by_dtype
@pytest.mark.parametrize("normalizer", [1, 16, 4.5])
def test_normalizer_and_no_bias(device, normalizer, dtype):
    (h, weight, _), dg = make((90,), 16, 72, device, dtype)
    check([h, weight, None], dg, factor=2.0, normalizer=normalizer)


@by_dtype
@pytest.mark.parametrize("layout", ["heads of a projection", "sliced", "transposed", "misaligned"])
def test_layouts(device, layout, dtype):
    inputs, dg = make((2, 9, 3), 16, 72, device, dtype)
    h, dg_laid_out = laid_out(inputs[0], layout), laid_out(dg, layout)
    check([h, *inputs[1:]], dg, factor=2.0)
    check(inputs, dg_laid_out, factor=2.0)
    check(inputs, dg[:1, :1, :1, :1].expand_as(dg), factor=2.0)


@by_dtype
@pytest.mark.parametrize("rows", [(0,), (1,), (2, 0), (5000,)])
def test_rows(device, rows, dtype):
    inputs, dg = make(rows, 16, 64, device, dtype)
    if 0 not in rows:
        return check(inputs, dg, factor=2.0)
    leaves = [t.requires_grad_() for t in inputs]
    g = gate_projection(*leaves)
    assert g.shape == (*rows, 64)
    assert not any(t.any() for t in torch.autograd.grad(g, leaves, dg))


@by_dtype
def test_small_gates_are_not_rounded_away(device, dtype):
    """log(1 + e) of a small e."""
    bias = torch.linspace(-60, 9, 64, device=device).to(dtype)  # above, fp16 has no such numbers
    h, weight = torch.zeros(3, 16, device=device, dtype=dtype), bias.new_zeros(64, 16)
    expected = torch.nn.functional.logsigmoid(bias.double())
    error = (gate_projection(h, weight, bias, 1).double() - expected).abs()
    assert (error <= 4 * BOUND[dtype] * expected.abs()).all()


@by_dtype
def test_the_same_bits_in_every_run_and_for_every_row(device, dtype):
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("torch's products, whose bits depend on the number of rows")
    (h, weight, bias), dg = make((700,), 16, 520, device, dtype)

    def run(rows):
        leaves = [t.detach().requires_grad_() for t in (h[rows], weight, bias)]
        g = gate_projection(*leaves)
        return g, *torch.autograd.grad(g, leaves, dg[rows])

    whole = run(slice(None))
    assert all(torch.equal(a, b) for a, b in zip(whole, run(slice(None)), strict=True))
    for part, of_all in zip(run(slice(17, 40))[:2], whole[:2], strict=True):
        assert torch.equal(part, of_all[17:40])


def test_far_out(device):
    values = [0.0, 90.0, -90.0, 3e4, -3e4, math.inf, -math.inf, math.nan]
    bias = torch.tensor(values, device=device, dtype=torch.bfloat16)
    h, weight = bias.new_zeros(2, 16), bias.new_zeros(8, 16)
    found, plain = gate_projection(h, weight, bias), plain_gate_projection(h, weight, bias)
    torch.testing.assert_close(found, plain, rtol=0.01, atol=1e-30, equal_nan=True)


def test_gradcheck():
    inputs, _ = make((2, 5), 3, 4, "cpu", torch.float64)
    assert torch.autograd.gradcheck(gate_projection, [t.requires_grad_() for t in inputs])


@pytest.mark.parametrize("requires_grad, biased", [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize(
    "R, dtype", [(16, torch.bfloat16), (20, torch.bfloat16), (16, torch.float32)]
)
def test_opcheck(device, R, dtype, requires_grad, biased):
    (h, weight, bias), dg = make((2, 5), R, 24, device, dtype)
    leaves = [t.requires_grad_(requires_grad) for t in (h, weight)] + [bias if biased else None]
    torch.library.opcheck(ops.gate_projection_fwd.default, (*leaves, 16.0, -1.0))
    if not requires_grad:
        torch.library.opcheck(ops.gate_projection_bwd.default, (dg, *leaves, 16.0, -1.0))


def test_autocast(device):
    inputs, _ = make((2, 5), 16, 24, device, torch.float32)
    leaves = [t.requires_grad_() for t in inputs]
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        g = gate_projection(*leaves)
    assert g.dtype == torch.bfloat16
    assert torch.equal(g, gate_projection(*(t.detach().bfloat16() for t in inputs)))
    assert all(t.dtype == torch.float32 for t in torch.autograd.grad(g.sum(), leaves))


def test_compiled_whole(device):
    inputs, _ = make((2, 5), 16, 24, device, torch.bfloat16)
    leaves = [t.requires_grad_() for t in inputs]
    compiled = torch.compile(gate_projection, backend="aot_eager", fullgraph=True)
    results = [
        (y, *torch.autograd.grad(y.sum(), leaves))
        for y in (f(*leaves) for f in (gate_projection, compiled))
    ]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def raises(error, message):
    return pytest.raises(error, match="^gate_projection: " + re.escape(message))


def test_errors():
    (h, weight, bias), _ = make((2, 5), 16, 24, "cpu", torch.float32)
    with raises(TypeError, "expected weight to be torch.float32 like h, got torch.float64"):
        gate_projection(h, weight.double(), bias)
    with raises(ValueError, "expected weight to have shape [K, R] = [24, 16], got [24, 15]"):
        gate_projection(h, weight[:, 1:], bias)
    with raises(ValueError, "expected bias to have shape [K] = [24], got [23]"):
        gate_projection(h, weight, bias[1:])
    with raises(ValueError, "expected normalizer to be above 0, got 0"):
        gate_projection(h, weight, bias, 0)
    with raises(NotImplementedError, "double backward is not supported"):
        leaf = h.requires_grad_()
        (gradient,) = torch.autograd.grad(
            gate_projection(leaf, weight).sum(), leaf, create_graph=True
        )
        gradient.sum().backward()
