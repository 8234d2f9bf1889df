"""Where the cuts between ranks fall: arithmetic on the host, of integers alone.

Each rank holds one part of the text, in the order of the ranks. Its own sequences are those with a
token in it; one that passes over a rank without tokens is its own too, and an empty sequence
belongs to the rank at which it lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Cut:
    """A rank's part of the text, for tensors of one length.

    rank: whose part it is.
    lengths: tokens of every rank.
    first: the number in the whole text of its first own sequence.
    offsets: of its own sequences in its tensors, one more than they are; of none, (0,).
    before, after: how many ranks before and after share its first and its last sequence.
    cu_seqlens: the offsets on the tensors' device; None where each row of the batch is one
        sequence.

    Properties are computed anew: torch.compile refuses to keep one in a frozen dataclass.
    """

    rank: int
    lengths: tuple[int, ...]
    first: int
    offsets: tuple[int, ...]
    before: int
    after: int
    cu_seqlens: Tensor | None

    @property
    def count(self) -> int:
        """The number of its own sequences."""
        return len(self.offsets) - 1

    @property
    def sequences(self) -> tuple[int, ...]:
        """The number in the whole text of each of its own sequences, the rows of states."""
        return tuple(range(self.first, self.first + self.count))

    @property
    def spans(self) -> tuple[int, ...]:
        """Start and end of its first sequence, start and end of its last."""
        own = self.offsets
        return (*own[:2], *own[-2:]) if self.count else (0, 0, 0, 0)

    @property
    def last_tokens(self) -> int:
        """Tokens of its last sequence here."""
        return self.spans[3] - self.spans[2]

    @property
    def begins(self) -> bool:
        """Whether its last sequence begins here."""
        return self.count > 1 or (self.count == 1 and self.before == 0)


def cut_text(
    offsets: Sequence[int], lengths: Sequence[int], rank: int, device: torch.device | None
) -> Cut:
    """A rank's cut, from the offsets of the sequences in the whole text; device is that of
    cu_seqlens, None where each row of the batch is one sequence.
    """
    starts = [sum(lengths[:r]) for r in range(len(lengths) + 1)]
    start, end = starts[rank : rank + 2]
    is_last = rank == len(lengths) - 1
    own = [
        i
        for i, (first, last) in enumerate(pairwise(offsets))
        if (first < last and _meets(first, last, start, end))
        or (first == last and (start <= first < end or (is_last and first >= end)))
    ]
    first, local, before, after = 0, (0,), 0, 0
    if own:
        first, last = own[0], own[-1] + 1
        local = tuple(min(max(x, start), end) - start for x in offsets[first : last + 1])
        if offsets[first] < start:
            before = rank - next(r for r in range(rank) if offsets[first] < starts[r + 1])
        if offsets[last] > end:
            after = next(r for r in range(rank, len(lengths)) if offsets[last] <= starts[r + 1])
            after -= rank
    cu_seqlens = None if device is None else torch.tensor(local, dtype=torch.int32, device=device)
    return Cut(rank, tuple(lengths), first, local, before, after, cu_seqlens)


def _meets(first: int, last: int, start: int, end: int) -> bool:
    """Whether a sequence that is not empty has a token in a part, or passes over an empty one."""
    return first < start < last if start == end else first < end and last > start
