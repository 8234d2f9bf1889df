"""The language models' loss if the tokens are split across ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gla_ext.losses import IGNORE_INDEX
from gla_ext.ops._collectives import all_gather, all_sum, sum_of_averaged
from gla_ext.ops._context import goes_on


def mean_over_ranks(context: Any, total: Tensor, count: Tensor | int, counted_here: bool) -> Tensor:
    """`LocalContext.mean` over the tokens of all ranks, returned on every rank, from the sum over
    this rank's tokens. Its gradients are scaled for a later average over the group.
    """
    if counted_here:
        count = all_sum(count, context.group_name)
    return sum_of_averaged(total, context.size, context.group_name) / count


def next_labels(labels: Tensor, context: Any) -> Tensor:
    """`LocalContext.next_labels` for this rank; the label after the last token comes from the next
    rank.
    """
    T = labels.shape[1]
    cut = context.cut(T, labels.device)
    none = labels.new_full((labels.shape[0], 1), IGNORE_INDEX)
    every = all_gather(labels[:, :1] if T else none, context.size, context.group_name)  # [W, B, 1]
    inside = labels[:, 1:]
    if cut.cu_seqlens is not None:
        inside = inside.where(goes_on(cut.cu_seqlens, T), IGNORE_INDEX)
    if not T:
        return inside
    followers = range(cut.rank + 1, cut.rank + 1 + cut.after)
    follower = next((r for r in followers if cut.lengths[r]), None)
    return torch.cat([inside, none if follower is None else every[follower]], 1)
