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

from torch import Tensor

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


@dataclass(frozen=True, eq=False)
class Cut:
    """A rank's part of the text, or in the zigzag layout its two, for tensors of one length.

    parts: this rank's, in the order of its tensors.
    lengths: tokens of every part of the text, in order.
    cu_seqlens: offsets of this rank's own sequences in its tensors, on their device; None where
        each row of the batch is one sequence.

    Properties are computed anew: torch.compile refuses to keep one in a frozen dataclass.
    """

    parts: tuple[Part, ...]
    lengths: tuple[int, ...]
    cu_seqlens: Tensor | None

    @property
    def counts(self) -> tuple[int, ...]:
        """The own sequences of each part."""
        return tuple(part.sequences[1] - part.sequences[0] for part in self.parts)

    @property
    def before(self) -> tuple[int, ...]:
        """How many parts before each share its first sequence."""
        return tuple(part.before for part in self.parts)

    @property
    def after(self) -> tuple[int, ...]:
        """How many parts after each share its last sequence."""
        return tuple(part.after for part in self.parts)

    @property
    def spans(self) -> tuple[int, ...]:
        """Of each part the tokens of its first and of its last sequence, start and end of both."""
        spans, start = [], 0
        for part in self.parts:
            own = part.offsets
            ends = (own[0], own[1], own[-2], own[-1]) if len(own) > 1 else (0, 0, 0, 0)
            spans += [start + x for x in ends]
            start += part.length
        return tuple(spans)

    @property
    def is_one_sequence_each(self) -> bool:
        """Whether each part is one sequence's, as a row of a batch is, and parts are alike."""
        length = self.parts[0].length
        return all(part.offsets == (0, length) and part.length == length for part in self.parts)

    @property
    def sequences(self) -> tuple[int, ...]:
        """The number in the whole text of each of this rank's own sequences, the rows of states."""
        return tuple(i for part in self.parts for i in range(*part.sequences))


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
