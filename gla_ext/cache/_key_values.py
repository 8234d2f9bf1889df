"""What an attention layer keeps of the tokens that it has seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FEWEST = 256  # tokens that there is room for


def sequence_of(offsets: Tensor, T: int) -> Tensor:
    """Which of N sequences each of T tokens of a packed row is in, int64 `[T]`; N - 1 after all."""
    tokens = torch.arange(T, dtype=offsets.dtype, device=offsets.device)
    found = torch.searchsorted(offsets, tokens, right=True) - 1
    return found.clamp(0, max(len(offsets) - 2, 0))


def room_for(count: int, window: int | None = None) -> int:
    """A power of two of tokens, FEWEST or more; a window needs no more than its own."""
    room = max(FEWEST, 1 << max(count - 1, 0).bit_length())
    return room if window is None else min(room, window)


class KeyValues:
    """Keys and values of N sequences, rotated to their positions.

    Token p lies in slot p, or with a window in slot p % window: a ring of its last tokens.

    Attributes:
        keys, values: `[N, room, HK, D]`.
        lengths: int64 `[N]`, number of tokens that each sequence has had.
        longest: at least the greatest of these, known without reading them.
        even: whether all of them are `longest`.
        window: number of tokens that are kept, or None (all).
    """

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        lengths: Tensor,
        longest: int,
        even: bool,
        window: int | None,
    ) -> None:
        self.keys, self.values, self.lengths = keys, values, lengths
        self.longest, self.even, self.window = longest, even, window

    @classmethod
    def empty(cls, like: Tensor, N: int, window: int | None, room: int = 0) -> KeyValues:
        """No token yet of N sequences; like is a key, `[.., HK, D]`."""
        with torch.inference_mode(False):
            keys, values = (like.new_zeros(N, room, *like.shape[-2:]) for _ in range(2))
            lengths = torch.zeros(N, dtype=torch.long, device=like.device)
        return cls(keys.detach(), values.detach(), lengths, 0, True, window)

    @property
    def room(self) -> int:
        return self.keys.shape[1]

    def map(self, function: Callable[[Tensor], Tensor]) -> KeyValues:
        """`function` of every tensor, which keeps or chooses sequences."""
        tensors = map(function, (self.keys, self.values, self.lengths))
        return KeyValues(*tensors, self.longest, self.even, self.window)

    def snapshot(self) -> KeyValues:
        """The same, for good: of a ring slots are written over, else those after the lengths."""
        if self.window is not None:
            return self.map(Tensor.clone)
        tensors = (self.keys, self.values, self.lengths.clone())
        return KeyValues(*tensors, self.longest, self.even, None)

    def reserve(self, count: int) -> bool:
        """Makes room for sequences of so many tokens; returns whether there was none, and the keys
        and values lie elsewhere now.
        """
        room = room_for(count, self.window)
        if room <= self.room:
            return False
        with torch.inference_mode(False):
            for name in ("keys", "values"):
                old = getattr(self, name)
                new = old.new_zeros(old.shape[0], room, *old.shape[2:])
                # Of a ring that is not yet full, slots are positions, and stay so.
                setattr(self, name, torch.cat([old, new[:, old.shape[1] :]], 1))
        return True

    def with_tokens(
        self, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None, longest: int | None = None
    ) -> KeyValues:
        """What is kept after further tokens; this one stays as it is.

        Args:
            k, v: `[N, T, HK, D]`, or of packed sequences `[1, T, HK, D]`.
            cu_seqlens: int `[N + 1]`, offsets of packed sequences. Default: None.
            longest: at least the most tokens of a packed one. Default: None (T).
        """
        N, T = len(self.lengths), k.shape[1]
        even = self.even and cu_seqlens is None
        if cu_seqlens is None:
            first = torch.arange(N, device=k.device) * T
            counts: Tensor | int = T
        else:
            first, counts = cu_seqlens[:-1], cu_seqlens.diff()
        most = self.longest + (T if cu_seqlens is None or longest is None else longest)
        lengths = self.lengths + counts
        room = max(room_for(most, self.window), self.room)
        slot = torch.arange(room, device=k.device)
        if self.window is None:
            position = slot.expand(N, -1)
        else:  # the last one before the new length that lies in this slot
            last = lengths.unsqueeze(1) - 1
            position = last - (last - slot) % self.window
        new = (position >= self.lengths.unsqueeze(1)) & (position < lengths.unsqueeze(1))
        token = first.unsqueeze(1) + position - self.lengths.unsqueeze(1)
        token = token.clamp(0, max(k.shape[0] * T, 1) - 1)
        kept = [
            _put(old, x.flatten(0, 1), token, new) for old, x in ((self.keys, k), (self.values, v))
        ]
        return KeyValues(*kept, lengths, most, even, self.window)

    def expect_token(self) -> None:
        """Makes room for `write_token`, and counts its token."""
        if self.keys.is_inference() and not torch.is_inference_mode_enabled():
            self.keys, self.values = self.keys.clone(), self.values.clone()
            self.lengths = self.lengths.clone()
        self.longest += 1
        self.reserve(self.longest)

    def write_token(self, k: Tensor, v: Tensor, waits: Tensor | None = None) -> None:
        """Writes one token of every sequence, k and v `[N, 1, HK, D]`, for which there is room,
        where the tensors lie. Sequences that wait, bool `[N]`, stay as they are.
        """
        rows = torch.arange(len(self.lengths), device=k.device)
        slot = self.lengths if self.window is None else self.lengths % self.window
        for kept, new in ((self.keys, k[:, 0]), (self.values, v[:, 0])):
            if waits is not None:
                new = torch.where(waits.view(-1, 1, 1), kept[rows, slot], new)
            kept.index_put_((rows, slot), new)
        if waits is None:
            self.lengths.add_(1)
        else:
            self.lengths.add_((~waits).to(torch.long))

    def in_order(
        self, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None, longest: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int]:
        """Further tokens behind those before them that they may see, all in one row.

        Args:
            k, v, cu_seqlens, longest: as for `with_tokens`.

        Returns:
            Keys and values `[TK, HK, D]`, offsets `[N + 1]` of the further tokens alone and of all,
            and at least the most of a sequence, of both. TK follows from shapes and `longest`.
        """
        N, T = len(self.lengths), k.shape[1]
        if cu_seqlens is None:
            cu_seqlens = torch.arange(N + 1, device=k.device) * T
            longest = T
        longest = T if longest is None else longest
        most = self.longest if self.window is None else min(self.longest, self.window - 1)
        before = self.lengths.clamp_max(most)
        cu_k = F.pad((before + cu_seqlens.diff()).cumsum(0), (1, 0))
        keys = torch.arange(N * most + k.shape[0] * T, device=k.device)
        of = sequence_of(cu_k, len(keys))
        place = keys - cu_k[of]
        position = self.lengths[of] - before[of] + place
        slot = position if self.window is None else position % self.window
        new = N * self.room + cu_seqlens[of] + place - before[of]
        index = torch.where(place < before[of], of * self.room + slot, new)
        index = index.clamp(0, N * self.room + k.shape[0] * T - 1)
        found = [
            torch.cat([old.flatten(0, 1), x.flatten(0, 1)]).index_select(0, index)
            for old, x in ((self.keys, k), (self.values, v))
        ]
        return *found, cu_seqlens, cu_k, longest, most + longest


def _put(old: Tensor, tokens: Tensor, index: Tensor, new: Tensor) -> Tensor:
    """`tokens[index]` `[N, room, HK, D]` where new, elsewhere what was there."""
    chosen, new = tokens[index], new[..., None, None]
    if old.shape[1] == 0:
        return chosen.where(new, 0)
    room = chosen.shape[1] - old.shape[1]
    return torch.where(new, chosen, F.pad(old, (0, 0, 0, 0, 0, room)) if room else old)


def tensors_in(entry: dict[str, Any]) -> list[Tensor]:
    """Those of a cache's entry."""
    found: list[Tensor] = []
    map_entry(lambda x: found.append(x) or x, entry)
    return found


def map_entry(function: Callable[[Tensor], Tensor], entry: Mapping[str, Any]) -> dict[str, Any]:
    """A cache's entry, every tensor passed through a function."""
    return {key: map_tensors(function, entry[key]) for key in entry}


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`function` of a tensor, or of every tensor in a tuple, a list or keys and values; what else
    there is stays.
    """
    if isinstance(value, KeyValues):
        return value.map(function)
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(function, item) for item in value)
    return function(value) if isinstance(value, Tensor) else value
