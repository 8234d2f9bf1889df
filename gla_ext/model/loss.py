"""The loss of a language model: cross entropy of many tokens, some of them at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from gla_ext.ops._checks import check_tensors
from gla_ext.ops._tracing import is_recorded

IGNORE_INDEX = -100
MOST_LOGITS = 1 << 25  # in fp32 at a time: 128 MiB


def next_token_loss(
    logits: Tensor,
    labels: Tensor,
    num_items_in_batch: Tensor | int | None = None,
    cu_seqlens: Tensor | None = None,
    cp_context: Any = None,
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

    Returns:
        A scalar, fp32 or, of fp64 logits, fp64; NaN when no label counts.
    """
    names = "logits labels cu_seqlens"
    check_tensors("next_token_loss", names, logits, labels, cu_seqlens)
    if cp_context is not None:
        from gla_ext.distributed.loss import next_token_loss_with_context

        return next_token_loss_with_context(logits, labels, num_items_in_batch, cp_context)
    labels = labels[:, 1:].to(logits.device)
    if cu_seqlens is not None:
        goes_on = _goes_on(cu_seqlens.to(logits.device), logits.shape[1])
        labels = labels.where(goes_on, IGNORE_INDEX)
    targets = F.pad(labels, (0, 1), value=IGNORE_INDEX)
    total = cross_entropy(logits.flatten(0, 1), targets.flatten())
    if num_items_in_batch is None:
        num_items_in_batch = (targets != IGNORE_INDEX).sum()
    elif isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch


def _goes_on(cu_seqlens: Tensor, T: int) -> Tensor:
    """Whether tokens 1 to T - 1 are of the sequence of the token before, bool `[T - 1]`."""
    tokens = torch.arange(T, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    # Sequences count from 1; after the last offset the number is that of offsets.
    sequences = torch.searchsorted(cu_seqlens, tokens, right=True)
    return (sequences[1:] == sequences[:-1]) & (sequences[1:] < len(cu_seqlens))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum over tokens of -log softmax(logits)[target]; -100 does not count.

    In fp32, fp64 for fp64 logits, whatever torch's default dtype is.

    Memory in eager mode is that of the logits and, in backward, of their gradient: their wide form,
    which torch's own keeps until then, is there for some tokens at a time, and made again.

    Args:
        logits: `[N, vocab_size]`, any floating dtype.
        targets: int64 `[N]`.
    """
    if type(logits).__name__ == "DTensor":
        from gla_ext.distributed.vocabulary import is_sharded_by_vocabulary, sharded_cross_entropy

        if is_sharded_by_vocabulary(logits):
            return sharded_cross_entropy(logits, targets)
    # A compiler fuses torch's own; functorch, forward-mode AD, and tensors that are more than
    # tensors, know it.
    by_torch = (
        is_recorded()
        or torch._C._are_functorch_transforms_active()
        or type(logits) not in (Tensor, torch.nn.Parameter)
        or unpack_dual(logits).tangent is not None
    )
    return _whole(logits, targets) if by_torch else _CrossEntropy.apply(logits, targets)


def _whole(logits: Tensor, targets: Tensor) -> Tensor:
    logits = logits.to(_wide(logits))
    return F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")


def _wide(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _parts(logits: Tensor) -> Iterator[slice]:
    N, V = logits.shape
    rows = max(1, MOST_LOGITS // max(1, V))
    return (slice(start, start + rows) for start in range(0, N, rows))


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(logits, targets)
        total = logits.new_zeros((), dtype=_wide(logits))
        for rows in _parts(logits):
            log_p = torch.log_softmax(logits[rows], -1, dtype=_wide(logits))
            total += F.nll_loss(log_p, targets[rows], ignore_index=IGNORE_INDEX, reduction="sum")
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        logits, targets = ctx.saved_tensors
        if torch.is_grad_enabled():  # of a gradient that is to be differentiated again
            total = _whole(logits, targets)
            return torch.autograd.grad(total, logits, gradient, create_graph=True)[0], None
        if torch._C._functorch.is_legacy_batchedtensor(gradient):  # is_grads_batched: no out=
            with torch.enable_grad():
                leaf = logits.detach().requires_grad_()
                total = _whole(leaf, targets)
            return torch.autograd.grad(total, leaf, gradient)[0], None
        counts = targets != IGNORE_INDEX
        scale = torch.where(counts, gradient, 0.0).unsqueeze(1)
        targets = targets.where(counts, 0).unsqueeze(1)
        d_logits = torch.empty_like(logits)
        for rows in _parts(logits):
            p = torch.softmax(logits[rows], -1, dtype=_wide(logits))
            p.scatter_add_(1, targets[rows], p.new_full((), -1.0).expand_as(targets[rows]))
            torch.mul(p, scale[rows], out=d_logits[rows])
        return d_logits, None
