"""Rows of a cache during prefill: the states that prompts start from, and their checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gla_ext.cache._key_values import map_tensors


class Checkpoints:
    """The rows of a `StaticGLACache` that store states in the middle of N packed prompts.

    Args:
        every: distance of checkpoints in tokens of a prompt, a multiple of 64.
        rows: int64 `[total]`, the row of each checkpoint, -1 for none: `checkpoint_slots` of
            `chunk_gla_`.
        cu_starts: int64 `[N + 1]`, offsets of each prompt's checkpoints: its
            `checkpoint_cu_starts`.
        ends: int64 `[M]`, for the convolutions: token offsets in the packed row of the checkpoints.
        end_rows: int64 `[M]`, the rows of these checkpoints.
    """

    def __init__(
        self, every: int, rows: Tensor, cu_starts: Tensor, ends: Tensor, end_rows: Tensor
    ) -> None:
        self.every, self.rows, self.cu_starts = every, rows, cu_starts
        self._ends, self._end_rows = ends, end_rows
        self._places: dict[int, Tensor] = {}

    def keep_inputs(self, buffer: Tensor, x: Tensor) -> None:
        """Writes a convolution's last inputs at each checkpoint to the buffer `[P, D, W]`, where W
        is at most `every`. x `[1, T, D]` are its inputs.
        """
        W = buffer.shape[-1]
        if W not in self._places:  # the same for every layer
            places = self._ends.unsqueeze(1) + torch.arange(-W, 0, device=x.device)
            self._places[W] = places.clamp_min(0)  # a checkpoint that is not kept
        places = self._places[W]
        last = x[0].index_select(0, places.flatten()).view(*places.shape, x.shape[-1])
        buffer.index_copy_(0, self._end_rows, last.transpose(1, 2).to(buffer.dtype))


class Gathered(Mapping[str, Any]):
    """Some rows, int64 `[N]`, of a layer's entry. Each state is copied when it is read. Where
    goes_on, bool `[N]`, is False, the state is 0 instead of the row's content.
    """

    def __init__(self, entry: dict[str, Any], rows: Tensor, goes_on: Tensor | None = None) -> None:
        self._entry, self._rows, self._goes_on = entry, rows, goes_on

    def _of_rows(self, x: Tensor) -> Tensor:
        found = x.index_select(0, self._rows)
        if self._goes_on is None:
            return found
        return found.where(self._goes_on.view(-1, *(1,) * (x.ndim - 1)), 0)

    def __getitem__(self, key: str) -> Any:
        return map_tensors(self._of_rows, self._entry[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._entry)

    def __len__(self) -> int:
        return len(self._entry)
