"""Cross entropy of logits that are sharded over the vocabulary: no rank has a whole row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gla_ext.losses import IGNORE_INDEX
from gla_ext.ops._collectives import all_max, all_sum


class ShardedGreatest(torch.autograd.Function):
    """The greatest logit of each row, of a shard's columns `[..., columns]` and their place, on
    every rank; of several the first has the gradient.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, start: int, group_name: str) -> Tensor:
        if local.shape[-1]:
            value, index = local.max(-1)
        else:
            value = local.new_full(local.shape[:-1], -torch.inf)
            index = torch.zeros_like(value, dtype=torch.long)
        greatest = all_max(value, group_name)
        # Ranks that have none stand behind all others.
        place = (start + index).where(value == greatest, torch.iinfo(torch.int64).max)
        ctx.save_for_backward(index, place == -all_max(-place, group_name))
        ctx.width = local.shape[-1]
        return greatest

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        index, mine = ctx.saved_tensors
        result = gradient.new_zeros(*gradient.shape, ctx.width)
        if ctx.width:
            result.scatter_(-1, index.unsqueeze(-1), gradient.where(mine, 0).unsqueeze(-1))
        return result, None, None


class ShardedCrossEntropy(torch.autograd.Function):
    """`gla_ext.model.loss.cross_entropy` of a shard's columns `[N, columns]` and their place, on
    every rank the same.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, start: int, group_name: str, targets: Tensor) -> Tensor:
        wide = local.to(torch.promote_types(local.dtype, torch.float32))
        counts = targets != IGNORE_INDEX
        columns = targets - start
        mine = counts & (columns >= 0) & (columns < local.shape[1])
        columns = columns.where(mine, 0).unsqueeze(1)
        if local.shape[1]:
            greatest, at_target = wide.amax(1), wide.gather(1, columns)[:, 0].where(mine, 0)
        else:
            greatest = wide.new_full((wide.shape[0],), -torch.inf)
            at_target = wide.new_zeros(wide.shape[0])
        greatest = all_max(greatest, group_name)
        total = (wide - greatest.unsqueeze(1)).exp().sum(1)
        total, at_target = all_sum(torch.stack([total, at_target]), group_name)
        log_total = greatest + total.log()
        ctx.save_for_backward(local, log_total, columns, mine, counts)
        return (log_total - at_target).where(counts, 0).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        local, log_total, columns, mine, counts = ctx.saved_tensors
        p = (local.to(log_total.dtype) - log_total.unsqueeze(1)).exp_()
        if local.shape[1]:
            p.scatter_add_(1, columns, -mine.to(p.dtype).unsqueeze(1))
        return (p * gradient.where(counts, 0).unsqueeze(1)).to(local.dtype), None, None, None
