"""Cross entropy of logits, and of a linear map without its logits, under FLA's names."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from gla_ext.ops.cross_entropy import (
    IGNORE_INDEX,
    check_reduction,
    cross_entropy_loss,
    fused_linear_cross_entropy_loss,
    plain_losses,
)


class FusedCrossEntropyLoss(nn.Module):
    """`cross_entropy_loss` as a module, with FLA's name and options.

    Args: the options of `cross_entropy_loss`, and
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
        options = (self.label_smoothing, self.logit_scale, self.lse_square_scale)
        options += (self.logit_softcapping, self.ignore_index, self.inplace_backward)
        return _reduced(cross_entropy_loss(input, target, *options), target, self)


def _reduced(
    losses: tuple[Tensor, Tensor], target: Tensor, options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """Reduces losses by reduction, ignore_index and return_z_loss of a module above or of FLA's."""
    if options.reduction != "none":
        losses = tuple(loss.sum() for loss in losses)
    if options.reduction == "mean":
        count = (target != options.ignore_index).sum()
        losses = tuple(loss / count for loss in losses)
    return losses if options.return_z_loss else losses[0]


class FusedLinearCrossEntropyLoss(nn.Module):
    """`fused_linear_cross_entropy_loss` as a module, with FLA's name and options.

    Args: the options of `fused_linear_cross_entropy_loss`.

    forward takes `[..., D]` inputs, `[...]` labels, the weight `[V, D]` and optionally a bias
    `[V]`.
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
    "plain_losses",
]
