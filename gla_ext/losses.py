"""Cross entropy of logits, and of a linear map without its logits, under FLA's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gla_ext import _C  # noqa: F401  loading it registers torch.ops.gla_ext
from gla_ext.ops._checks import check_tensors
from gla_ext.ops._tracing import have_no_rule, is_recorded, is_sharded

IGNORE_INDEX = -100

_fwd = torch.ops.gla_ext.cross_entropy_fwd.default
_linear = torch.ops.gla_ext.linear_cross_entropy_fwd.default


@dataclass(frozen=True)
class _Options:
    """What the losses below have in common; see `cross_entropy_loss`."""

    ignore_index: int = IGNORE_INDEX
    label_smoothing: float = 0.0
    logit_scale: float = 1.0
    logit_softcapping: float | None = None

    def in_order(self) -> tuple[int, float, float, float | None]:
        cap = self.logit_softcapping
        return (
            self.ignore_index,
            float(self.label_smoothing),
            float(self.logit_scale),
            None if cap is None else float(cap),
        )


def cross_entropy_loss(
    logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    logit_softcapping: float | None = None,
    ignore_index: int = IGNORE_INDEX,
    inplace_backward: bool = False,
) -> tuple[Tensor, Tensor]:
    """`-log softmax(s)[target]` of every token, with `s = logit_scale * logits`.

    One kernel forward, which reads the logits once and leaves them as they are, and one backward,
    which reads them once more: no wider copy of them is made or kept. Sums are fp32 (fp64 for fp64
    logits), whatever torch's default dtype is. Under `torch.func` transforms, with forward-mode AD,
    for logits that are sharded over the classes and in ONNX the same is done by torch's operations.

    Args:
        logits: `[N, V]`; bfloat16, float16, float32 or float64.
        target: int32 or int64 `[N]`, 0 to V - 1 or ignore_index. Another label raises ValueError on
            CPU, and on CUDA stops the kernel: torch reports a device-side assert.
        label_smoothing: weight of the mean over all classes, 0 to 1. Default: 0.
        logit_scale: multiplies the logits. Default: 1.
        lse_square_scale: adds so many times the square of the log of the sum of exponentials, the
            z-loss (arXiv:2204.02311). Default: 0.
        logit_softcapping: `s = cap * tanh(logit_scale * logits / cap)`. Default: None.
        ignore_index: label that does not count: 0 is its loss and its gradient. Default: -100.
        inplace_backward: backward writes the gradient over the logits, which saves a tensor of
            their size. They are then no logits any more; a second backward, or one of something
            else that needs them, raises torch's error for what was changed in place. Without effect
            in torch.compile and of DTensors. Default: False.

    Returns:
        The losses `[N]`, the z-loss in them included, and the z-losses `[N]`, which have no
        gradient of their own.

    Raises:
        TypeError: for other dtypes.
        ValueError: for shapes, labels or options that do not fit.
    """
    check_tensors("cross_entropy", "logits target", logits, target)
    options = _Options(ignore_index, label_smoothing, logit_scale, logit_softcapping)
    if _takes_plain(logits) or (is_sharded(logits) and _is_cut_by_classes(logits)):
        return plain_losses(logits, target, options, lse_square_scale)
    in_place = inplace_backward and not is_recorded() and not is_sharded(logits)
    loss, z_loss, _ = _fwd(logits, target, *options.in_order(), float(lse_square_scale), in_place)
    return loss, z_loss


def fused_linear_cross_entropy_loss(
    x: Tensor,
    target: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    logit_softcapping: float | None = None,
    num_chunks: int = 8,
    reduction: str = "mean",
) -> Tensor:
    """Cross entropy of the logits `x @ weight.T + bias`, which are never there at once.

    A num_chunks-th of the tokens at a time, forward makes logits, losses and the gradients of their
    sum. It keeps the gradients of x and, in fp32, of weight and bias; backward multiplies them.
    DTensors take torch's operations, with all logits at once.

    Args:
        x: `[N, D]`; bfloat16, float16, float32 or float64. Autocast casts x, weight and bias.
        target: int32 or int64 `[N]`, as `cross_entropy_loss`'s.
        weight: `[V, D]`, of x's dtype.
        bias: `[V]`, likewise. Default: None (0).
        ignore_index, label_smoothing, logit_scale, logit_softcapping: as `cross_entropy_loss`'s.
        num_chunks: parts of x; fewer where V is less than so many times D. Default: 8.
        reduction: 'mean' over the labels that count, or 'sum'. Default: 'mean'.

    Returns:
        A scalar, fp32 (fp64 for fp64 inputs); the mean is NaN when no label counts.

    Raises:
        TypeError: for other dtypes.
        ValueError: for shapes, labels or options that do not fit.
        NotImplementedError: double backward.
    """
    check_tensors("linear_cross_entropy", "x target weight bias", x, target, weight, bias)
    check_reduction(reduction, ("mean", "sum"))
    options = _Options(ignore_index, label_smoothing, logit_scale, logit_softcapping)
    tensors = [x, weight] if bias is None else [x, weight, bias]
    if _takes_plain(*tensors) or any(map(is_sharded, tensors)):
        logits = F.linear(x, weight, bias)
        total = plain_losses(logits, target, options)[0].sum()
    else:
        total = _linear(x, weight, bias, target, *options.in_order(), num_chunks, True, True)[0]
    return total / (target != ignore_index).sum() if reduction == "mean" else total


def _takes_plain(*tensors: Tensor) -> bool:
    """Whether torch's operations have what the operators have not: kernels for fp64 on CUDA, rules
    for subclasses but DTensor, for transforms of torch.func and for forward-mode AD; and ONNX.
    """
    return any(t.is_cuda and t.dtype == torch.float64 for t in tensors) or have_no_rule(*tensors)


def _is_cut_by_classes(logits: Any) -> bool:
    """Whether a DTensor `[N, V]` is sharded by V: no rank has a whole row."""
    return any(placement.is_shard(logits.ndim - 1) for placement in logits.placements)


def plain_losses(
    logits: Tensor, target: Tensor, options: Any, lse_square_scale: float = 0.0
) -> tuple[Tensor, Tensor]:
    """`cross_entropy_loss` as torch's operations. options has its ignore_index, label_smoothing,
    logit_scale and logit_softcapping, as FLA's modules have.
    """
    s = logits.to(torch.promote_types(logits.dtype, torch.float32)) * options.logit_scale
    if options.logit_softcapping is not None:
        s = options.logit_softcapping * torch.tanh(s / options.logit_softcapping)
    loss = F.cross_entropy(
        s,
        target.long(),
        ignore_index=options.ignore_index,
        label_smoothing=options.label_smoothing,
        reduction="none",
    )
    if lse_square_scale == 0:
        return loss, torch.zeros_like(loss)
    z_loss = lse_square_scale * s.logsumexp(-1).square()
    z_loss = z_loss.masked_fill(target == options.ignore_index, 0)
    return loss + z_loss, z_loss.detach()


def check_reduction(reduction: str, known: tuple[str, ...]) -> None:
    if reduction not in known:
        raise ValueError(
            f"cross_entropy: expected reduction to be one of {', '.join(known)}, got {reduction!r}"
        )


class FusedCrossEntropyLoss(nn.Module):
    """`cross_entropy_loss` as a module, under the name and options of FLA's.

    Args: those of `cross_entropy_loss`, and
        reduction: 'mean' over the labels that count, 'sum' or 'none'. Default: 'mean'.
        return_z_loss: return the z-loss too. Default: False.

    forward takes `[N, V]` logits and `[N]` labels and returns a scalar, `[N]` without reduction, or
    two of these.
    """

    def __init__(
        self,
        ignore_index: int = IGNORE_INDEX,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        logit_scale: float = 1.0,
        lse_square_scale: float = 0.0,
        logit_softcapping: float | None = None,
        inplace_backward: bool = False,
        return_z_loss: bool = False,
    ) -> None:
        super().__init__()
        check_reduction(reduction, ("mean", "sum", "none"))
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.logit_scale = logit_scale
        self.lse_square_scale = lse_square_scale
        self.logit_softcapping = logit_softcapping
        self.inplace_backward = inplace_backward
        self.return_z_loss = return_z_loss

    def forward(self, input: Tensor, target: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        losses = cross_entropy_loss(
            input,
            target,
            self.label_smoothing,
            self.logit_scale,
            self.lse_square_scale,
            self.logit_softcapping,
            self.ignore_index,
            self.inplace_backward,
        )
        if self.reduction != "none":
            losses = tuple(loss.sum() for loss in losses)
        if self.reduction == "mean":
            count = (target != self.ignore_index).sum()
            losses = tuple(loss / count for loss in losses)
        return losses if self.return_z_loss else losses[0]


class FusedLinearCrossEntropyLoss(nn.Module):
    """`fused_linear_cross_entropy_loss` as a module, under the name and options of FLA's.

    Args: those of `fused_linear_cross_entropy_loss`.

    forward takes `[..., D]` inputs, `[...]` labels, the weight `[V, D]` and perhaps a bias `[V]`.
    """

    def __init__(
        self,
        ignore_index: int = IGNORE_INDEX,
        label_smoothing: float = 0.0,
        logit_scale: float = 1.0,
        logit_softcapping: float | None = None,
        num_chunks: int = 8,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        check_reduction(reduction, ("mean", "sum"))
        self.options: dict[str, Any] = {
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
            "logit_scale": logit_scale,
            "logit_softcapping": logit_softcapping,
            "num_chunks": num_chunks,
            "reduction": reduction,
        }

    def forward(
        self, x: Tensor, target: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        x, target = x.reshape(-1, x.shape[-1]), target.reshape(-1)
        return fused_linear_cross_entropy_loss(x, target, weight, bias, **self.options)


__all__ = [
    "FusedCrossEntropyLoss",
    "FusedLinearCrossEntropyLoss",
    "cross_entropy_loss",
    "fused_linear_cross_entropy_loss",
]
