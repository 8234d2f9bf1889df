"""Where the tokens are cut between ranks: arithmetic on integers, on the host.

Each rank holds one part of the tokens, in the order of the ranks. A rank's own sequences are those
with a token in its part. A rank without tokens also owns the sequence that begins before it and
goes on after it. An empty sequence belongs to the rank at which it lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Cut:
    """A rank's part of the tokens, for tensors of one length.

    rank: the rank.
    lengths: number of tokens of every rank.
    first: index of the rank's first own sequence among all sequences.
    offsets: offsets of its own sequences in its tensors, one more than sequences; (0,) if it has
    none.
    before, after: number of earlier ranks that share its first sequence, and of later ranks that
    share its last one.
    cu_seqlens: the offsets on the tensors' device; None if each row of the batch is one sequence.

    Properties are computed at each access: torch.compile cannot cache one in a frozen dataclass.
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
        """The number of the rank's own sequences."""
        return len(self.offsets) - 1

    @property
    def sequences(self) -> tuple[int, ...]:
        """The index of each own sequence among all sequences; states have one row for each."""
        return tuple(range(self.first, self.first + self.count))

    @property
    def spans(self) -> tuple[int, ...]:
        """Start and end of the first own sequence, then start and end of the last."""
        own = self.offsets
        return (*own[:2], *own[-2:]) if self.count else (0, 0, 0, 0)

    @property
    def last_tokens(self) -> int:
        """Tokens of the last own sequence on this rank."""
        return self.spans[3] - self.spans[2]

    @property
    def begins(self) -> bool:
        """Whether the last own sequence begins on this rank."""
        return self.count > 1 or (self.count == 1 and self.before == 0)


def cut_text(
    offsets: Sequence[int], lengths: Sequence[int], rank: int, device: torch.device | None
) -> Cut:
    """A rank's cut, from the offsets of the sequences in the unsplit tokens. device is that of
    cu_seqlens, or None if each row of the batch is one sequence.
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
    """Whether a non-empty sequence has a token in a part, or passes over an empty part."""
    return first < start < last if start == end else first < end and last > start
