"""Cross entropy of the logits of many tokens, some of them at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from gla_ext._graphs import is_recorded

IGNORE_INDEX = -100
MOST_LOGITS = 1 << 25  # in fp32 at a time: 128 MiB


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
