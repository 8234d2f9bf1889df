"""A cache of recurrent states, one entry a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gla_ext.cache._key_values import KeyValues, map_entry
from gla_ext.cache._past import Past


class GLACache:
    """The states of a stack of layers.

    The layers of GLA ask for `len(cache)`, `cache[layer_idx]["recurrent_state"]` and
    `cache.update(...)` alone, so any cache that has these serves as well (FLA's does). The
    memory of an entry does not depend on the number of tokens seen: `H * V * K * 4` bytes a
    sequence. An attention layer of a hybrid model keeps its keys and values here, in room that
    doubles when it is full, or of a window; they are written in place, so a copy of a cache is made
    by `copy.deepcopy`.

    Attributes:
        in_place: whether a layer that decodes writes the next state over the one it finds here.
        slots: int64 `[B]`, the rows of a batch in place, -1 for one that waits; None where all go
            on.
    """

    in_place = False
    slots: Tensor | None = None
    bucket: int | None = None  # number of keys that a step reads, where not all that there are
    max_seqlen: int | None = None  # of the packed sequences that pass now, if it is known
    is_compileable = False  # generate() of transformers asks: entries are added as layers run
    # It asks too, from 5.24 on, by layer, and goes by get_seq_length() only where not all say so.
    is_linear = (False,)

    def __init__(self) -> None:
        self.states: list[dict[str, Any]] = []
        self.lengths: list[int] = []
        self._pending: Tensor | None = None
        self._pending_at = 0
        self.past: Past | None = None

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, layer_idx: int) -> dict[str, Any]:
        return self.states[layer_idx]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.states)

    @property
    def num_sequences(self) -> int | None:
        """How many sequences there are states of; None before any has one."""
        for entry in self.states:
            if entry["recurrent_state"] is not None:
                return entry["recurrent_state"].shape[0]
            if "attn_state" in entry:
                return len(entry["attn_state"].lengths)
        return None

    def update(
        self,
        *,
        layer_idx: int = 0,
        recurrent_state: Tensor | None = None,
        conv_state: Any | None = None,
        attn_state: KeyValues | None = None,
        offset: int = 1,
    ) -> dict[str, Any]:
        """Replaces what is given of one layer's state; what is None stays as it was.

        Args:
            layer_idx: index of the layer. Entries below it that are not there yet are empty.
            recurrent_state: `[N, H, V, K]`, fp32. Default: None.
            conv_state: the last inputs of the short convolutions. Default: None.
            attn_state: keys and values of an attention layer. Default: None.
            offset: number of tokens these states are further on. Default: 1.

        Returns:
            The layer's entry, with the keys 'recurrent_state' and 'conv_state', and of an
            attention layer 'attn_state'.
        """
        while len(self.states) <= layer_idx:
            self.states.append({"recurrent_state": None, "conv_state": None})
            self.lengths.append(0)
        entry = self.states[layer_idx]
        if recurrent_state is not None:
            entry["recurrent_state"] = recurrent_state
        if conv_state is not None:
            entry["conv_state"] = conv_state
        if attn_state is not None:
            entry["attn_state"] = attn_state
        self.lengths[layer_idx] += offset
        return entry

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of tokens that a layer has seen, padding included; 0 without an entry."""
        return self.lengths[layer_idx] if layer_idx < len(self.lengths) else 0

    @property
    def pending(self) -> Tensor | None:
        """The last token that `generate` drew of each sequence, int64 `[B]`. It has not passed the
        model: the next `generate` feeds it first. None, once other calls have moved the states on.
        """
        return self._pending if self._pending_at == self.get_seq_length() else None

    @pending.setter
    def pending(self, tokens: Tensor | None) -> None:
        self._pending, self._pending_at = tokens, self.get_seq_length()

    def prompt_rows(self, layer_idx: int | None) -> None:
        """None: no layer's prompts pass in place, see `StaticGLACache`."""

    def reset(self) -> None:
        """Empties the cache."""
        self.states.clear()
        self.lengths.clear()
        self.pending = self.past = None

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the sequences named by indices, int64 `[N']`, in that order; repeats allowed."""
        self._map(lambda state: state.index_select(0, indices.to(state.device)))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """`batch_select_indices` under the name that beam search knows."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every sequence `repeats` times, its copies next to each other."""
        self._map(lambda state: state.repeat_interleave(repeats, dim=0))

    def activate_past_recording(self) -> None:
        """Makes `crop` possible, which can take back all tokens of the last call, and at least 64.
        transformers' assisted decoding calls this; a second call changes nothing.

        Models of `gla_ext.hf` alone keep what it takes.
        """
        if self.past is None:
            self.past = Past(self)

    @property
    def is_croppable(self) -> bool:
        return self.past is not None

    def crop(self, count: int) -> None:
        """Takes back the last tokens, so many below 0 of them, or all after the first count.

        Raises:
            NotImplementedError: without `activate_past_recording` before.
            ValueError: for more tokens than are kept.
        """
        now = self.get_seq_length()
        length = max(now + count, 0) if count <= 0 else count
        if length >= now:
            return
        if self.past is None:
            raise NotImplementedError(
                "GLACache: crop is not implemented without activate_past_recording() before the "
                "tokens that are to be taken back"
            )
        self.past.crop(self, length)

    def detach(self) -> None:
        """Cuts the states from the graph that made them, for truncated backpropagation."""
        self._map(torch.Tensor.detach)

    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        for entry in self.states:
            entry |= map_entry(function, entry)
        if self._pending is not None:
            self._pending = function(self._pending)
        if self.past is not None:
            self.past.map(function)
