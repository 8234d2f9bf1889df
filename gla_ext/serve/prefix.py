"""A cache of the states after prefixes of prompts, for prompts with the same beginning."""

from __future__ import annotations

import contextlib
import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from gla_ext.serve.prompts import NONE


class PrefixCache:
    """Assigns rows to the states after every n tokens of prompts, and keeps those used last.

    A prefix is identified by a chained hash of its tokens (BLAKE2, 128 bits).

    Attributes:
        every: n.
        evictions: number of prefixes that were dropped.
    """

    def __init__(self, rows: range, row_nbytes: int, every: int) -> None:
        self._rows, self._row_nbytes, self.every = rows, row_nbytes, every
        self._kept: OrderedDict[bytes, int] = OrderedDict()  # the row of each prefix
        self._used = 0  # number of rows that have been in use; they are the first ones
        self._free: list[int] = []  # rows that have been in use and are now free
        self._coming: dict[bytes, int] = {}  # prefixes that the current round computes
        self._found: set[bytes] = set()  # prefixes that the current round reads
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def enabled(self) -> bool:
        return len(self._rows) > 0

    @property
    def nbytes(self) -> int:
        """Memory of the stored prefixes, bytes."""
        return len(self) * self._row_nbytes

    def clear(self) -> None:
        """Drops all prefixes."""
        self._kept.clear()
        self._free, self._used = [], 0

    def keys(self, tokens: array[int]) -> list[bytes]:
        """Keys of the prefixes of n, 2n, … tokens; at least one token remains after the last."""
        if not self.enabled:
            return []
        count, key, found = (len(tokens) - 1) // self.every, b"", []
        for n in range(count):
            block = tokens[n * self.every : (n + 1) * self.every].tobytes()
            key = hashlib.blake2b(key + block, digest_size=16).digest()
            found.append(key)
        return found

    @contextlib.contextmanager
    def round(self) -> Iterator[None]:
        """While active, prompts are looked up and then read by the model at once. Prefixes that
        were found are not evicted, and reserved ones can be found afterwards.
        """
        try:
            yield
            self._kept.update(self._coming)
            self._coming.clear()
        finally:
            self._free += self._coming.values()
            self._coming.clear()
            self._found.clear()

    def find(self, keys: Sequence[bytes], beyond: int = 0) -> tuple[int, int | None]:
        """The longest stored prefix of more than `beyond` tokens: its number of tokens, and its
        row; 0 and None if there is none.
        """
        for count in range(len(keys), beyond // self.every, -1):
            if keys[count - 1] in self._kept:
                for key in reversed(keys[:count]):  # moves the shortest last, as most share it
                    if key in self._kept:
                        self._kept.move_to_end(key)
                self._found.add(keys[count - 1])
                return count * self.every, self._kept[keys[count - 1]]
        return 0, None

    def is_coming(self, keys: Sequence[bytes], start: int) -> bool:
        """Whether this round computes the next prefix after `start` tokens."""
        place = start // self.every
        return place < len(keys) and keys[place] in self._coming

    def reserve(self, keys: Sequence[bytes], start: int, stop: int, step: int) -> list[int]:
        """Rows for a prompt's prefixes of start + step, start + 2 step, … stop tokens, or NONE.

        If a prompt has more prefixes than half of the rows, only the first ones, which other
        prompts are likely to share, and the last one are stored.
        """
        if not self.enabled:
            return []
        return [self._reserve(keys, count) for count in range(start + step, stop + 1, step)]

    def _reserve(self, keys: Sequence[bytes], count: int) -> int:
        place = count // self.every
        if count % self.every or place > len(keys):
            return NONE
        key = keys[place - 1]
        if key in self._coming:
            return NONE
        if key in self._kept:
            self._kept.move_to_end(key)
            return NONE
        if place > max(len(self._rows) // 2, 1) and place < len(keys):
            return NONE
        row = self._take_row()
        if row != NONE:
            self._coming[key] = row
        return row

    def _take_row(self) -> int:
        """A free row, or the row of the prefix that was not used for the longest time."""
        if self._free:
            return self._free.pop()
        if self._used < len(self._rows):
            self._used += 1
            return self._rows[self._used - 1]
        oldest = next((key for key in self._kept if key not in self._found), None)
        if oldest is None:
            return NONE
        self.evictions += 1
        return self._kept.pop(oldest)
