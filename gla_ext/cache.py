"""A plain cache of recurrent states, one entry a layer, for decoding and for chained segments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


class GLACache:
    """The states of a stack of layers.

    The layers ask for `len(cache)`, `cache[layer_idx]["recurrent_state"]` and
    `cache.update(...)` alone, so any cache that has these serves as well (FLA's does). The
    memory of an entry does not depend on the number of tokens seen: `H * V * K * 4` bytes a
    sequence.
    """

    def __init__(self) -> None:
        self.states: list[dict[str, Any]] = []
        self.lengths: list[int] = []

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, layer_idx: int) -> dict[str, Any]:
        return self.states[layer_idx]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.states)

    def update(
        self,
        *,
        layer_idx: int = 0,
        recurrent_state: Tensor | None = None,
        conv_state: Any | None = None,
        offset: int = 1,
    ) -> dict[str, Any]:
        """Replaces what is given of one layer's state; what is None stays as it was.

        Args:
            layer_idx: index of the layer. Entries below it that are not there yet are empty.
            recurrent_state: `[N, H, V, K]`, fp32. Default: None.
            conv_state: the last inputs of the short convolutions. Default: None.
            offset: number of tokens these states are further on. Default: 1.

        Returns:
            The layer's entry, with the keys 'recurrent_state' and 'conv_state'.
        """
        while len(self.states) <= layer_idx:
            self.states.append({"recurrent_state": None, "conv_state": None})
            self.lengths.append(0)
        entry = self.states[layer_idx]
        if recurrent_state is not None:
            entry["recurrent_state"] = recurrent_state
        if conv_state is not None:
            entry["conv_state"] = conv_state
        self.lengths[layer_idx] += offset
        return entry

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of tokens that a layer has seen, padding included; 0 without an entry."""
        return self.lengths[layer_idx] if layer_idx < len(self.lengths) else 0

    def reset(self) -> None:
        """Empties the cache."""
        self.states.clear()
        self.lengths.clear()

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the sequences named by indices, int64 `[N']`, in that order; repeats allowed."""
        self._map(lambda state: state.index_select(0, indices.to(state.device)))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """`batch_select_indices` under the name that beam search knows."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every sequence `repeats` times, its copies next to each other."""
        self._map(lambda state: state.repeat_interleave(repeats, dim=0))

    def detach(self) -> None:
        """Cuts the states from the graph that made them, for truncated backpropagation."""
        self._map(torch.Tensor.detach)

    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        def apply(value: Any) -> Any:
            if isinstance(value, (tuple, list)):
                return type(value)(apply(item) for item in value)
            return function(value) if isinstance(value, Tensor) else value

        for entry in self.states:
            for key, value in entry.items():
                entry[key] = apply(value)
