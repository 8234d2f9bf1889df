"""The keys and values that an attention layer keeps of earlier tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gla_ext.ops._door import form_of

FEWEST = 256  # least number of tokens to allocate room for


def sequence_of(offsets: Tensor, T: int) -> Tensor:
    """The index of the sequence of each of T packed tokens, int64 `[T]`; N - 1 after the last
    one.
    """
    tokens = torch.arange(T, dtype=offsets.dtype, device=offsets.device)
    found = form_of(_search, plain=_count)(offsets, tokens) - 1
    return found.clamp(0, max(len(offsets) - 2, 0))


def _search(offsets: Tensor, tokens: Tensor) -> Tensor:
    """The number of offsets that are at most each token."""
    return torch.searchsorted(offsets, tokens, right=True)


def _count(offsets: Tensor, tokens: Tensor) -> Tensor:
    """`_search`, which ONNX has not, by all comparisons."""
    return (tokens.unsqueeze(1) >= offsets).long().sum(1)


def room_for(count: int, window: int | None = None) -> int:
    """The number of tokens to allocate: a power of two, at least FEWEST, at most the window."""
    room = max(FEWEST, 1 << max(count - 1, 0).bit_length())
    return room if window is None else min(room, window)


class KeyValues:
    """Keys and values of N sequences, rotated to their positions.

    Token p is in slot p, or with a window in slot p % window: a ring buffer of the last tokens.

    Attributes:
        keys, values: `[N, room, HK, D]`.
        lengths: int64 `[N]`, number of tokens of each sequence so far.
        longest: an upper bound of lengths, known without reading them.
        even: whether all lengths equal `longest`.
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
        """N sequences without tokens yet; `like` is a key, `[.., HK, D]`."""
        with torch.inference_mode(False):
            keys, values = (like.new_zeros(N, room, *like.shape[-2:]) for _ in range(2))
            lengths = torch.zeros(N, dtype=torch.long, device=like.device)
        return cls(keys.detach(), values.detach(), lengths, 0, True, window)

    @property
    def room(self) -> int:
        return self.keys.shape[1]

    def map(self, function: Callable[[Tensor], Tensor]) -> KeyValues:
        """Applies `function` to every tensor; it must keep or select sequences."""
        tensors = map(function, (self.keys, self.values, self.lengths))
        return KeyValues(*tensors, self.longest, self.even, self.window)

    def snapshot(self) -> KeyValues:
        """A copy that later tokens do not change. Only a ring buffer overwrites slots below the
        lengths, so without a window keys and values are not copied.
        """
        if self.window is not None:
            return self.map(Tensor.clone)
        tensors = (self.keys, self.values, self.lengths.clone())
        return KeyValues(*tensors, self.longest, self.even, None)

    def reserve(self, count: int) -> bool:
        """Makes room for sequences of `count` tokens. Returns whether keys and values had to be
        moved for that.
        """
        room = room_for(count, self.window)
        if room <= self.room:
            return False
        with torch.inference_mode(False):
            for name in ("keys", "values"):
                old = getattr(self, name)
                new = old.new_zeros(old.shape[0], room, *old.shape[2:])
                # In a ring buffer that is not yet full, slots are still positions.
                setattr(self, name, torch.cat([old, new[:, old.shape[1] :]], 1))
        return True

    def with_tokens(
        self, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None, longest: int | None = None
    ) -> KeyValues:
        """The keys and values after further tokens; this object does not change.

        Args:
            k, v: `[N, T, HK, D]`, or for packed sequences `[1, T, HK, D]`.
            cu_seqlens: int `[N + 1]`, offsets of packed sequences. Default: None.
            longest: upper bound of the new tokens of a packed sequence. Default: None (T).
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
        else:  # the last position before the new length that is in this slot
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
        """Writes one token of every sequence, k and v `[N, 1, HK, D]`, in place; there must be
        room. Sequences where `waits`, bool `[N]`, is True stay unchanged.
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
        """All keys and values that further tokens may see, earlier ones first, packed in one row.

        Args:
            k, v, cu_seqlens, longest: as in `with_tokens`.

        Returns:
            Keys and values `[TK, HK, D]`; offsets `[N + 1]` of the further tokens, and of all
            tokens; upper bounds of the tokens of one sequence, for both. TK follows from shapes and
            `longest`.
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
    """`tokens[index]` `[N, room, HK, D]` where `new` is True, the old values elsewhere."""
    chosen, new = tokens[index], new[..., None, None]
    if old.shape[1] == 0:
        return chosen.where(new, 0)
    room = chosen.shape[1] - old.shape[1]
    return torch.where(new, chosen, F.pad(old, (0, 0, 0, 0, 0, room)) if room else old)


def tensors_in(entry: dict[str, Any]) -> list[Tensor]:
    """All tensors of a cache's entry."""
    found: list[Tensor] = []
    map_entry(lambda x: found.append(x) or x, entry)
    return found


def map_entry(function: Callable[[Tensor], Tensor], entry: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a cache's entry in which a function is applied to every tensor."""
    return {key: map_tensors(function, entry[key]) for key in entry}


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Applies `function` to a tensor, or to every tensor in a tuple, a list or a KeyValues. Other
    values are returned as they are.
    """
    if isinstance(value, KeyValues):
        return value.map(function)
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(function, item) for item in value)
    return function(value) if isinstance(value, Tensor) else value
