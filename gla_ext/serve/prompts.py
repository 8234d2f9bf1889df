"""Pieces of prompts, how several are laid out to pass at once, and CUDA graphs of that."""

from __future__ import annotations

import dataclasses
import itertools
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gla_ext.decode import _capture

NONE = -1  # in place of a row
# Of the graphs. A longer piece keeps the GPU busy for longer than the host needs to launch it.
TOKENS = (64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096)
PIECES = (1, 16)


@dataclasses.dataclass(frozen=True)
class Piece:
    """Tokens of a prompt that pass the model at once.

    row: of its sequence, which gets what comes of them.
    tokens: at least one.
    ends: whether the prompt does.
    source: the row that they go on from, which stays as it is if it is another; None: they start.
    checkpoints: the rows that get what there is after each so many tokens, NONE for no row.
    """

    row: int
    tokens: Sequence[int]
    ends: bool
    source: int | None = None
    checkpoints: Sequence[int] = ()


class Packed(NamedTuple):
    """N pieces in one row of T tokens, all int64.

    offsets: `[N + 1]`, of the pieces.
    rows, sources: `[N]`; a piece that starts has its own row as source.
    goes_on: `[N]`, 0 for a piece that starts.
    starts: `[N + 1]`, which of the checkpoints are a piece's.
    checkpoints: `[C]`, the row of each, NONE for no row.
    ends, end_rows: `[M]`, after how many of the T tokens there is a checkpoint, and its row.
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
    """What pieces take.

    tokens, pieces: T and N.
    checkpoints: C.
    kept: M, how many of these have a row.
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
        """Of the tensors of `Packed`."""
        T, N, C, M = dataclasses.astuple(self)
        return [N + 1, N, N, N, N + 1, C, M, M, T]

    def split(self, numbers: Tensor) -> Packed:
        """Views of `lay_out`'s numbers."""
        return Packed(*numbers[: sum(self.lengths)].split(self.lengths))


def lay_out(pieces: Sequence[Piece], size: Size, every: int, spare: int = NONE) -> Tensor:
    """The numbers of `Packed`, one tensor's after the other's, int64 on the host.

    Fewer tokens than the size has are followed by others, which belong to no piece, fewer pieces by
    empty ones, and fewer checkpoints by some that are of no piece.

    Args:
        pieces: which fit.
        size: `Size.of(pieces)` or a greater one.
        every: tokens between checkpoints.
        spare: the row of what is added. Default: NONE (nothing is).
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
    return torch.frombuffer(laid, dtype=torch.long)  # a list of numbers would take longer to read


class PromptGraphs:
    """Graphs of packed pieces, one for each of some sizes.

    The first pieces of a size pass without one; it is captured before the second, or by `warm_up`.
    What a graph has more than the pieces that it passes is filled up, in a row that no sequence
    has: see `lay_out`.

    Args:
        run, record: pass packed pieces, and capture a call in a pool of memory.
        every: tokens between checkpoints, 0 for none.
        spare: the row that no sequence has.
    """

    def __init__(
        self,
        run: Callable[[Packed], None],
        record: Callable[[Callable[[], None], Any], _capture.Graph | None],
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
        self.clear()

    def clear(self) -> None:
        """Gives the graphs up, and their memory, which no later one may share."""
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self) -> None:
        """Captures those that are not there, the largest first: the others fit into its memory."""
        self._graphs.warm_up(reversed(self._sizes))

    def replay(self, pieces: Sequence[Piece]) -> bool:
        """Passes pieces, if there is a graph for so many."""
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
        """With pieces of the spare row, so that no sequence moves on."""
        self._write([Piece(self._spare, [0] * size.tokens, True, self._spare)], size)
        packed = size.split(self._buffer)
        return self._record(lambda: self._run(packed), self._pool)

    def _write(self, pieces: Sequence[Piece], size: Size) -> None:
        numbers = lay_out(pieces, size, self._every, self._spare)
        self._buffer[: len(numbers)].copy_(numbers, non_blocking=True)
