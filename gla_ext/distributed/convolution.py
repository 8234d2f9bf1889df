"""The halo of a short convolution: the inputs that it reads from earlier ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gla_ext.distributed._cuts import Cut
from gla_ext.distributed.attention import check_offsets_are_the_contexts
from gla_ext.ops._collectives import all_gather


def convolve_with_context(
    context: Any,
    convolutions: Sequence[Any],
    inputs: Sequence[Tensor],
    caches: Sequence[Tensor | None] | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...] | None]:
    """`LocalContext.convolve` for this rank's tokens, with one small all-gather for all
    convolutions. Caches are read where a sequence begins on this rank. Returned caches are 0 for
    sequences that continue on the next rank. context is the `CPContext`.
    """
    x = inputs[0]
    cut = context.cut(x.shape[1], x.device)
    check_offsets_are_the_contexts("ShortConvolution", cu_seqlens, cut)
    width = max(conv.kernel_size[0] for conv in convolutions)
    channels = [t.shape[-1] for t in inputs]
    facts = {"kernel_size": width, "batch": x.shape[0], "channels": (*channels,), "dtype": x.dtype}
    context.compare("ShortConvolution", tuple(facts.values()), lambda: facts)
    halos: Sequence[Tensor | None] = [None] * len(inputs)
    if context.size > 1 and width > 1:
        halo = _Halo.apply(_tails(inputs, caches, cut, width - 1), context, cut)
        halos = halo.split(channels, -1)
    outputs, states = [], []
    for n, (conv, x) in enumerate(zip(convolutions, inputs, strict=True)):
        given = None if caches is None else caches[n]
        cache = _cache(conv.kernel_size[0], given, halos[n], cut, x)
        y, state = conv(x, cache, output_final_state, cut.cu_seqlens)
        outputs.append(y)
        states.append(_ended(state, cut) if output_final_state else None)
    return tuple(outputs), tuple(states) if output_final_state else None


def _tails(
    inputs: Sequence[Tensor], caches: Sequence[Tensor | None] | None, cut: Cut, width: int
) -> Tensor:
    """The last inputs of this rank's last sequence for all convolutions, `[B, width, D]`. If the
    sequence begins here, missing inputs come from its cache, or are 0.
    """
    pieces, n = [], min(cut.last_tokens, width)
    for i, x in enumerate(inputs):
        tail = x[:, x.shape[1] - n :]
        given = None if caches is None or not cut.begins else caches[i]
        if n < width and given is not None:
            own = given if cut.cu_seqlens is None else given[-1:]
            tail = torch.cat([own[:, :, 1:].mT.to(x.dtype), tail], 1)
            tail = tail[:, max(0, tail.shape[1] - width) :]
        pieces.append(F.pad(tail, (0, 0, width - tail.shape[1], 0)))
    return torch.cat(pieces, -1)


class _Halo(torch.autograd.Function):
    """From the tails `[B, width, D]` of all ranks, the inputs before this rank's first sequence,
    `[B, width, D]`, 0 where there are none. All ranks must call it, forward and backward.
    """

    @staticmethod
    def forward(ctx: Any, tails: Tensor, context: Any, cut: Cut) -> Tensor:
        ctx.context, ctx.cut = context, cut
        every = all_gather(tails, context.size, context.group_name)  # [W, B, width, D]
        width, pieces = tails.shape[1], []
        begin, rank = cut.rank - cut.before, cut.rank - 1
        missing = width if cut.before else 0
        while missing > 0:
            n = missing if rank == begin else min(missing, cut.lengths[rank])
            pieces.insert(0, every[rank][:, width - n :])
            missing, rank = missing - n, rank - 1
        return torch.cat(pieces, 1) if pieces else torch.zeros_like(tails)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        context, cut = ctx.context, ctx.cut
        every = all_gather(gradient, context.size, context.group_name)
        total, end = torch.zeros_like(gradient), gradient.shape[1]
        # The halo of a later rank ends with the inputs of the ranks between; before those comes
        # this rank's tail, all of it if the sequence begins here.
        for rank in range(cut.rank + 1, cut.rank + 1 + cut.after):
            n = end if cut.begins else min(cut.last_tokens, end)
            if n <= 0:
                break
            total[:, gradient.shape[1] - n :] += every[rank][:, end - n : end]
            end -= cut.lengths[rank]
        return total, None, None


def _cache(W: int, given: Tensor | None, halo: Tensor | None, cut: Cut, x: Tensor) -> Tensor | None:
    """The caches of all of this rank's sequences, `[N, D, W]`."""
    if halo is None:
        return given
    by_rows = cut.cu_seqlens is None
    if given is None:
        given = x.new_zeros(x.shape[0] if by_rows else cut.count, x.shape[-1], W)
    entering = F.pad(halo[:, halo.shape[1] - (W - 1) :], (0, 0, 1, 0)).mT.to(given.dtype)
    own = given if by_rows else given[:1]
    if not by_rows and cut.count == 0:
        entering = entering[:0]
    # The entering inputs, or a sequence's own cache. Both depend on the halo, as all ranks must run
    # its backward.
    own = entering if cut.before else own + entering
    return own if by_rows else torch.cat([own, given[1:]])


def _ended(state: Tensor, cut: Cut) -> Tensor:
    """The caches after the last token, 0 for sequences that continue on another rank."""
    if cut.cu_seqlens is None:
        return torch.zeros_like(state) if cut.after or not cut.count else state
    if cut.after == 0:
        return state
    return torch.cat([state[:-1], torch.zeros_like(state[-1:])])
