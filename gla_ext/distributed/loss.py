"""The language models' loss over tokens that are cut over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gla_ext.distributed._collectives import all_gather, all_sum, sum_of_averaged
from gla_ext.distributed.context import as_context
from gla_ext.model.loss import IGNORE_INDEX


def mean_over_ranks(
    total: Tensor, targets: Tensor, num_items_in_batch: Tensor | int | None, cp_context: Any
) -> Tensor:
    """One process's mean loss on every rank, of the sum over this rank's tokens.

    Args:
        total: scalar, the sum over this rank's targets.
        targets: of `next_labels`.
        num_items_in_batch: the number of labels of all ranks. Default: counted.

    Returns:
        The mean over all ranks. Its gradients are for what averages gradients over the group.
    """
    context = as_context(cp_context)
    if num_items_in_batch is None:
        num_items_in_batch = all_sum((targets != IGNORE_INDEX).sum(), context.group_name)
    elif isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return sum_of_averaged(total, context.size, context.group_name) / num_items_in_batch


def next_labels(labels: Tensor, x: Tensor, cp_context: Any) -> Tensor:
    """The label that follows each token, `[B * T]`; -100 after the last of a sequence.

    Args:
        labels: this rank's own `[B, T]`, unshifted; the label across a cut is fetched.
        x: on whose device the result is.
    """
    context = as_context(cp_context)
    cut = context.cut(labels.shape[1], labels.device)
    pieces = labels.split([part.length for part in cut.parts], 1)
    none = labels.new_full((labels.shape[0], 1), IGNORE_INDEX)
    firsts = torch.stack([piece[:, :1] if piece.shape[1] else none for piece in pieces])
    every = all_gather(firsts, context.size, context.group_name)  # [W, parts, B, 1]
    in_order = [*every[:, 0], *(every[:, 1].flip(0) if len(pieces) == 2 else ())]
    goes_on = None
    if cut.cu_seqlens is not None:
        from gla_ext.model.loss import _goes_on

        goes_on = _goes_on(cut.cu_seqlens, labels.shape[1])
    shifted, start = [], 0
    for part, piece in zip(cut.parts, pieces, strict=True):
        inside = piece[:, 1:]
        if goes_on is not None:
            inside = inside.where(goes_on[start : start + inside.shape[1]], IGNORE_INDEX)
        followers = range(part.place + 1, part.place + 1 + part.after)
        follower = next((p for p in followers if cut.lengths[p]), None)
        shifted.append(inside)
        if part.length:
            shifted.append(none if follower is None else in_order[follower])
        start += part.length
    return torch.cat(shifted, 1).to(x.device).flatten()
