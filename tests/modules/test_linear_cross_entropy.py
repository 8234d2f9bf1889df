"""Cross entropy of a linear map: values, gradients and memory, against fp64."""

import pytest
import torch
import torch.nn.functional as F
from common import DTYPES, assert_close
from loss_inputs import error, exact, linear_inputs
from models import make_ids, make_model
from norm_inputs import BOUND
from torch.utils._python_dispatch import TorchDispatchMode

from gla_ext.losses import fused_linear_cross_entropy_loss
from gla_ext.model import next_token_loss

ops = torch.ops.gla_ext
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


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


@pytest.mark.parametrize("grad", [True, False], ids=["", "no_grad"])
def test_labels_out_of_range(grad):
    """Named by their place among all, before anything is computed."""
    (x, weight, _), target = linear_inputs(50, "cpu", torch.float32)
    target[40] = 72
    expected = "linear_cross_entropy: expected labels from 0 to V - 1 = 71, or ignore_index = -100"
    with pytest.raises(ValueError, match=f"^{expected}, got 72 at 40"):
        fused_linear_cross_entropy_loss(x.requires_grad_(grad), target, weight)
    target[target == -100] = 0
    assert fused_linear_cross_entropy_loss(x, target, weight, ignore_index=72).isfinite()


LINEAR = {"fuse_linear_cross_entropy": True, "fuse_cross_entropy": False}


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("offsets", [None, [0, 4, 4, 20, 27]], ids=["batch", "packed"])
@pytest.mark.parametrize("grad", [True, False], ids=["", "no_grad"])
def test_a_model_with_labels_has_no_logits(grad, offsets, training):
    """The loss is that of its logits: shifted, without ignored labels, each sequence by itself."""
    model, ids = make_model(torch.float64, **LINEAR).train(training), make_ids(B=1, T=27)
    labels, arguments = ids.masked_fill(ids < 5, -100), {}
    if offsets is not None:
        arguments["cu_seqlens"] = torch.tensor(offsets)
    with torch.set_grad_enabled(grad):
        output = model(ids, labels=labels, **arguments)
    assert output.logits is None and output.loss.requires_grad == grad
    logits = model(ids, **arguments).logits
    assert logits.shape == (1, 27, 31)
    assert_close(output.loss, next_token_loss(logits, labels, **arguments), 1e-12)


class Widest(TorchDispatchMode):
    """The largest tensor that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for t in result if isinstance(result, tuple | list) else [result]:
            if isinstance(t, torch.Tensor):
                self.elements = max(self.elements, t.numel())
        return result


def test_linear_without_gradients_makes_none():
    (x, weight, bias), target = linear_inputs(64, "cpu", torch.float32)
    _, dx, dweight, dbias = ops.linear_cross_entropy_fwd(
        x, weight, bias, target, -100, 0.0, 1.0, None, 8, False, False
    )
    assert dx.numel() == dweight.numel() == dbias.numel() == 0
    mode, leaf = Widest(), x.requires_grad_()
    with mode:
        fused_linear_cross_entropy_loss(leaf, target, weight).backward()
    assert 0 < mode.elements <= 72 * 16  # of weight, and not 64 x 72


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
