"""The engine's interface to the layers' memory: rows of sequences, and rows of checkpoints.

The engine only uses `RowCache`. `StateRows` implements it for models whose layers keep states of a
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
    """The memory in which a model's layers store an engine's sequences, one row for each.

    A row without a sequence may store a checkpoint: a copy of a sequence's state. Sequences can
    start from it, each in its own row; the checkpoint does not change.
    """

    def read(self, pieces: Packed) -> contextlib.AbstractContextManager[Any]:
        """While active, gives the past_key_values for pieces of prompts. Each piece starts from its
        source or from zero, and stores its checkpoints and finally its state in its row.
        """

    def keep(self, row: int, checkpoint: int) -> None:
        """Copies the present state of a row to a checkpoint's row."""

    def drop(self, row: int) -> None:
        """Ends the row's sequence and frees its memory."""

    def first(self, count: int) -> Any:
        """The past_key_values for a step of rows 0 to count - 1, in which only active rows
        advance. See `StaticGLACache` for `begin_step`, `count_token` and `flush`.
        """

    def activate(self, rows: Sequence[int]) -> None:
        """Sets the rows that advance in steps from now on; other rows do not change."""


class StateRows:
    """The rows of a `StaticGLACache`.

    Args:
        cache: a cache that has states of every layer in its buffers.
        rows: number of its rows that steps may have; they are the first ones.
        every: tokens between checkpoints in the middle of a prompt, 0 for none.
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
        """Nothing to do: a row has its own memory, and a new sequence does not read it."""

    def first(self, count: int) -> StaticGLACache:
        return _FirstRows(self._cache, self._waits[:count], self._slots[:count])

    def activate(self, rows: Sequence[int]) -> None:
        slots = torch.full((len(self._slots),), -1)
        chosen = torch.tensor(rows, dtype=torch.long)
        slots[chosen] = chosen
        self._slots.copy_(slots)
        torch.lt(self._slots, 0, out=self._waits)


class _FirstRows(StaticGLACache):
    """A view of the first rows of a cache, for steps. Rows where `waits`, bool `[count]`, is True
    do not change; slots, int64 `[count]`, are -1 for these, else the row.
    """

    def __init__(self, cache: StaticGLACache, waits: Tensor, slots: Tensor) -> None:
        vars(self).update(vars(copy.copy(cache)))
        self.batch_size, self.lengths = len(waits), list(cache.lengths)

        def first(x: Tensor) -> Tensor:
            return x[: len(waits)]

        self.states = [map_entry(first, entry) for entry in cache.states]
        self._done, self._slots, self._whole = waits, slots, cache

    def flush(self, rows: Tensor | None = None) -> None:
        """Makes the states of all rows of the cache whole, or of those in an int64 tensor `[N]`."""
        self._whole.flush(rows)
