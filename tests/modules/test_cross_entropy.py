"""Cross entropy of logits and of a linear map: values, gradients, options, errors, against fp64.

Equal bits (see common.py): own sums, and the same products.
"""

import re

import pytest
import torch
import torch.nn.functional as F
from common import DTYPES
from loss_inputs import error, exact, linear_inputs, make
from norm_inputs import BOUND

from gla_ext.losses import (
    FusedCrossEntropyLoss,
    FusedLinearCrossEntropyLoss,
    cross_entropy_loss,
    fused_linear_cross_entropy_loss,
)

ops = torch.ops.gla_ext
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
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


@by_dtype
@pytest.mark.parametrize("V", WIDTHS)
def test_values_and_gradients(device, V, dtype):
    check(*make(5, V, device, dtype))


@by_dtype
@by_options
@pytest.mark.parametrize("inplace_backward", [False, True], ids=["", "in place"])
def test_options(device, inplace_backward, options, dtype):
    check(*make(9, 104, device, dtype), inplace_backward, factor=2.0, **options)


@by_dtype
@pytest.mark.parametrize("layout", ["a part of wider rows", "transposed"])
def test_layouts(device, layout, dtype):
    logits, target, dloss = make(9, 104, device, dtype, layout)
    check(logits, target, dloss)
    check(logits, target.int(), dloss[:1].expand(9))


@by_dtype
def test_inplace_backward_writes_over_the_logits(device, dtype):
    leaf, target, dloss = make(9, 104, device, dtype)
    logits = leaf.requires_grad_() * 1
    before, loss = (
        logits.detach().clone(),
        cross_entropy_loss(logits, target, inplace_backward=True)[0],
    )
    assert torch.equal(logits, before)
    (gradient,) = torch.autograd.grad(loss, logits, dloss, retain_graph=True)
    assert gradient.data_ptr() == logits.data_ptr()
    assert torch.equal(gradient, check(before, target, dloss))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, logits, dloss)


def test_nobody_who_saved_the_logits_is_deceived():
    logits = make(9, 104, "cpu", torch.float32)[0].requires_grad_() * 1
    target = torch.zeros(9, dtype=torch.long)
    other = logits.square().sum()
    cross_entropy_loss(logits, target, inplace_backward=True)[0].sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


