"""Cross entropy of the logits of many tokens, summed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gla_ext.losses import IGNORE_INDEX, cross_entropy_loss, fused_linear_cross_entropy_loss


def cross_entropy(
    logits: Tensor, targets: Tensor, fused: bool = True, inplace_backward: bool = False
) -> Tensor:
    """The sum over tokens of -log softmax(logits)[target]; -100 does not count.

    In fp32, fp64 for fp64 logits, whatever torch's default dtype is.

    Args:
        logits: `[N, vocab_size]`, any floating dtype.
        targets: int64 `[N]`.
        fused: by the operator, else by torch's operations on a wider copy. Default: True.
        inplace_backward: of the operator: see `gla_ext.losses.cross_entropy_loss`. Default: False.
    """
    if fused:
        return cross_entropy_loss(logits, targets, inplace_backward=inplace_backward)[0].sum()
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")


def linear_cross_entropy(x: Tensor, targets: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same of logits `x @ weight.T + bias`, which are never there at once."""
    return fused_linear_cross_entropy_loss(x, targets, weight, bias, reduction="sum")
