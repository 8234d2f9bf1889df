"""A text in one process, the same text cut over ranks, and the comparison of both."""

import dataclasses
import random
from itertools import accumulate, pairwise

import fla_context
import torch
import torch.distributed as dist
from common import assert_close
from hypothesis import strategies as st
from ranks import local, tokens_of

from gla_ext.distributed import build_cp_context
from gla_ext.ops._collectives import all_sum


@dataclasses.dataclass(frozen=True)
class Cut:
    """Tokens of each rank; lengths of packed sequences or None; rows, one where they are packed."""

    lengths: tuple[int, ...]
    sequences: tuple[int, ...] | None = None
    B: int = 1
    even: bool = False  # the context is not told the lengths
    flas: bool = False  # it is FLA's own, of its text

    @property
    def offsets(self):
        return None if self.sequences is None else torch.tensor([0, *accumulate(self.sequences)])


FLAS = Cut((32,) * fla_context.RANKS, tuple(b - a for a, b in pairwise(fla_context.OFFSETS)),
           even=True, flas=True)  # fmt: skip


def draw_cut(data, most=40, tail=True):
    """Up to four ranks, some without tokens; rows, or sequences, some empty, before a tail."""
    ranks = data.draw(st.integers(1, 4))
    if even := data.draw(st.booleans()):
        lengths = (data.draw(st.integers(1, most)),) * ranks
    else:
        tokens = st.one_of(st.integers(0, 3), st.integers(0, most))
        lengths = tuple(data.draw(st.lists(tokens, min_size=ranks, max_size=ranks)))
        lengths = lengths if sum(lengths) else (2, *lengths[1:])
    if data.draw(st.booleans()):
        return Cut(lengths, B=data.draw(st.integers(1, 3)), even=even)
    T, rng = sum(lengths), random.Random(data.draw(st.integers(0, 10**6)))
    cuts = sorted(rng.randint(0, T) for _ in range(rng.randint(1, 6)))
    cuts = [0, *cuts] if tail else [0, *cuts, T]
    return Cut(lengths, tuple(b - a for a, b in pairwise(cuts)), even=even)


class Part:
    """A rank's part of a text; without a group all of it, of one process.

    options: `cp_context` or `cu_seqlens` for a call.
    rows: the numbers of its sequences, or of the batch's rows.
    tokens: its range of the whole text.
    begin, end: of each of rows, whether its sequence begins and whether it ends here.
    """

    def __init__(self, cut, group=None):
        self.group, self.T, self.B = group, sum(cut.lengths), cut.B
        N = cut.B if cut.sequences is None else len(cut.sequences)
        self.rows, self.tokens = list(range(N)), range(self.T)
        self.begin, self.end = (torch.ones(N, dtype=torch.bool) for _ in range(2))
        self.options = {"cu_seqlens": cut.offsets}
        if group is None:
            return
        rank = dist.get_rank(group)
        context = build_cp_context(cut.offsets, group, lengths=None if cut.even else cut.lengths)
        own, self.tokens = context.cut(cut.lengths[rank], None), tokens_of(cut.lengths, rank)
        context = fla_context.context_of(rank, group) if cut.flas else context
        self.options = {"cp_context": context}
        if cut.sequences is None:
            self.begin[:], self.end[:] = own.count > 0 == own.before, own.count > 0 == own.after
            return
        self.rows = list(own.sequences)
        self.begin, self.end = (torch.ones(own.count, dtype=torch.bool) for _ in range(2))
        if own.count:
            self.begin[0], self.end[-1] = own.before == 0, own.after == 0

    def own(self, x):
        """These tokens of a tensor of all."""
        return local(x, self.tokens)

    def sum(self, x):
        """A tensor summed over the ranks."""
        return x if self.group is None else all_sum(x, self.group.group_name)

    def mean(self, x):
        return self.sum(x) / (1 if self.group is None else self.group.size())


def run_part(group, function, cut, args):
    part = Part(cut, group)
    named = [{n: x.detach() for n, x in kind.items()} for kind in function(part, *args)]
    return named, part.tokens, part.rows


def assert_same_on_ranks(pool, function, cut, *args, rel=1e-12, weights=1e-11, tail=False):
    """That a function gives on ranks what it does in one process.

    Args:
        function: takes a `Part` and these args and gives tensors by name in three dicts: of
            tokens, `[B, T, ...]`; of rows, `[N, ...]`, where what ranks have of one sequence adds
            up; and what every rank has whole.
        rel, weights: bounds of the first two, and of what is whole.
        tail: whether tokens after the last sequence are looked at.
    """
    (tokens, rows, whole), *_ = run_part(None, function, cut, args)
    end = sum(cut.lengths if tail or cut.sequences is None else cut.sequences)
    totals = {name: torch.zeros_like(x) for name, x in rows.items()}
    for found, own, numbers in pool(run_part, function, cut, args, ranks=len(cut.lengths)):
        kept = range(own.start, max(own.start, min(own.stop, end)))
        assert [kind.keys() for kind in found] == [tokens.keys(), rows.keys(), whole.keys()]
        for name, x in tokens.items():
            assert_close(found[0][name][:, : len(kept)], local(x, kept), rel, 1e-14, name)
        for name, total in totals.items():
            total.index_add_(0, torch.tensor(numbers, dtype=torch.int64), found[1][name])
        for name, x in whole.items():
            assert_close(found[2][name], x, weights, 1e-14, name)
    for name, total in totals.items():
        assert_close(total, rows[name], rel, 1e-14, name)