@by_dtype
@by_options
def test_one_pass_is_both(device, options, dtype):
    logits, target, _ = make(9, 2056, device, dtype)
    options = {
        "label_smoothing": 0.0,
        "logit_scale": 1.0,
        "lse_square_scale": 0.0,
        "logit_softcapping": None,
    } | options
    z = options.pop("lse_square_scale")
    arguments = (
        -100,
        *(options[k] for k in ("label_smoothing", "logit_scale", "logit_softcapping")),
        z,
    )
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


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_no_bit(threads):
    logits, target, dloss = make(300, 1000, "cpu", torch.float32)
    results, before = [], torch.get_num_threads()
    for count in (2, threads):
        torch.set_num_threads(count)
        leaf = logits.detach().requires_grad_()
        loss = cross_entropy_loss(leaf, target)[0]
        results.append((loss, *torch.autograd.grad(loss, leaf, dloss)))
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@by_options
def test_gradcheck(options):
    logits, target, _ = make(3, 5, "cpu", torch.float64)
    leaf = logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: cross_entropy_loss(x, target, **options)[0], leaf)
    assert torch.autograd.gradgradcheck(lambda x: cross_entropy_loss(x, target, **options)[0], leaf)


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
    assert (
        error(
            found, F.cross_entropy(F.linear(x, weight, bias).double(), target, reduction=reduction)
        )
        < 1e-6
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast(device, dtype):
    """The linear map is cast; cross entropy of logits is not."""
    (x, weight, bias), target = linear_inputs(50, device, torch.float32)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    with torch.autocast(
        device.type if isinstance(device, torch.device) else device, torch.bfloat16
    ):
        loss = fused_linear_cross_entropy_loss(leaves[0].to(dtype), target, *leaves[1:])
    assert loss.dtype == torch.float32
    for gradient, leaf in zip(torch.autograd.grad(loss, leaves), leaves, strict=True):
        assert gradient.dtype == leaf.dtype
    casts = [t.detach().bfloat16() for t in leaves]
    assert torch.equal(loss, fused_linear_cross_entropy_loss(casts[0], target, *casts[1:]))


@pytest.mark.parametrize("requires_grad", [True, False])
def test_opcheck(device, requires_grad):
    logits, target, _ = make(5, 24, device, torch.float32)
    arguments = (-100, 0.1, 1.0, 3.0, 0.01)
    loss, _, lse = ops.cross_entropy_fwd(logits, target, *arguments, False)
    leaf = logits.clone().requires_grad_(requires_grad)
    torch.library.opcheck(ops.cross_entropy_fwd.default, (leaf, target, *arguments, False))
    (x, weight, bias), target = linear_inputs(6, device, torch.float32)
    leaves = [t.requires_grad_(requires_grad) for t in (x, weight, bias)]
    torch.library.opcheck(
        ops.linear_cross_entropy_fwd.default,
        (*leaves, target, *arguments[:4], 2, requires_grad, requires_grad),
    )
    if not requires_grad:
        target = make(5, 24, device, torch.float32)[1]
        backward = (loss, logits, target, lse, *arguments)
        torch.library.opcheck(ops.cross_entropy_bwd.default, backward)
        torch.library.opcheck(ops.cross_entropy_bwd_.default, backward)
        torch.library.opcheck(ops.cross_entropy_with_grad_.default, (logits, target, *arguments))


def test_compiled_whole(device):
    logits, target, _ = make(9, 104, device, torch.float32)
    (x, weight, bias), labels = linear_inputs(9, device, torch.float32)

    def both(logits, x, weight):
        loss = cross_entropy_loss(logits * 1, target, 0.1, inplace_backward=True)[0].sum()
        return loss + fused_linear_cross_entropy_loss(x, labels, weight, bias)

    leaves = [t.requires_grad_() for t in (logits, x, weight)]
    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    results = [(y, *torch.autograd.grad(y, leaves)) for y in (both(*leaves), compiled(*leaves))]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def raises(error, message):
    return pytest.raises(error, match="^" + re.escape(message))


def test_errors(device):
    logits, target, _ = make(4, 24, device, torch.float32)
    name = "cross_entropy: "
    with raises(TypeError, name + "expected target to be torch.int32 or torch.int64, got"):
        cross_entropy_loss(logits, target.float())
    with raises(
        TypeError, name + "expected logits to be torch.bfloat16, torch.float16, torch.float"
    ):
        cross_entropy_loss(logits.int(), target)
    with raises(ValueError, name + "expected logits to have 2 dimensions [N, V], got 3 with shape"):
        cross_entropy_loss(logits[None], target)
    with raises(ValueError, name + "expected target to have shape [N] = [4], got [3]"):
        cross_entropy_loss(logits, target[1:])
    with raises(ValueError, name + "expected label_smoothing to be between 0 and 1, got 2"):
        cross_entropy_loss(logits, target, 2.0)
    with raises(ValueError, name + "expected logit_softcapping to be above 0, got -1"):
        cross_entropy_loss(logits, target, logit_softcapping=-1.0)
    with raises(ValueError, name + "expected reduction to be one of mean, sum, got 'none'"):
        fused_linear_cross_entropy_loss(logits, target, logits, reduction="none")
    name, target = "linear_cross_entropy: ", target.clamp(-100, 3)
    with raises(ValueError, name + "expected weight to have shape [V, D] = [4, 24], got [4, 23]"):
        fused_linear_cross_entropy_loss(logits, target, logits[:, 1:])
    with raises(TypeError, name + "expected weight to be torch.float32 like x, got torch.float16"):
        fused_linear_cross_entropy_loss(logits, target, logits.half())
    with raises(ValueError, name + "expected num_chunks to be at least 1, got 0"):
        fused_linear_cross_entropy_loss(logits, target, logits, num_chunks=0)
    with raises(
        ValueError, "cross_entropy_bwd_: expected the rows of logits, which are written over"
    ):
        ops.cross_entropy_bwd_(
            target.float(), logits.T.contiguous().T, target, target.float(), -100, 0, 1, None, 0
        )
    loss = fused_linear_cross_entropy_loss(logits.requires_grad_(), target, logits)
    with raises(NotImplementedError, name + "double backward is not supported"):
        torch.autograd.grad(loss, logits, create_graph=True)


@pytest.mark.parametrize("label", [24, -1])
def test_labels_out_of_range(label):
    logits, target, _ = make(4, 24, "cpu", torch.float32)
    target[3] = label
    expected = "expected labels from 0 to V - 1 = 23, or ignore_index = -100"
    with raises(ValueError, f"cross_entropy: {expected}, got {label} at 3"):
        cross_entropy_loss(logits, target)
    target[target == -100] = 0
    assert cross_entropy_loss(logits, target, ignore_index=label)[0][3] == 0


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
