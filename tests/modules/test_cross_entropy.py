"""Cross entropy of logits and of a linear map: values, gradients, options, errors, against fp64.

Equal bits (see common.py): own sums, and the same products.
"""

import pytest
import torch
import torch.nn.functional as F
from common import raises
from dispatch import Calls
from loss_inputs import error, exact, linear_inputs, make
from modules import by_dtype
from norm_inputs import BOUND

from gla_ext.losses import (
    FusedCrossEntropyLoss,
    FusedLinearCrossEntropyLoss,
    cross_entropy_loss,
    fused_linear_cross_entropy_loss,
)

ops = torch.ops.gla_ext
# On CUDA a block takes 2,048 columns at a time, eight a thread, and four such in flight.
WIDTHS = (1, 7, 8, 100, 2048, 2056, 9001)
OPTIONS = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.1},
    "scaled": {"logit_scale": 0.7},
    "capped": {"logit_softcapping": 3.0, "logit_scale": 1.3},
    "z-loss": {"lse_square_scale": 0.01},
    "all": {
        "logit_softcapping": 3.0,
        "logit_scale": 1.3,
        "label_smoothing": 0.2,
        "lse_square_scale": 0.1,
    },
}
by_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def check(logits, target, dloss, inplace_backward=False, factor=1.0, **options):
    leaf, double = logits.detach().requires_grad_(), logits.detach().double().requires_grad_()
    wide = torch.promote_types(logits.dtype, torch.float32)
    # The view keeps strides, and what is written over is no leaf.
    losses = cross_entropy_loss(
        leaf.view_as(leaf), target, inplace_backward=inplace_backward, **options
    )
    expected = exact(double, target, **options)
    for found, want in zip(losses, expected, strict=True):
        assert found.dtype == wide and found.shape == target.shape
        assert (
            error(found, want) < factor * BOUND[wide] or logits.shape[1] == 1
        )  # 0 but for rounding
    assert not losses[1].requires_grad
    (gradient,) = torch.autograd.grad(losses[0], leaf, dloss)
    (want,) = torch.autograd.grad(expected[0], double, dloss.double())
    assert gradient.dtype == logits.dtype
    if logits.shape[1] > 1:
        assert error(gradient, want) < factor * BOUND[logits.dtype]
    assert not gradient[target == -100].any()
    return gradient


CASES = [(5, V, "", {}, False) for V in WIDTHS]
CASES += [(9, 104, "", options, False) for options in OPTIONS.values()]
CASES += [(9, 104, "", OPTIONS[name], True) for name in ("plain", "all")]
CASES += [(9, 104, layout, {}, False) for layout in ("a part of wider rows", "transposed")]


@by_dtype
@pytest.mark.parametrize(("N", "V", "layout", "options", "in_place"), CASES, ids=str)
def test_values_and_gradients(device, N, V, layout, options, in_place, dtype):
    logits, target, dloss = make(N, V, device, dtype, layout)
    check(logits, target, dloss, in_place, factor=2.0 if options else 1.0, **options)
    if layout:
        check(logits, target.int(), dloss[:1].expand(9))


