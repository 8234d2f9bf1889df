"""The language models' loss over tokens that are cut over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gla_ext.losses import IGNORE_INDEX
from gla_ext.ops._collectives import all_gather, all_sum, sum_of_averaged
from gla_ext.ops._context import goes_on


def mean_over_ranks(context: Any, total: Tensor, count: Tensor | int, counted_here: bool) -> Tensor:
    """`LocalContext.mean` on every rank, of the sum over this rank's tokens.

    Returns:
        The mean over all ranks. Its gradients are for what averages gradients over the group.
    """
    if counted_here:
        count = all_sum(count, context.group_name)
    return sum_of_averaged(total, context.size, context.group_name) / count


def next_labels(labels: Tensor, context: Any) -> Tensor:
    """The label that follows each token, `[B, T]`; -100 after the last of a sequence.

    Args:
        labels: this rank's own, unshifted; the label across a cut is fetched.
    """
    cut = context.cut(labels.shape[1], labels.device)
    pieces = labels.split([part.length for part in cut.parts], 1)
    none = labels.new_full((labels.shape[0], 1), IGNORE_INDEX)
    firsts = torch.stack([piece[:, :1] if piece.shape[1] else none for piece in pieces])
    every = all_gather(firsts, context.size, context.group_name)  # [W, parts, B, 1]
    in_order = [*every[:, 0], *(every[:, 1].flip(0) if len(pieces) == 2 else ())]
    inner = None if cut.cu_seqlens is None else goes_on(cut.cu_seqlens, labels.shape[1])
    shifted, start = [], 0
    for part, piece in zip(cut.parts, pieces, strict=True):
        inside = piece[:, 1:]
        if inner is not None:
            inside = inside.where(inner[start : start + inside.shape[1]], IGNORE_INDEX)
        followers = range(part.place + 1, part.place + 1 + part.after)
        follower = next((p for p in followers if cut.lengths[p]), None)
        shifted.append(inside)
        if part.length:
            shifted.append(none if follower is None else in_order[follower])
        start += part.length
    return torch.cat(shifted, 1)
