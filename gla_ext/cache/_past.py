"""How a cache of states returns to fewer tokens, as assisted decoding needs it.

A recurrent state cannot be undone. Therefore copies of the states are kept at some tokens, together
with the inputs since. To go back, the cache takes the last copies before the wanted token, and the
inputs since then pass the model again, in front of the next tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gla_ext.cache._key_values import map_entry, map_tensors

REACH = 64  # number of tokens that a cache can always go back; also the whole last call

Run = Callable[[Tensor, Tensor | None], list[Tensor]]


class _Inputs(NamedTuple):
    """Inputs of the blocks, `[B, tokens, D]`, and their mask `[B, tokens]`, or None."""

    x: Tensor
    valid: Tensor | None

    def part(self, start: int | None, stop: int | None = None) -> _Inputs:
        tokens = slice(start, stop)
        return _Inputs(self.x[:, tokens], None if self.valid is None else self.valid[:, tokens])

    def then(self, after: _Inputs) -> _Inputs:
        x = torch.cat([self.x, after.x], 1)
        if self.valid is None and after.valid is None:
            return _Inputs(x, None)
        masks = [x.new_ones(x.shape[:2]) if m is None else m.to(x) for x, m in (self, after)]
        return _Inputs(x, torch.cat(masks, 1))


class Past:
    """Copies of a `GLACache`'s states at the last two tokens at which they were kept.

    Attributes:
        reach: least number of tokens between copies.
        behind: number of tokens that the cache counts but its states have not yet processed.
    """

    def __init__(self, cache: Any) -> None:
        self.reach = REACH
        self._kept: list[tuple[int, list[dict[str, Any]]]] = []
        self._inputs: _Inputs | None = None  # since the first copy
        self.behind = 0
        self._keep(cache)

    def _keep(self, cache: Any) -> None:
        """Keeps a copy of the current states, and the latest earlier copy."""
        now = cache.get_seq_length()
        states = [_snapshot(entry) for entry in cache.states]
        dropped = 0 if len(self._kept) < 2 else self._kept[1][0] - self._kept[0][0]
        self._kept = [*self._kept[-1:], (now, states)]
        if self._inputs is not None:
            self._inputs = self._inputs.part(dropped)

    def map(self, function: Callable[[Tensor], Tensor]) -> None:
        """Applies `function` to every tensor; it must keep or select sequences."""
        self._kept = [
            (length, [map_entry(function, entry) for entry in states])
            for length, states in self._kept
        ]
        if self._inputs is not None:
            self._inputs = _Inputs(*map_tensors(function, tuple(self._inputs)))

    def run(self, cache: Any, x: Tensor, mask: Tensor | None, run: Run) -> list[Tensor]:
        """Calls `run(x, mask)` with states that have processed all tokens that the cache counts.

        Args:
            x, mask: inputs `[B, T, D]`, and `[B, >= T]` of 0 (padding) and 1, or None.
            run: takes inputs and their mask or None, and returns results `[B, T, D]`.
        """
        again, T = self.behind, x.shape[1]
        new = _Inputs(x, None if mask is None else mask[:, mask.shape[1] - T :])
        if again:
            kept = self._inputs.x.shape[1] - again
            new, self._inputs = self._inputs.part(kept).then(new), self._inputs.part(0, kept)
            cache.lengths = [length - again for length in cache.lengths]
            self.behind = 0
        parts, first = [], new.x.shape[1] - self.reach
        if first > 0:  # a copy near the end, so that crop rarely has to repeat many tokens
            parts.append(run(*new.part(0, first)))
            self._remember(new.part(0, first))
            self._keep(cache)
            new = new.part(first)
        elif cache.get_seq_length() - self._kept[-1][0] >= self.reach:
            self._keep(cache)
        parts.append(run(*new))
        self._remember(new)
        return [torch.cat(pieces, 1)[:, -T:] for pieces in zip(*parts, strict=True)]

    def _remember(self, new: _Inputs) -> None:
        before = _Inputs(new.x[:, :0], None) if self._inputs is None else self._inputs
        self._inputs = before.then(new)

    def crop(self, cache: Any, length: int) -> None:
        """Goes back to `length` tokens; ValueError if that is before the first copy."""
        now = cache.get_seq_length()
        if length >= now:
            return
        if length < self._kept[0][0]:
            raise ValueError(
                f"GLACache: expected crop to go back to {self._kept[0][0]} tokens or more, of "
                f"{now}, got {length}: states are kept of the last call and {self.reach} tokens "
                "back, and no longer"
            )
        while self._kept[-1][0] > length:
            self._kept.pop()
        first, (start, states) = self._kept[0][0], self._kept[-1]
        cache.states = [_snapshot(entry) for entry in states]
        cache.lengths = [length] * (len(states) or len(cache.lengths))
        if not states:  # the cache had no states then
            cache.states = [{"recurrent_state": None, "conv_state": None} for _ in cache.lengths]
        self.behind = length - start
        if self._inputs is not None:
            self._inputs = self._inputs.part(0, length - first)


def _snapshot(entry: dict[str, Any]) -> dict[str, Any]:
    """A copy that later calls do not change. They replace all values except keys and values."""
    kept = {"attn_state": entry["attn_state"].snapshot()} if "attn_state" in entry else {}
    return entry | kept
