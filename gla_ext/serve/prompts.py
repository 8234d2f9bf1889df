"""CUDA graphs of pieces of prompts, whose launches cost the host more time than the GPU."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from gla_ext.decode import _capture

# Of the graphs. A longer piece keeps the GPU busy for longer than the host needs to launch it.
TOKENS = (64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096)
PIECES = (1, 16)


@dataclasses.dataclass(frozen=True)
class Piece:
    """Tokens of a prompt that pass the model at once, in the row of its sequence."""

    row: int
    tokens: Sequence[int]
    ends: bool  # whether the prompt does


class PromptGraphs:
    """Graphs of packed pieces, one for each of some sizes.

    Fewer tokens than a graph has are followed by others, which belong to no piece, and fewer pieces
    by empty ones in a row that no sequence has.

    Args:
        run: passes packed tokens, int64 `[1, T]`, of N pieces, by their rows, int64 `[N]`, and
            their offsets, int64 `[N + 1]`.
        spare: the row of the empty pieces.
        device: where.
    """

    def __init__(
        self,
        run: Callable[[Tensor, Tensor, Tensor], None],
        spare: int,
        device: torch.device,
    ) -> None:
        self._spare = spare
        size = 2 * max(PIECES) + 1 + max(TOKENS)
        self._buffer = torch.zeros(size, dtype=torch.long, device=device)
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph | None] = {}
        pool = torch.cuda.graph_pool_handle()
        # The largest first: the others then fit into its memory.
        for size in sorted(itertools.product(TOKENS, PIECES), reverse=True):
            self._write([Piece(spare, [0] * size[0], True)], size)
            self._graphs[size] = _capture.capture(partial(run, *self._views(size)), device, pool)

    def replay(self, pieces: Sequence[Piece]) -> bool:
        """Passes pieces, if there is a graph for so many."""
        count = sum(len(piece.tokens) for piece in pieces)
        fitting = [(T, N) for T, N in self._graphs if count <= T and len(pieces) <= N]
        if not fitting or (graph := self._graphs[min(fitting)]) is None:
            return False
        self._write(pieces, min(fitting))
        graph.replay()
        return True

    def _views(self, size: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, rows and offsets, one after the other in the buffer."""
        T, N = size
        offsets, rows, tokens = self._buffer[: 2 * N + 1 + T].split([N + 1, N, T])
        return tokens.unsqueeze(0), rows, offsets

    def _write(self, pieces: Sequence[Piece], size: tuple[int, int]) -> None:
        T, N = size
        empty = N - len(pieces)
        offsets = [0, *itertools.accumulate(len(piece.tokens) for piece in pieces)]
        values = [*offsets, *[offsets[-1]] * empty]
        values += [*(piece.row for piece in pieces), *[self._spare] * empty]
        values += [*itertools.chain.from_iterable(piece.tokens for piece in pieces)]
        values += [0] * (T - offsets[-1])
        self._buffer[: len(values)].copy_(torch.tensor(values), non_blocking=True)
