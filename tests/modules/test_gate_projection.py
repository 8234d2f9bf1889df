"""The gate's low-rank projection: values, gradients, layouts and errors, against fp64.

Equal bits (see common.py): own sums.
"""

import math
from functools import partial

import pytest
import torch
from modules import by_dtype, check
from norm_inputs import BOUND, laid_out, normal

from gla_ext.layers.gate_projection import gate_projection, plain_gate_projection

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


def without_near(dg, inputs, clamp_min):
    """dg, but 0 where rounding would decide whether the bound holds."""
    z = inputs[0].double() @ inputs[1].double().T + inputs[2].double()
    near = (torch.nn.functional.logsigmoid(z) / 16 - clamp_min).abs() < 1e-4
    return dg.masked_fill(near, 0)


SIZES = [(R, K) for K in WIDTHS for R in (1, 5, 16, 20) if R == 16 or K in (1, 72)]
CASES = [((2, 45), *sizes, {}) for sizes in SIZES] + [((5000,), 16, 64, {})]
CASES += [((90,), 16, 72, {"clamp_min": bound}) for bound in (-0.03, 0.0, -1000.0)]
CASES += [((90,), 16, 72, {"normalizer": n}) for n in (1, 4.5)]


@by_dtype
@pytest.mark.parametrize(("rows", "R", "K", "options"), CASES, ids=str)
def test_values_and_gradients(device, rows, R, K, options, dtype):
    inputs, dg = make(rows, R, K, device, dtype)
    if "clamp_min" in options:
        dg = without_near(dg, inputs, options["clamp_min"])
    # One number may be the small sum of large terms. On CUDA dz is rounded before products.
    more = {"factor": 20.0 if R * K == 1 else 2.0, "of_gradients": 2.0}
    ours, truth = (partial(f, **options) for f in (gate_projection, exact))
    check(ours, truth, inputs, dg, **more)
    if K == 72 and "clamp_min" not in options:
        check(ours, truth, [*inputs[:2], None], dg, **more)


@by_dtype
@pytest.mark.parametrize("layout", ["part of a projection", "sliced", "transposed", "misaligned"])
def test_layouts(device, layout, dtype):
    inputs, dg = make((2, 9, 3), 16, 72, device, dtype)
    for h, upstream in ((laid_out(inputs[0], layout), dg), (inputs[0], laid_out(dg, layout))):
        check(gate_projection, exact, [h, *inputs[1:]], upstream, factor=2.0, of_gradients=2.0)


@by_dtype
def test_small_gates_are_not_rounded_away(device, dtype):
    """log(1 + e) of a small e."""
    bias = torch.linspace(-60, 9, 64, device=device).to(dtype)  # above, fp16 has no such numbers
    h, weight = torch.zeros(3, 16, device=device, dtype=dtype), bias.new_zeros(64, 16)
    expected = torch.nn.functional.logsigmoid(bias.double())
    error = (gate_projection(h, weight, bias, 1).double() - expected).abs()
    assert (error <= 4 * BOUND[dtype] * expected.abs()).all()


def test_far_out(device):
    values = [0.0, 90.0, -90.0, 3e4, -3e4, math.inf, -math.inf, math.nan]
    bias = torch.tensor(values, device=device, dtype=torch.bfloat16)
    h, weight = bias.new_zeros(2, 16), bias.new_zeros(8, 16)
    found, plain = gate_projection(h, weight, bias), plain_gate_projection(h, weight, bias)
    torch.testing.assert_close(found, plain, rtol=0.01, atol=1e-30, equal_nan=True)
