"""What a short convolution reads of the tokens before this rank's: its halo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gla_ext.distributed._cuts import Cut
from gla_ext.distributed.attention import (
    check_offsets_are_the_contexts,
    parts_of_rows,
    rows_of_parts,
)
from gla_ext.ops._collectives import all_gather


def convolve_with_context(
    context: Any,
    convolutions: Sequence[Any],
    inputs: Sequence[Tensor],
    caches: Sequence[Tensor | None] | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...] | None]:
    """`LocalContext.convolve` of this rank's tokens; one small all-gather for all of them.

    Args:
        context: the `CPContext`.
        caches: read where a sequence begins on this rank.

    Returns:
        The outputs; and the caches, 0 in rows of sequences that go on after this rank, or None.
    """
    x = inputs[0]
    cut = context.cut(x.shape[1], x.device)
    check_offsets_are_the_contexts("ShortConvolution", cu_seqlens, cut)
    width = max(conv.kernel_size[0] for conv in convolutions)
    channels = [t.shape[-1] for t in inputs]
    facts = {"kernel_size": width, "batch": x.shape[0], "channels": (*channels,), "dtype": x.dtype}
    context.compare("ShortConvolution", tuple(facts.values()), lambda: facts)
    by_rows = cut.cu_seqlens is None
    both = by_rows and len(cut.parts) == 2
    halos: Sequence[Tensor | None] = [None] * len(inputs)
    if context.size > 1 and width > 1:
        halo = _Halo.apply(_tails(inputs, caches, cut, width - 1), context, cut)
        halos = halo.split(channels, -1)
    outputs, states = [], []
    for n, (conv, x) in enumerate(zip(convolutions, inputs, strict=True)):
        given = None if caches is None else caches[n]
        cache = _cache(conv.kernel_size[0], given, halos[n], cut, x)
        if not both:
            y, state = conv(x, cache, output_final_state, cut.cu_seqlens)
        elif x.shape[1] % 2 == 0:
            y, state = conv(rows_of_parts(x), cache, output_final_state, None)
            y = parts_of_rows(y, x.shape[1])
        else:  # a state is the last inputs, among which no zeros must be
            y, state = _each_part(conv, x, cache, output_final_state, cut)
        outputs.append(y)
        states.append(_ended(state, cut) if output_final_state else None)
    return tuple(outputs), tuple(states) if output_final_state else None


def _each_part(
    conv: Any, x: Tensor, cache: Tensor | None, output_final_state: bool, cut: Cut
) -> tuple[Tensor, Tensor | None]:
    """A convolution of two parts of unlike lengths, one after the other; its caches are the rows of
    both.
    """
    pieces = x.split([part.length for part in cut.parts], 1)
    caches = (None, None) if cache is None else cache.unflatten(0, (-1, 2)).unbind(1)
    results = [
        conv(piece, own, output_final_state, None)
        for piece, own in zip(pieces, caches, strict=True)
    ]
    y = torch.cat([y for y, _ in results], 1)
    if not output_final_state:
        return y, None
    return y, torch.stack([state for _, state in results], 1).flatten(0, 1)


def _tails(
    inputs: Sequence[Tensor], caches: Sequence[Tensor | None] | None, cut: Cut, width: int
) -> Tensor:
    """The last inputs of each part's last sequence, `[parts, B, width, D]` of all convolutions;
    where it begins there, before its first token those of its cache, or 0.
    """
    tails, end, rows = [], 0, 0
    for p, (part, count) in enumerate(zip(cut.parts, cut.counts, strict=True)):
        end, rows, pieces = end + part.length, rows + count, []
        n = min(part.last_tokens, width)
        for i, x in enumerate(inputs):
            tail = x[:, end - n : end]
            given = None if caches is None or not _begins(cut, p) else caches[i]
            if n < width and given is not None:
                own = given if cut.cu_seqlens is None else given[rows - 1 : rows]
                tail = torch.cat([own[:, :, 1:].mT.to(x.dtype), tail], 1)
                tail = tail[:, max(0, tail.shape[1] - width) :]
            pieces.append(F.pad(tail, (0, 0, width - tail.shape[1], 0)))
        tails.append(torch.cat(pieces, -1))
    return torch.stack(tails)


def _begins(cut: Cut, p: int) -> bool:
    """Whether a part's last sequence begins in it."""
    return cut.counts[p] > 1 or (cut.counts[p] == 1 and cut.before[p] == 0)


