"""Cross entropy of logits that are sharded over the vocabulary, so that no rank has a whole row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gla_ext.losses import IGNORE_INDEX
from gla_ext.ops._collectives import all_max, all_sum


class ShardedCrossEntropy(torch.autograd.Function):
    """`gla_ext.model.loss.cross_entropy` of the columns `[N, columns]` of this rank's shard, the
    first of which is column `start` of all. The result is the same on every rank.
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
