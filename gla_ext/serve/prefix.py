"""Checkpoints of prompts' beginnings, for prompts that begin alike."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from gla_ext.serve.rows import Checkpoint, RowCache


class PrefixCache:
    """States after every n tokens of the prompts so far, the last used ones within a budget.

    A prompt's beginnings are known by a chained hash of their tokens (BLAKE2, 128 bits).

    Args:
        rows: where checkpoints come from.
        every: n.
        budget_bytes: most memory of the checkpoints; 0 keeps none.

    Attributes:
        nbytes: memory of the checkpoints.
        evictions: how many were given up.
    """

    def __init__(self, rows: RowCache, every: int, budget_bytes: int) -> None:
        self._rows, self.every, self._budget = rows, every, budget_bytes
        self._kept: OrderedDict[bytes, Checkpoint] = OrderedDict()
        self._most = budget_bytes // max(rows.checkpoint_nbytes(), 1)
        self.nbytes, self.evictions = 0, 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def enabled(self) -> bool:
        return self._most > 0

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

    def find(self, keys: Sequence[bytes]) -> tuple[int, Checkpoint | None]:
        """The longest beginning that there is a checkpoint of: its tokens, and the checkpoint."""
        for count in range(len(keys), 0, -1):
            if keys[count - 1] in self._kept:
                for key in reversed(keys[:count]):  # the shortest, which most share, goes last
                    if key in self._kept:
                        self._kept.move_to_end(key)
                return count * self.every, self._kept[keys[count - 1]]
        return 0, None

    def put(self, keys: Sequence[bytes], count: int, row: int) -> None:
        """Keeps what a row holds after count tokens of a prompt.

        Of a prompt with more beginnings than half the budget has room for, those are kept that come
        first, which others are likely to share, and the last.
        """
        if count % self.every or not 0 < count // self.every <= len(keys):
            return
        place = count // self.every
        key = keys[place - 1]
        if key in self._kept:
            self._kept.move_to_end(key)
            return
        if place > max(self._most // 2, 1) and place < len(keys):
            return
        size = self._rows.checkpoint_nbytes()
        while self.nbytes + size > self._budget:
            _, old = self._kept.popitem(last=False)
            self.nbytes -= old.nbytes
            self.evictions += 1
        checkpoint = self._rows.checkpoint(row)
        self._kept[key] = checkpoint
        self.nbytes += checkpoint.nbytes
