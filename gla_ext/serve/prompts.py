"""Pieces of prompts, their packing for one call of the model, and CUDA graphs of such calls."""

from __future__ import annotations

import dataclasses
import itertools
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gla_ext.decode import _capture

NONE = -1  # stands for no row
# Sizes of the graphs. A longer piece keeps the GPU busy for longer than its launch takes the host.
TOKENS = (64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096)
PIECES = (1, 16)


@dataclasses.dataclass(frozen=True)
class Piece:
    """Tokens of a prompt that the model reads at once.

    row: the row of its sequence, which gets the resulting state.
    tokens: at least one.
    ends: whether the prompt ends with this piece.
    source: the row whose state the piece starts from; not changed if it is another row. None: the
    piece starts from zero.
    checkpoints: the rows for the states after every `every` tokens, NONE for no row.
    """

    row: int
    tokens: Sequence[int]
    ends: bool
    source: int | None = None
    checkpoints: Sequence[int] = ()


class Packed(NamedTuple):
    """N pieces, packed into one sequence of T tokens; all tensors are int64, rows are the pool's.

    offsets: `[N + 1]`, offsets of the pieces.
    rows, sources: `[N]`; a piece that starts from zero has its own row as source.
    goes_on: `[N]`, 0 for a piece that starts from zero.
    starts: `[N + 1]`, offsets of each piece's checkpoints.
    checkpoints: `[C]`, the row of each checkpoint, NONE for no row.
    ends: `[M]`, for each checkpoint that has a row, how many of the T tokens come before it.
    end_rows: `[M]`, that row.
    tokens: `[T]`.
    """

    offsets: Tensor
    rows: Tensor
    sources: Tensor
    goes_on: Tensor
    starts: Tensor
    checkpoints: Tensor
    ends: Tensor
    end_rows: Tensor
    tokens: Tensor


@dataclasses.dataclass(frozen=True, order=True)
class Size:
    """Sizes of packed pieces.

    tokens, pieces: T and N.
    checkpoints: C.
    kept: M, the number of checkpoints with a row.
    """

    tokens: int
    pieces: int
    checkpoints: int = 0
    kept: int = 0

    @classmethod
    def of(cls, pieces: Sequence[Piece]) -> Size:
        rows = [row for piece in pieces for row in piece.checkpoints]
        count = sum(len(piece.tokens) for piece in pieces)
        return cls(count, len(pieces), len(rows), len(rows) - rows.count(NONE))

    @property
    def lengths(self) -> list[int]:
        """Lengths of the tensors of `Packed`."""
        T, N, C, M = dataclasses.astuple(self)
        return [N + 1, N, N, N, N + 1, C, M, M, T]

    def split(self, numbers: Tensor) -> Packed:
        """Splits the numbers that `lay_out` returns into views."""
        return Packed(*numbers[: sum(self.lengths)].split(self.lengths))


def lay_out(pieces: Sequence[Piece], size: Size, every: int, spare: int = NONE) -> Tensor:
    """The values of the tensors of `Packed`, one tensor after the other, int64 on the host.

    If `size` is larger than needed, it is filled up with tokens that belong to no piece, with empty
    pieces, and with checkpoints that belong to no piece.

    Args:
        pieces: pieces that fit in `size`.
        size: `Size.of(pieces)` or larger.
        every: tokens between checkpoints.
        spare: the row of added pieces and checkpoints. Default: NONE (nothing is added).
    """
    empty = size.pieces - len(pieces)
    offsets = [0, *itertools.accumulate(len(piece.tokens) for piece in pieces)]
    starts = [0, *itertools.accumulate(len(piece.checkpoints) for piece in pieces)]
    rows = [piece.row for piece in pieces]
    sources = [piece.row if piece.source is None else piece.source for piece in pieces]
    goes_on = [int(piece.source is not None) for piece in pieces]
    checkpoints = [row for piece in pieces for row in piece.checkpoints]
    kept = [
        (offset + (n + 1) * every, row)
        for offset, piece in zip(offsets, pieces, strict=False)
        for n, row in enumerate(piece.checkpoints)
        if row != NONE
    ]
    unkept = size.kept - len(kept)
    numbers = [
        *(offsets + [offsets[-1]] * empty),
        *(rows + [spare] * empty),
        *(sources + [spare] * empty),
        *(goes_on + [1] * empty),
        *(starts + [starts[-1]] * empty),
        *(checkpoints + [NONE] * (size.checkpoints - len(checkpoints))),
        *([end for end, _ in kept] + [size.tokens] * unkept),
        *([row for _, row in kept] + [spare] * unkept),
    ]
    laid = array("q", numbers)
    for piece in pieces:
        laid.extend(piece.tokens)
    laid.frombytes(bytes(laid.itemsize * (size.tokens - offsets[-1])))
    return torch.frombuffer(laid, dtype=torch.long)  # faster than from a list of numbers


class PromptGraphs:
    """CUDA graphs of packed pieces, one for each of some sizes.

    The first pieces of a size are read without a graph. The graph is captured before the second, or
    by `warm_up`. If a graph is larger than its pieces, the rest is filled up, in a row that no
    sequence uses: see `lay_out`.

    Args:
        run: reads packed pieces.
        record: captures a call, in memory that all graphs share.
        every: tokens between checkpoints, 0 for none.
        spare: the row that no sequence uses.
    """

    def __init__(
        self,
        run: Callable[[Packed], None],
        record: Callable[[Callable[[], None]], _capture.Graph | None],
        every: int,
        spare: int,
        device: torch.device,
    ) -> None:
        self._run, self._record = run, record
        self._every, self._spare = every, spare
        self._sizes = []
        for T, N in sorted(itertools.product(TOKENS, PIECES)):
            most = T // every if every else 0
            self._sizes.append(Size(T, N, most, most))
        most = sum(self._sizes[-1].lengths)
        self._buffer = torch.zeros(most, dtype=torch.long, device=device)
        self._graphs = _capture.GraphsOnDemand(self._capture)

    def clear(self) -> None:
        """Drops the graphs."""
        self._graphs.clear()

    def warm_up(self) -> None:
        """Captures the missing graphs, the largest first, as the others fit into its memory."""
        self._graphs.warm_up(reversed(self._sizes))

    def replay(self, pieces: Sequence[Piece]) -> bool:
        """Reads pieces by a graph; returns False if there is none for their size."""
        wanted = Size.of(pieces)
        for size in self._sizes:
            if wanted.tokens <= size.tokens and wanted.pieces <= size.pieces:
                break
        else:
            return False
        graph = self._graphs.find(size)
        if graph is None:
            return False
        self._write(pieces, size)
        graph.replay()
        return True

    def _capture(self, size: Size) -> _capture.Graph | None:
        """Captures with a piece in the spare row, so that no sequence's state changes."""
        self._write([Piece(self._spare, [0] * size.tokens, True, self._spare)], size)
        packed = size.split(self._buffer)
        return self._record(lambda: self._run(packed))

    def _write(self, pieces: Sequence[Piece], size: Size) -> None:
        numbers = lay_out(pieces, size, self._every, self._spare)
        self._buffer[: len(numbers)].copy_(numbers, non_blocking=True)
