"""What the engine knows of the layers' memory: rows of sequences, and copies of them.

The engine goes by `RowCache` alone. `StateRows` is that of a model whose layers keep states of a
fixed size.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from gla_ext.cache import StaticGLACache
from gla_ext.cache._key_values import map_tensors


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What a row held at some token: enough to go on from there in any row."""

    tensors: list[Tensor]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.tensors)


class RowCache(Protocol):
    """Where the layers of a model keep the sequences that an engine runs, a row each."""

    def take(self, row: int) -> None:
        """Starts a sequence: the row is as before a first token."""

    def write(self, row: int, checkpoint: Checkpoint) -> None:
        """Starts a sequence that goes on from a checkpoint."""

    def checkpoint(self, row: int) -> Checkpoint:
        """A copy of what the row holds now."""

    def drop(self, row: int) -> None:
        """Ends the row's sequence; what it took is free."""

    def checkpoint_nbytes(self) -> int:
        """Memory of a checkpoint, bytes."""

    def read(self, rows: Tensor) -> contextlib.AbstractContextManager[Any]:
        """The past_key_values of prompts that go on in the rows, int64 `[N]`, while inside."""

    def first(self, count: int) -> Any:
        """The past_key_values of a step of rows 0 to count - 1, of which those that are active go
        on."""

    def activate(self, rows: list[int]) -> None:
        """Which rows go on in steps from now on; the others stay as they are."""


class StateRows:
    """The rows of a `StaticGLACache`.

    Args:
        cache: with states of every layer in its buffers.
        waits: bool `[B]`, the cache's `done`.
    """

    def __init__(self, cache: StaticGLACache, waits: Tensor) -> None:
        self._cache, self._waits = cache, waits
        self._rows = [[x[row] for x in cache.tensors()] for row in range(cache.batch_size)]

    def take(self, row: int) -> None:
        torch._foreach_zero_(self._rows[row])

    def write(self, row: int, checkpoint: Checkpoint) -> None:
        torch._foreach_copy_(self._rows[row], checkpoint.tensors)

    def checkpoint(self, row: int) -> Checkpoint:
        copies = [torch.empty_like(x) for x in self._rows[row]]
        torch._foreach_copy_(copies, self._rows[row])
        return Checkpoint(copies)

    def drop(self, row: int) -> None:
        """Nothing is to be done: a row's memory is its own, and `take` or `write` comes first."""

    def checkpoint_nbytes(self) -> int:
        return sum(x.nbytes for x in self._rows[0])

    @contextlib.contextmanager
    def read(self, rows: Tensor) -> Iterator[StaticGLACache]:
        with self._cache.prefill(rows, keep=True):
            yield self._cache

    def first(self, count: int) -> StaticGLACache:
        if count == self._cache.batch_size:
            return self._cache
        return _FirstRows(self._cache, count)

    def activate(self, rows: list[int]) -> None:
        waits = torch.ones(len(self._waits), dtype=torch.bool)
        waits[rows] = False
        self._waits.copy_(waits)
        self._cache.skip_done()


class _FirstRows(StaticGLACache):
    """The first rows of a cache, where they lie."""

    def __init__(self, cache: StaticGLACache, count: int) -> None:
        vars(self).update(vars(copy.copy(cache)))
        self.batch_size, self.lengths = count, list(cache.lengths)

        def first(x: Tensor) -> Tensor:
            return x[:count]

        self.states = [
            {key: map_tensors(first, entry[key]) for key in entry} for entry in cache.states
        ]
        self._done, self._slots = cache._done[:count], cache._slots[:count]
        self._every_row, self._no_row = cache._every_row[:count], cache._no_row[:count]