class _Halo(torch.autograd.Function):
    """The inputs before each part's first sequence, of the tails of all parts: `[parts, B, width,
    D]` both, 0 where there are none. Every rank takes part, forward and backward.
    """

    @staticmethod
    def forward(ctx: Any, tails: Tensor, context: Any, cut: Cut) -> Tensor:
        ctx.context, ctx.cut = context, cut
        every = _in_order(all_gather(tails, context.size, context.group_name))
        width, halos = tails.shape[2], []
        for part in cut.parts:
            begin, place, pieces = part.place - part.before, part.place - 1, []
            missing = width if part.before else 0
            while missing > 0:
                n = missing if place == begin else min(missing, cut.lengths[place])
                pieces.insert(0, every[place][:, width - n :])
                missing, place = missing - n, place - 1
            halos.append(torch.cat(pieces, 1) if pieces else torch.zeros_like(tails[0]))
        return torch.stack(halos)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        context, cut = ctx.context, ctx.cut
        every = _in_order(all_gather(gradient, context.size, context.group_name))
        width, gradients = gradient.shape[2], []
        for p, part in enumerate(cut.parts):
            total, between = torch.zeros_like(gradient[0]), 0
            # A follower's halo holds this part's tail from `between` tokens before it on, all of it
            # where the sequence begins here.
            for place in range(part.place + 1, part.place + 1 + part.after):
                n = width - between if _begins(cut, p) else min(part.last_tokens, width - between)
                if n <= 0:
                    break
                end = width - between
                total[:, width - n :] += every[place][:, end - n : end]
                between += cut.lengths[place]
            gradients.append(total)
        return torch.stack(gradients), None, None


def _in_order(every: Tensor) -> list[Tensor]:
    """What the ranks gathered, `[W, parts, ...]`, in the order of the parts."""
    fronts = list(every[:, 0])
    return fronts if every.shape[1] == 1 else [*fronts, *every[:, 1].flip(0)]


def _cache(W: int, given: Tensor | None, halo: Tensor | None, cut: Cut, x: Tensor) -> Tensor | None:
    """The cache of all of this rank's sequences, `[N, D, W]`."""
    if halo is None:
        return given
    D = x.shape[-1]
    entering = F.pad(halo[:, :, halo.shape[2] - (W - 1) :], (0, 0, 1, 0)).mT  # [parts, B, D, W]
    if cut.cu_seqlens is None:
        rows = given if given is not None else x.new_zeros(x.shape[0], D, W)
        by_part = [rows, *(torch.zeros_like(rows) for _ in cut.parts[1:])]
        pairs = zip(by_part, entering, cut.parts, strict=True)
        found = [_joined(own, new, part.before > 0) for own, new, part in pairs]
        return found[0] if len(found) == 1 else torch.stack(found, 1).flatten(0, 1)
    rows = given if given is not None else x.new_zeros(sum(cut.counts), D, W)
    found = []
    for own, new, part in zip(rows.split(cut.counts), entering, cut.parts, strict=True):
        if own.shape[0]:
            found += [_joined(own[:1], new, part.before > 0), own[1:]]
        else:
            found.append(new[:0].to(own.dtype))
    return torch.cat(found)


def _joined(own: Tensor, entering: Tensor, enters: bool) -> Tensor:
    """What enters, or a sequence's own cache; either way the halo's gradient is asked for."""
    entering = entering.to(own.dtype)
    return entering if enters else own + entering


def _ended(state: Tensor, cut: Cut) -> Tensor:
    """The caches after the last token, 0 of what goes on on another rank."""
    if cut.cu_seqlens is None:
        by_part = state.unflatten(0, (-1, len(cut.parts))).unbind(1)
        for own, part, count in zip(by_part, cut.parts, cut.counts, strict=True):
            if count and part.after == 0:
                return own
        return torch.zeros_like(by_part[0])
    rows = []
    for own, part in zip(state.split(cut.counts), cut.parts, strict=True):
        if part.after and own.shape[0]:
            rows += [own[:-1], torch.zeros_like(own[-1:])]
        else:
            rows.append(own)
    return torch.cat(rows)
