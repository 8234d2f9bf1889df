"""Checkpoints of prompts' beginnings, for prompts that begin alike."""

from __future__ import annotations

import contextlib
import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from gla_ext.serve.prompts import NONE


class PrefixCache:
    """Which of some rows keep the states after every n tokens of the prompts so far, the last used.

    A prompt's beginnings are known by a chained hash of their tokens (BLAKE2, 128 bits).

    Attributes:
        every: n.
        evictions: how many beginnings were given up.
    """

    def __init__(self, rows: range, row_nbytes: int, every: int) -> None:
        self._rows, self._row_nbytes, self.every = rows, row_nbytes, every
        self._kept: OrderedDict[bytes, int] = OrderedDict()  # the row of each beginning
        self._used = 0  # rows that have been in use, the first ones
        self._free: list[int] = []  # of these
        self._coming: dict[bytes, int] = {}  # that the round makes
        self._found: set[bytes] = set()  # that it reads
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def enabled(self) -> bool:
        return len(self._rows) > 0

    @property
    def nbytes(self) -> int:
        """Memory of the beginnings that are kept, bytes."""
        return len(self) * self._row_nbytes

    def clear(self) -> None:
        """Forgets all beginnings."""
        self._kept.clear()
        self._free, self._used = [], 0

    def keys(self, tokens: array[int]) -> list[bytes]:
        """Of the beginnings of n, 2n, … tokens; the last leaves a token to compute from."""
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
        """Inside, prompts are looked up, and then pass the model at once: what is found stays, and
        what is reserved can be found after that.
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
        """The longest beginning that is kept, of more than `beyond` tokens: its tokens, and the
        row; 0 and None where none is.
        """
        for count in range(len(keys), beyond // self.every, -1):
            if keys[count - 1] in self._kept:
                for key in reversed(keys[:count]):  # the shortest, which most share, goes last
                    if key in self._kept:
                        self._kept.move_to_end(key)
                self._found.add(keys[count - 1])
                return count * self.every, self._kept[keys[count - 1]]
        return 0, None

    def is_coming(self, keys: Sequence[bytes], start: int) -> bool:
        """Whether this round makes the next beginning after start tokens."""
        place = start // self.every
        return place < len(keys) and keys[place] in self._coming

    def reserve(self, keys: Sequence[bytes], start: int, stop: int, step: int) -> list[int]:
        """Rows for a prompt's beginnings of start + step, start + 2 step, … stop tokens, or NONE.

        Of a prompt with more beginnings than half of the rows, those are kept that come first,
        which others are likely to share, and the last.
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
        """One that nothing is in, or that of the beginning that was used longest ago."""
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
