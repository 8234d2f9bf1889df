"""Where the cuts between ranks fall: arithmetic on the host, of integers alone.

The text is cut into parts, in order. Rank r holds part r, or in the zigzag layout parts r and
2 W - 1 - r, one after the other in its tensors. A part's own sequences are those with a token in
it; one that passes over a part without tokens is its own too, and an empty sequence belongs to the
part at which it lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

LAYOUTS = ("contiguous", "zigzag")


@dataclass(frozen=True)
class Part:
    """One part of the text, as the rank that holds it needs to know it.

    place: its number, in the text's order.
    length: its tokens.
    sequences: the numbers of its own sequences, first and one past the last.
    offsets: of its own sequences in the part, one more than they are; of none, (0,).
    before, after: how many parts before and after it share its first and its last sequence.
    last_tokens: tokens of its last sequence in it.
    """

    place: int
    length: int
    sequences: tuple[int, int]
    offsets: tuple[int, ...]
    before: int
    after: int
    last_tokens: int


def places_of(rank: int, size: int, layout: str) -> tuple[int, ...]:
    """The numbers of a rank's parts."""
    return (rank,) if layout == "contiguous" else (rank, 2 * size - 1 - rank)


def part_lengths(rank_lengths: Sequence[int], layout: str) -> tuple[int, ...]:
    """The tokens of every part, of those of every rank: of an odd number the front has one more."""
    if layout == "contiguous":
        return tuple(rank_lengths)
    return (*((n + 1) // 2 for n in rank_lengths), *(n // 2 for n in reversed(rank_lengths)))


def cut_part(offsets: Sequence[int], lengths: Sequence[int], place: int) -> Part:
    """The part of that number.

    Args:
        offsets: of the sequences in the whole text.
        lengths: of every part.
        place: the part's number.
    """
    ends = list(accumulate(lengths))
    starts = [end - length for end, length in zip(ends, lengths, strict=True)]
    start, end = starts[place], ends[place]
    is_last = place == len(lengths) - 1
    own = [
        i
        for i, (first, last) in enumerate(pairwise(offsets))
        if (first < last and _meets(first, last, start, end))
        or (first == last and (start <= first < end or (is_last and first >= end)))
    ]
    if not own:
        return Part(place, end - start, (0, 0), (0,), 0, 0, 0)
    first, last = own[0], own[-1] + 1
    local = tuple(min(max(x, start), end) - start for x in offsets[first : last + 1])
    begins, ends_at = offsets[first], offsets[last]
    before = after = 0
    if begins < start:
        before = place - next(p for p in range(place) if starts[p] <= begins < ends[p])
    if ends_at > end:
        beyond = range(place + 1, len(lengths))
        after = next(p for p in beyond if starts[p] < ends_at <= ends[p]) - place
    return Part(
        place,
        end - start,
        (first, last),
        local,
        before,
        after,
        local[-1] - local[-2],
    )


def _meets(first: int, last: int, start: int, end: int) -> bool:
    """Whether a sequence that is not empty has a token in a part, or passes over an empty one."""
    return first < start < last if start == end else first < end and last > start
