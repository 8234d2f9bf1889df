"""The norm with its gate: values, gradients, layouts and errors, against fp64 plain torch.

Equal bits (see common.py): own sums.
"""

import functools
import math

import pytest
import torch
from common import CUDA_DTYPES, assert_close
from models import FUNCTIONS
from modules import by_dtype, check
from norm_inputs import BOUND, EPS, LAYOUTS, exact, laid_out, make, normal

from gla_ext.layers.norms import GatedRMSNorm, RMSNorm, plain_rms_norm, rms_norm

ops = torch.ops.gla_ext
# On CUDA a row has 8, 16, 32, 64, 128 or 256 threads, or is read in a loop.
WIDTHS = (1, 7, 64, 128, 256, 512, 1000, 1024, 2048, 2500)


CASES = [((2, 9, 3, V), {"gated": gated}) for V in WIDTHS for gated in (True, False)]
CASES += [((2, 9, 3, V), {"layout": layout}) for V in (64, 72) for layout in LAYOUTS[1:]]
CASES += [((2, 9, 3, 40), {"activation": name}) for name in FUNCTIONS]
CASES += [((2, 9, 3, 40), {"weight_dtype": weight}) for weight in (None, *CUDA_DTYPES)]
CASES += [((4, 1100, 4, 64), {})]  # more rows than the blocks, and the tasks, have at once


@by_dtype
@pytest.mark.parametrize(("shape", "options"), CASES, ids=str)
def test_values_and_gradients(device, shape, options, dtype):
    """With and without a gate, in other layouts, of a weight of another dtype or none."""
    layout, weight_dtype = options.get("layout", "contiguous"), options.get("weight_dtype")
    x, weight, gate, dy = make(shape, device, dtype, layout, weight_dtype)
    if "weight_dtype" in options and weight_dtype is None:
        weight = None
    activation = options.get("activation", "swish")
    gate = None if options.get("gated") is False else 3 * gate if "activation" in options else gate

    def call(x, weight, gate):
        return rms_norm(x, weight, EPS, gate, activation)

    def truth(x, weight, gate):
        return exact(x, weight, gate, activation)

    # Of one column there are few values, whose rounding does not average.
    factor = 2.0 if shape[-1] == 1 or shape[1] == 1100 else 1.0
    check(call, truth, [x, weight, gate], dy, factor)
    if layout != "contiguous":
        check(call, truth, [x.contiguous(), weight, gate], laid_out(dy, layout), factor)


@pytest.mark.parametrize("of_x, of_gate", [(torch.bfloat16, torch.float32), (torch.float16,) * 2])
def test_a_gate_of_another_dtype_is_not_rounded_and_a_result_once(device, of_x, of_gate):
    x, weight, gate, _ = make((1, 50, 2, 40), device, of_x)
    gate = gate.to(of_gate) * (1 if of_gate == of_x else 1.001)
    found = rms_norm(x, weight, EPS, gate.requires_grad_())
    assert found.dtype == of_x
    expected = exact(x.double(), weight.double(), gate.double())
    assert torch.equal(found, rms_norm(x.float(), weight, EPS, gate.float()).to(of_x))
    assert torch.equal(rms_norm(x, weight, EPS), rms_norm(x.float(), weight, EPS).to(of_x))
    assert (found.double() - expected).norm() < BOUND[of_x] * expected.norm()
    assert torch.autograd.grad(found.sum(), gate)[0].dtype == of_gate


AGAIN = [(V, "swish", "x weight gate") for V in WIDTHS] + [(2500, "swish", "x weight")]
AGAIN += [(40, activation, "x weight gate") for activation in FUNCTIONS] + [(40, "relu", "x gate")]


@by_dtype
@pytest.mark.parametrize(("V", "activation", "given"), AGAIN)
def test_backward_gives_the_output_again(device, V, activation, given, dtype):
    """With the bits of forward; the rest is as without it, but for the order of dweight's sum."""
    rows = (4, 150, 4) if V in (64, 256) else (2, 9, 3)
    x, weight, gate, dy = make((*rows, V), device, dtype)
    weight = weight if "weight" in given else None
    gate = 3 * gate if "gate" in given else None
    y, rstd = ops.rms_norm_gate_fwd(x, weight, gate, activation, EPS)
    call = functools.partial(ops.rms_norm_gate_bwd, dy, x, weight, gate, rstd, activation)
    dx, dweight, dgate, again = call(True)
    assert torch.equal(again, y)
    expected = call(False)
    assert torch.equal(dx, expected[0]) and torch.equal(dgate, expected[2])
    assert_close(dweight, expected[1], max(BOUND[dtype], BOUND[torch.float32]))
    assert expected[3].numel() == 0


def test_a_vector_has_one_rstd(device):
    x = normal(24, seed=1, device=device, dtype=torch.float32)
    _, rstd = ops.rms_norm_gate_fwd(x, None, None, "swish", EPS)
    assert rstd.shape == ()
    assert abs(rstd.item() - 1 / math.sqrt(x.double().square().mean() + EPS)) < 1e-6


@pytest.mark.parametrize("kind", [RMSNorm, GatedRMSNorm])
def test_nan_stays_in_its_row(device, kind):
    norm = kind(40, eps=EPS).to(device)
    x = normal(4, 40, seed=1, device=device, dtype=torch.float32)
    x[2, 7] = torch.nan
    with torch.no_grad():
        found = norm(*[x] * (1 + (kind is GatedRMSNorm)))
    assert found[2].isnan().all()
    assert found[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
@pytest.mark.parametrize("activation", FUNCTIONS)
def test_gates_far_out(device, activation, dtype):
    """What plain torch gives, NaN and infinite gates included."""
    far = [0.0, -0.0, 1e-3, 9.0, -9.0, 80.0, -80.0, 95.0, -95.0, 3e4, -3e4]
    gate = torch.tensor([*far, math.inf, -math.inf, math.nan] * 2, dtype=dtype, device=device)
    x = normal(28, seed=1, device=device, dtype=dtype)
    leaves = [gate.clone().requires_grad_() for _ in range(2)]
    found, plain = (
        norm(x, None, EPS, leaf, activation)
        for norm, leaf in zip((rms_norm, plain_rms_norm), leaves, strict=True)
    )
    bounds = {"rtol": 4 * BOUND[dtype], "atol": 1e-6, "equal_nan": True}
    torch.testing.assert_close(found, plain, **bounds)
    gradients = (
        torch.autograd.grad(y.sum(), leaf) for y, leaf in ((found, leaves[0]), (plain, leaves[1]))
    )
    for got, wanted in zip(*gradients, strict=True):
        finite = gate.isfinite() & (gate.abs() < 1e3)
        torch.testing.assert_close(got[finite], wanted[finite], **bounds)
        assert torch.equal(got[gate.isnan()].isnan(), wanted[gate.isnan()].isnan())
