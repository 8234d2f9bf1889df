"""How a cache of states goes back to fewer tokens, as assisted decoding needs it.

A recurrent state cannot be undone. So states are kept at some tokens, with the inputs since: to go
back is to take the last kept ones before, and to let the inputs since then pass once more in front
of the next ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gla_ext.cache._key_values import KeyValues, map_tensors

REACH = 64  # tokens that a cache can go back at least; also all of the last call

Run = Callable[[Tensor, Tensor | None], list[Tensor]]
Inputs = tuple[Tensor, Tensor | None]  # and their mask


class Past:
    """What a `GLACache` was at two earlier tokens, the last of those at which it was kept.

    Attributes:
        reach: tokens between kept states, at least.
        behind: tokens that the cache counts and the states have not seen.
    """

    def __init__(self, cache: Any) -> None:
        self.reach = REACH
        self._kept: list[tuple[int, list[dict[str, Any]]]] = []
        self._inputs: Tensor | None = None  # since the first of these, [B, tokens, D]
        self._valid: Tensor | None = None  # their mask, [B, tokens], if there is one
        self.behind = 0
        self._keep(cache)

    def _keep(self, cache: Any) -> None:
        """Keeps the states of now and those kept last."""
        now = cache.get_seq_length()
        states = [_snapshot(entry) for entry in cache.states]
        dropped = 0 if len(self._kept) < 2 else self._kept[1][0] - self._kept[0][0]
        self._kept = [*self._kept[-1:], (now, states)]
        if self._inputs is not None:
            self._inputs = self._inputs[:, dropped:]
            self._valid = None if self._valid is None else self._valid[:, dropped:]

    def map(self, function: Callable[[Tensor], Tensor]) -> None:
        """`function` of every tensor, which keeps or chooses sequences."""
        self._kept = [
            (length, [{k: map_tensors(function, x) for k, x in entry.items()} for entry in states])
            for length, states in self._kept
        ]
        self._inputs = map_tensors(function, self._inputs)
        self._valid = map_tensors(function, self._valid)

    def run(self, cache: Any, x: Tensor, mask: Tensor | None, run: Run) -> list[Tensor]:
        """`run(x, mask)`, of states that have seen what the cache counts.

        Args:
            x, mask: inputs `[B, T, D]`, and `[B, >= T]` of 0 (padding) and 1, or None.
            run: from inputs and their mask, or None, to results `[B, T, D]`.
        """
        again, T = self.behind, x.shape[1]
        valid = None if mask is None else mask[:, mask.shape[1] - T :]
        if again:
            before = (
                self._inputs[:, -again:],
                None if self._valid is None else self._valid[:, -again:],
            )
            self._cut(self._inputs.shape[1] - again)
            cache.lengths = [length - again for length in cache.lengths]
            self.behind = 0
            x, valid = _joined(before, (x, valid))
        parts, first = [], x.shape[1] - self.reach
        if first > 0:  # states are kept near the end: a crop then seldom has much to pass again
            parts.append(run(x[:, :first], None if valid is None else valid[:, :first]))
            self._remember(x[:, :first], None if valid is None else valid[:, :first])
            self._keep(cache)
            x, valid = x[:, first:], None if valid is None else valid[:, first:]
        elif cache.get_seq_length() - self._kept[-1][0] >= self.reach:
            self._keep(cache)
        parts.append(run(x, valid))
        self._remember(x, valid)
        return [torch.cat(pieces, 1)[:, -T:] for pieces in zip(*parts, strict=True)]

    def _remember(self, x: Tensor, valid: Tensor | None) -> None:
        before = (x[:, :0], None) if self._inputs is None else (self._inputs, self._valid)
        self._inputs, self._valid = _joined(before, (x, valid))

    def _cut(self, count: int) -> None:
        """Leaves the first of the inputs."""
        if self._inputs is not None:
            self._inputs = self._inputs[:, :count]
            self._valid = None if self._valid is None else self._valid[:, :count]

    def crop(self, cache: Any, length: int) -> None:
        """Goes back to so many tokens; ValueError for one before the states that are kept."""
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
        if not states:  # none had been stored by then
            cache.states = [{"recurrent_state": None, "conv_state": None} for _ in cache.lengths]
        self.behind = length - start
        self._cut(length - first)


def _joined(before: Inputs, after: Inputs) -> Inputs:
    x = torch.cat([before[0], after[0]], 1)
    if before[1] is None and after[1] is None:
        return x, None
    masks = [x.new_ones(x.shape[:2]) if m is None else m.to(x) for x, m in (before, after)]
    return x, torch.cat(masks, 1)


def _snapshot(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry that later calls leave as it is: all but keys and values is replaced by them."""
    entry = dict(entry)
    if "attn_state" in entry:
        kept: KeyValues = entry["attn_state"]
        entry["attn_state"] = kept.snapshot()
    return entry