@by_dtype
def test_inplace_backward_writes_over_the_logits(device, dtype):
    """And nobody who saved them is deceived."""
    leaf, target, dloss = make(9, 104, device, dtype)
    logits = leaf.requires_grad_() * 1
    other, before = logits.square().sum(), logits.detach().clone()
    loss = cross_entropy_loss(logits, target, inplace_backward=True)[0]
    assert torch.equal(logits, before)
    (gradient,) = torch.autograd.grad(loss, logits, dloss, retain_graph=True)
    assert gradient.data_ptr() == logits.data_ptr()
    assert torch.equal(gradient, check(before, target, dloss))
    for saved, upstream in ((loss, dloss), (other, None)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(saved, logits, upstream)


@by_dtype
@by_options
def test_one_pass_is_both(device, options, dtype):
    logits, target, _ = make(9, 2056, device, dtype)
    plain = {"label_smoothing": 0.0, "logit_scale": 1.0, "logit_softcapping": None}
    options = plain | {"lse_square_scale": 0.0} | options
    arguments = (-100, *(options[k] for k in (*plain, "lse_square_scale")))
    loss, _, lse = ops.cross_entropy_fwd(logits, target, *arguments, False)
    gradient = ops.cross_entropy_bwd(torch.ones_like(loss), logits, target, lse, *arguments)
    over = logits.clone()
    assert torch.equal(ops.cross_entropy_with_grad_(over, target, *arguments), loss)
    assert torch.equal(over, gradient)


def test_far_out(device):
    """Infinite logits and NaN, as torch has them."""
    logits = torch.tensor(
        [
            [0.0, -torch.inf, 2.0],
            [torch.inf, 0, 1],
            [torch.nan, 0, 1],
            [-torch.inf] * 3,
            [200.0, -200, 0],
            [3e38, -3e38, 0],
        ],
        device=device,
    )
    target = torch.tensor([0, 1, 1, 0, 0, 0], device=device)
    found = cross_entropy_loss(logits, target)[0]
    expected = F.cross_entropy(logits, target, reduction="none")
    torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_modules(device, reduction):
    logits, target, _ = make(9, 104, device, torch.float32)
    options = {"label_smoothing": 0.1, "lse_square_scale": 0.01}
    loss, z_loss = FusedCrossEntropyLoss(reduction=reduction, return_z_loss=True, **options)(
        logits, target
    )
    for found, want in zip((loss, z_loss), exact(logits.double(), target, **options), strict=True):
        want = want if reduction == "none" else want.sum()
        want = want / 8 if reduction == "mean" else want
        assert error(found, want) < 1e-6
    if reduction == "none":
        return
    (x, weight, bias), target = linear_inputs(12, device, torch.float32)
    linear = FusedLinearCrossEntropyLoss(reduction=reduction)
    found = linear(x.view(3, 4, 16), target.view(3, 4), weight, bias)
    want = F.cross_entropy(F.linear(x, weight, bias).double(), target, reduction=reduction)
    assert error(found, want) < 1e-6


@by_dtype
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum", "logit_softcapping": 3.0, "logit_scale": 1.3},
        {"label_smoothing": 0.1, "logit_scale": 0.7},
    ],
)
@pytest.mark.parametrize("num_chunks, biased", [(1, True), (3, False), (8, True)])
def test_linear(device, num_chunks, biased, options, dtype):
    inputs, target = linear_inputs(50, device, dtype, biased)
    leaves = [t.detach().requires_grad_() for t in inputs if t is not None]
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    bias = leaves[2] if biased else None
    loss = fused_linear_cross_entropy_loss(
        leaves[0], target, leaves[1], bias, num_chunks=num_chunks, **options
    )
    rest = {k: v for k, v in options.items() if k != "reduction"}
    expected = exact(F.linear(*doubles), target, **rest)[0].sum()
    if "reduction" not in options:
        expected = expected / (target != -100).sum()
    wide = torch.promote_types(dtype, torch.float32)
    assert loss.dtype == wide and loss.shape == ()
    factor = torch.tensor(0.7, device=device, dtype=wide)
    gradients = torch.autograd.grad(loss, leaves, factor)
    wanted = torch.autograd.grad(expected, doubles, factor.double())
    # Logits and their gradients are rounded to dtype, as of the modules one after the other.
    assert error(loss, expected) < 2 * BOUND[dtype]
    for found, want, leaf in zip(gradients, wanted, leaves, strict=True):
        assert found.dtype == dtype and found.shape == leaf.shape
        assert error(found, want) < 4 * BOUND[dtype]


def test_linear_without_gradients_makes_none():
    (x, weight, bias), target = linear_inputs(64, "cpu", torch.float32)
    _, dx, dweight, dbias = ops.linear_cross_entropy_fwd(
        x, weight, bias, target, -100, 0.0, 1.0, None, 8, False, False
    )
    assert dx.numel() == dweight.numel() == dbias.numel() == 0
    calls, leaf = Calls(), x.requires_grad_()
    with calls:
        fused_linear_cross_entropy_loss(leaf, target, weight).backward()
    assert 0 < calls.largest() <= 72 * 16  # of weight, and not 64 x 72


@pytest.mark.cuda
def test_linear_never_holds_all_logits():
    x = torch.randn(8192, 256, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(32000, 256, device="cuda", dtype=torch.bfloat16).requires_grad_()
    target = torch.randint(32000, (8192,), device="cuda")
    fused_linear_cross_entropy_loss(x, target, weight).backward()
    x.grad = weight.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fused_linear_cross_entropy_loss(x, target, weight).backward()
    logits = 8192 * 32000 * 2
    assert torch.cuda.max_memory_allocated() - before < logits / 4 + 6 * weight.nbytes


@pytest.mark.parametrize("label", [24, -1])
@pytest.mark.parametrize("name", ["cross_entropy", "linear_cross_entropy"])
@pytest.mark.parametrize("grad", [True, False], ids=["", "no_grad"])
def test_labels_out_of_range(grad, name, label):
    """Named by their place among all, before anything is computed."""
    x = torch.randn(50, 24).requires_grad_(grad)
    weight = torch.eye(24)

    def call(target, **options):
        if name == "cross_entropy":
            return cross_entropy_loss(x, target, **options)[0]
        return fused_linear_cross_entropy_loss(x, target, weight, **options)

    target = torch.full((50,), -100)
    target[40], target[3] = label, 5
    with raises(
        ValueError,
        f"{name}: expected labels from 0 to V - 1 = 23, or ignore_index = -100, got {label} at 40",
    ):
        call(target)
    target[target == -100] = 0
    found = call(target, ignore_index=label)
    assert found.isfinite().all()
    assert name == "linear_cross_entropy" or found[40] == 0


@pytest.mark.cuda
def test_labels_out_of_range_stop_the_kernel():
    """In a process of its own, whose device is lost."""
    import subprocess
    import sys

    program = (
        "import torch; from gla_ext.losses import cross_entropy_loss\n"
        "t = torch.full((4,), 24, device='cuda')\n"
        "cross_entropy_loss(torch.zeros(4, 24, device='cuda'), t)[0].sum().item()"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode != 0 and "device-side assert" in result.stderr
