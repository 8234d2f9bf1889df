"""What the engine knows of the layers' memory: rows of sequences, and rows of checkpoints.

The engine goes by `RowCache` alone. `StateRows` is that of a model whose layers keep states of a
fixed size.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from gla_ext.cache import StaticGLACache
from gla_ext.cache._key_values import map_entry
from gla_ext.cache._rows import Checkpoints
from gla_ext.serve.prompts import Packed


class RowCache(Protocol):
    """Where the layers of a model keep the sequences that an engine runs, a row each.

    A row that is no sequence's may keep what a sequence has come to, a checkpoint. Sequences go on
    from there, each in a row of its own, and leave it as it is.
    """

    def read(self, pieces: Packed) -> contextlib.AbstractContextManager[Any]:
        """The past_key_values of pieces of prompts, while inside. Each goes on from its source, or
        starts, and leaves its checkpoints, and last what it has come to in its row.
        """

    def keep(self, row: int, checkpoint: int) -> None:
        """Makes a row a checkpoint of what another row holds now."""

    def drop(self, row: int) -> None:
        """Ends the row's sequence; what it took is free."""

    def first(self, count: int) -> Any:
        """The past_key_values of a step of rows 0 to count - 1, of which those that are active go
        on."""

    def activate(self, rows: Sequence[int]) -> None:
        """Which rows go on in steps from now on; the others stay as they are."""


class StateRows:
    """The rows of a `StaticGLACache`.

    Args:
        cache: with states of every layer in its buffers.
        rows: how many of its rows steps may have, the first ones.
        every: tokens between checkpoints on the way of a prompt, 0 for none.
    """

    def __init__(self, cache: StaticGLACache, rows: int, every: int) -> None:
        self._cache, self._every = cache, every
        device = cache.tensors()[0].device
        self._waits = torch.ones(rows, dtype=torch.bool, device=device)
        self._slots = torch.full((rows,), -1, device=device)

    @contextlib.contextmanager
    def read(self, pieces: Packed) -> Iterator[StaticGLACache]:
        kept = None
        if self._every and len(pieces.checkpoints):
            at = (pieces.checkpoints, pieces.starts, pieces.ends, pieces.end_rows)
            kept = Checkpoints(self._every, *at)
        options = {"sources": pieces.sources, "goes_on": pieces.goes_on.bool()}
        with self._cache.prefill(pieces.rows, keep=True, **options, checkpoints=kept):
            yield self._cache

    def keep(self, row: int, checkpoint: int) -> None:
        buffers = self._cache.tensors()
        torch._foreach_copy_([x[checkpoint] for x in buffers], [x[row] for x in buffers])

    def drop(self, row: int) -> None:
        """Nothing is to be done: a row's memory is its own, and a sequence starts without it."""

    def first(self, count: int) -> StaticGLACache:
        return _FirstRows(self._cache, self._waits[:count], self._slots[:count])

    def activate(self, rows: Sequence[int]) -> None:
        slots = torch.full((len(self._slots),), -1)
        chosen = torch.tensor(rows, dtype=torch.long)
        slots[chosen] = chosen
        self._slots.copy_(slots)
        torch.lt(self._slots, 0, out=self._waits)


class _FirstRows(StaticGLACache):
    """The first rows of a cache, where they lie, for steps. waits, bool `[count]`, are those that
    stay as they are; slots, int64 `[count]`, are -1 for these, else the row.
    """

    def __init__(self, cache: StaticGLACache, waits: Tensor, slots: Tensor) -> None:
        vars(self).update(vars(copy.copy(cache)))
        self.batch_size, self.lengths = len(waits), list(cache.lengths)

        def first(x: Tensor) -> Tensor:
            return x[: len(waits)]

        self.states = [map_entry(first, entry) for entry in cache.states]
        self._done, self._slots = waits, slots
