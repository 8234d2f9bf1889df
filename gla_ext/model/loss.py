"""The loss of a language model: cross entropy of each next token. It can be computed without a
tensor of all logits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gla_ext.layers._projections import is_plain
from gla_ext.layers._route import shard_of_vocabulary
from gla_ext.losses import IGNORE_INDEX, cross_entropy_loss, fused_linear_cross_entropy_loss
from gla_ext.model._vocabulary import ShardedCrossEntropy
from gla_ext.ops._checks import check_tensors
from gla_ext.ops._context import context_of


def head_and_loss(
    head: nn.Module,
    x: Tensor,
    labels: Tensor,
    config: Any,
    training: bool,
    num_items_in_batch: Tensor | int | None = None,
    cu_seqlens: Tensor | None = None,
    cp_context: Any = None,
    shifted: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Returns the loss of x `[B, T, hidden_size]` and the logits. The logits are None if config
    computes the loss without them (fuse_cross_entropy, fuse_linear_cross_entropy). For the other
    arguments see `next_token_loss`.
    """
    if config.fuse_linear_cross_entropy and is_plain(head, biased=True):
        targets = _targets(labels, x, cu_seqlens, cp_context, shifted)
        total = fused_linear_cross_entropy_loss(
            x.flatten(0, 1), targets, head.weight, head.bias, reduction="sum"
        )
        return _mean(total, targets, num_items_in_batch, cp_context), None
    logits = head(x)
    fused = config.fuse_cross_entropy or config.fuse_linear_cross_entropy
    options = {"fuse_cross_entropy": fused, "inplace_backward": training, "shifted": shifted}
    args = (labels, num_items_in_batch, cu_seqlens, cp_context)
    loss = next_token_loss(logits, *args, **options)
    return loss, None if config.fuse_linear_cross_entropy else logits


def next_token_loss(
    logits: Tensor,
    labels: Tensor,
    num_items_in_batch: Tensor | int | None = None,
    cu_seqlens: Tensor | None = None,
    cp_context: Any = None,
    *,
    fuse_cross_entropy: bool = True,
    inplace_backward: bool = False,
    shifted: bool = False,
) -> Tensor:
    """Mean cross entropy of logits at t against labels at t + 1, in nats per token.

    Args:
        logits: `[B, T, vocab_size]`.
        labels: int64 `[B, T]`; -100 does not count.
        num_items_in_batch: divisor of the sum, instead of the number of labels that count, so that
            the losses of micro-batches add up to the mean of their update. Default: None.
        cu_seqlens, cp_context: as in `GLAForCausalLM.forward`. Labels after the last offset do not
            count. With cp_context, num_items_in_batch is the number of all ranks. Default: None.
        fuse_cross_entropy: use `gla_ext.losses.cross_entropy_loss` instead of torch's operations.
            Default: True.
        inplace_backward: backward writes the gradient over the logits, as in
            `gla_ext.losses.cross_entropy_loss`. Default: False.
        shifted: labels are already shifted: logits at t are compared with labels at t, in every
            sequence. Default: False.

    Returns:
        A scalar, fp32 (fp64 for fp64 logits); NaN if no label counts.

    Raises:
        ValueError: for shifted labels of another shape than `[B, T]`.
    """
    names = "logits labels cu_seqlens"
    check_tensors("next_token_loss", names, logits, labels, cu_seqlens)
    targets = _targets(labels, logits, cu_seqlens, cp_context, shifted)
    total = cross_entropy(logits.flatten(0, 1), targets, fuse_cross_entropy, inplace_backward)
    return _mean(total, targets, num_items_in_batch, cp_context)


def _targets(
    labels: Tensor, x: Tensor, cu_seqlens: Tensor | None, cp_context: Any, shifted: bool
) -> Tensor:
    """The target of each token of x `[B, T, ...]`, `[B * T]`."""
    if shifted:
        if labels.shape != x.shape[:2]:
            raise ValueError(
                f"next_token_loss: expected shifted labels to have shape {list(x.shape[:2])}, got "
                f"{list(labels.shape)}"
            )
        return labels.to(x.device).flatten()
    return context_of(cp_context).next_labels(labels, x, cu_seqlens).flatten()


def _mean(
    total: Tensor, targets: Tensor, num_items_in_batch: Tensor | int | None, cp_context: Any
) -> Tensor:
    """The mean loss, from the sum over the targets; with a cp_context the mean over all ranks."""
    count = num_items_in_batch
    if count is None:
        count = (targets != IGNORE_INDEX).sum()
    elif isinstance(count, Tensor):
        count = count.to(targets.device)
    return context_of(cp_context).mean(total, count, num_items_in_batch is None)


def cross_entropy(
    logits: Tensor, targets: Tensor, fused: bool = True, inplace_backward: bool = False
) -> Tensor:
    """The sum over tokens of -log softmax(logits)[target]; -100 does not count.

    Computed in fp32, or fp64 for fp64 logits, whatever torch's default dtype is.

    Args:
        logits: `[N, vocab_size]`, any floating dtype.
        targets: int64 `[N]`.
        fused: use the operator instead of torch's operations on a wider copy. Default: True.
        inplace_backward: option of the operator: see `gla_ext.losses.cross_entropy_loss`.
            Default: False.
    """
    if (shard := shard_of_vocabulary(logits)) is not None:
        return ShardedCrossEntropy.apply(*shard, targets)
    if fused:
        return cross_entropy_loss(logits, targets, inplace_backward=inplace_backward)[0].sum()
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
