"""The loss of a language model: cross entropy of each next token, with its logits or without."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gla_ext.layers._projections import is_plain
from gla_ext.losses import IGNORE_INDEX, cross_entropy_loss, fused_linear_cross_entropy_loss
from gla_ext.ops._checks import check_tensors
from gla_ext.ops._door import is_sharded

L2_WARP = 1e-4  # FLA's l2_penalty_factor
_TOKENS_AT_ONCE = 2048


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
    """The loss of x `[B, T, hidden_size]`, and its logits, or None where config has them never be
    there, by its fuse_cross_entropy and fuse_linear_cross_entropy. For the rest see
    `next_token_loss`.
    """
    if cp_context is not None and config.use_l2warp:
        raise NotImplementedError("GLAForCausalLM: expected no use_l2warp beside cp_context")
    if config.fuse_linear_cross_entropy and is_plain(head, biased=True):
        targets = _targets(labels, x, cu_seqlens, cp_context, shifted)
        total = linear_cross_entropy(x.flatten(0, 1), targets, head.weight, head.bias)
        loss = _mean(total, targets, num_items_in_batch, cp_context)
        if config.use_l2warp:
            greatest = _greatest_logits(x.flatten(0, 1), head.weight, head.bias)
            loss = loss + _l2_warp(greatest, num_items_in_batch)
        return loss, None
    logits = head(x)
    loss = next_token_loss(
        logits,
        labels,
        num_items_in_batch,
        cu_seqlens,
        cp_context,
        fuse_cross_entropy=config.fuse_cross_entropy or config.fuse_linear_cross_entropy,
        inplace_backward=training,
        shifted=shifted,
    )
    if config.use_l2warp:
        loss = loss + _l2_warp(_greatest(logits), num_items_in_batch)
    return loss, None if config.fuse_linear_cross_entropy else logits


def _l2_warp(greatest: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
    """0, with the gradient `1e-4 / N` times it to each of the N greatest logits, as FLA's l2_warp.

    FLA divides it by num_items_in_batch too, where that divides the loss.
    """
    wide = greatest.to(torch.promote_types(greatest.dtype, torch.float32))
    half = wide.square().sum() * (0.5 * L2_WARP / max(wide.numel(), 1))
    if num_items_in_batch is not None:
        half = half / num_items_in_batch
    return half - half.detach()


def _greatest(logits: Tensor) -> Tensor:
    """The greatest of each token's, `[B, T]`."""
    if is_sharded(logits):
        from gla_ext.distributed.vocabulary import is_sharded_by_vocabulary, sharded_greatest

        if is_sharded_by_vocabulary(logits):
            return sharded_greatest(logits)
    return logits.max(-1).values


def _greatest_logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Of each token of x `[N, D]`, in fp32 `[N]`, without all logits at once: which one it is takes
    a product more, some tokens at a time.
    """
    with torch.no_grad():
        parts = [F.linear(part, weight, bias).argmax(-1) for part in x.split(_TOKENS_AT_ONCE)]
        index = torch.cat(parts)
    dtype = torch.promote_types(x.dtype, torch.float32)
    greatest = (x.to(dtype) * F.embedding(index, weight).to(dtype)).sum(-1)
    return greatest if bias is None else greatest + bias[index].to(dtype)


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
    """Mean cross entropy of logits at t against labels at t + 1, nats a token.

    Args:
        logits: `[B, T, vocab_size]`.
        labels: int64 `[B, T]`; -100 does not count.
        num_items_in_batch: divides the sum in place of the number of labels that count, so that
            the micro-batches of one step add up to its mean. Default: None.
        cu_seqlens: int32 or int64 `[N + 1]`, offsets of the sequences packed into a batch of one:
            the first label of each does not count, as in a batch of them, nor do labels after the
            last offset. Default: None.
        cp_context: of one rank's logits and labels, see `GLAForCausalLM.forward`; in place of
            cu_seqlens, and num_items_in_batch is the number of all ranks. Default: None.
        fuse_cross_entropy: by `gla_ext.losses.cross_entropy_loss`, or by torch's operations.
            Default: True.
        inplace_backward: as `gla_ext.losses.cross_entropy_loss`'s: backward writes the gradient
            over the logits. Default: False.
        shifted: labels are shifted already: logits at t are compared with labels at t, in every
            sequence. Default: False.

    Returns:
        A scalar, fp32 or, of fp64 logits, fp64; NaN when no label counts.

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
    """What x `[B, T, ...]` is compared with at each token, `[B * T]`."""
    if shifted:
        if labels.shape != x.shape[:2]:
            raise ValueError(
                f"next_token_loss: expected shifted labels to have shape {list(x.shape[:2])}, got "
                f"{list(labels.shape)}"
            )
        return labels.to(x.device).flatten()
    if cp_context is not None:
        from gla_ext.distributed.loss import next_labels

        return next_labels(labels, cp_context).to(x.device).flatten()
    labels = labels[:, 1:].to(x.device)
    if cu_seqlens is not None:
        labels = labels.where(_goes_on(cu_seqlens.to(x.device), x.shape[1]), IGNORE_INDEX)
    return F.pad(labels, (0, 1), value=IGNORE_INDEX)[:, : x.shape[1]].flatten()


def _mean(
    total: Tensor, targets: Tensor, num_items_in_batch: Tensor | int | None, cp_context: Any
) -> Tensor:
    """Of the sum over the targets, or with a context over those of all ranks."""
    count = _count(targets, num_items_in_batch)
    if cp_context is None:
        return total / count
    from gla_ext.distributed.loss import mean_over_ranks

    return mean_over_ranks(total, count, num_items_in_batch is None, cp_context)


def _count(targets: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor | int:
    if num_items_in_batch is None:
        return (targets != IGNORE_INDEX).sum()
    if isinstance(num_items_in_batch, Tensor):
        return num_items_in_batch.to(targets.device)
    return num_items_in_batch


def _goes_on(cu_seqlens: Tensor, T: int) -> Tensor:
    """Whether tokens 1 to T - 1 are of the sequence of the token before, bool `[T - 1]`."""
    tokens = torch.arange(T, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    # Sequences count from 1; after the last offset the number is that of offsets.
    sequences = torch.searchsorted(cu_seqlens, tokens, right=True)
    return (sequences[1:] == sequences[:-1]) & (sequences[1:] < len(cu_seqlens))


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
    if is_sharded(logits):
        from gla_ext.distributed.vocabulary import is_sharded_by_vocabulary, sharded_cross_entropy

        if is_sharded_by_vocabulary(logits):
            return sharded_cross_entropy(logits, targets)
    if fused:
        return cross_entropy_loss(logits, targets, inplace_backward=inplace_backward)[0].sum()
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")


def linear_cross_entropy(x: Tensor, targets: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same of logits `x @ weight.T + bias`, which are never there at once."""
    return fused_linear_cross_entropy_loss(x, targets, weight, bias, reduction="sum")
