"""A cache of recurrent states, one entry per layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gla_ext.cache._key_values import KeyValues, map_entry
from gla_ext.cache._past import Past


class GLACache:
    """The states of a stack of layers.

    The GLA layers only use `len(cache)`, `cache[layer_idx]["recurrent_state"]` and
    `cache.update(...)`, so any cache that has these works too (FLA's does). The memory of an entry
    does not depend on the number of tokens: `H * V * K * 4` bytes per sequence. An attention layer
    of a hybrid model stores its keys and values here. Their buffer is as large as the window, or
    doubles when it is full. They are written in place, so use `copy.deepcopy` to copy a cache.

    Attributes:
        in_place: whether a layer that decodes overwrites the state in this cache.
        slots: int64 `[B]`, the rows of a batch in place, -1 for a row that waits; None if no row
            waits.
        buffering: whether the current step keeps its token beside the states.
    """

    in_place = False
    buffering = False
    slots: Tensor | None = None
    bucket: int | None = None  # number of keys that a token step reads, if not all
    max_seqlen: int | None = None  # of the packed sequences of the current call, if known
    is_compileable = False  # for generate() of transformers: entries are added as layers run
    # Also for transformers, from 5.24 on; one value per layer. Only if not all are True it uses
    # get_seq_length().
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
        """Number of sequences that have states; None if there are none."""
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
        """Replaces the given parts of one layer's state; parts that are None do not change.

        Args:
            layer_idx: index of the layer. Missing entries below it are added, empty.
            recurrent_state: `[N, H, V, K]`, fp32. Default: None.
            conv_state: the last inputs of the short convolutions. Default: None.
            attn_state: keys and values of an attention layer. Default: None.
            offset: number of tokens by which these states are further. Default: 1.

        Returns:
            The layer's entry, with the keys 'recurrent_state' and 'conv_state', and for an
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
        """The last token that `generate` drew for each sequence, int64 `[B]`. The model has not yet
        processed it: the next `generate` does so first. None once other calls have changed the
        states.
        """
        return self._pending if self._pending_at == self.get_seq_length() else None

    @pending.setter
    def pending(self, tokens: Tensor | None) -> None:
        self._pending, self._pending_at = tokens, self.get_seq_length()

    def prompt_rows(self, layer_idx: int | None) -> None:
        """None: this cache has no buffers that prompts can use in place; see `StaticGLACache`."""

    def token_buffers(self, *args: Any) -> None:
        """None: this cache keeps no tokens beside its states; see `StaticGLACache`."""

    def reset(self) -> None:
        """Empties the cache."""
        self.states.clear()
        self.lengths.clear()
        self.pending = self.past = None

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the sequences with the given indices, int64 `[N']`, in that order; repeats
        allowed.
        """
        self._map(lambda state: state.index_select(0, indices.to(state.device)))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """`batch_select_indices` under the name that beam search uses."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every sequence `repeats` times, its copies next to each other."""
        self._map(lambda state: state.repeat_interleave(repeats, dim=0))

    def activate_past_recording(self) -> None:
        """Enables `crop`, which can then take back all tokens of the last call, and at least 64
        tokens. transformers' assisted decoding calls this; a second call changes nothing.

        Only models of `gla_ext.hf` store the copies that `crop` needs.
        """
        if self.past is None:
            self.past = Past(self)

    @property
    def is_croppable(self) -> bool:
        return self.past is not None

    def crop(self, count: int) -> None:
        """Takes back the last -count tokens if count <= 0, else all tokens after the first count.

        Raises:
            NotImplementedError: if `activate_past_recording` was not called before.
            ValueError: if the states at that token are no longer kept.
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
        """Detaches the states from the autograd graph, for truncated backpropagation."""
        self._map(torch.Tensor.detach)

    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        for entry in self.states:
            entry |= map_entry(function, entry)
        if self._pending is not None:
            self._pending = function(self._pending)
        if self.past is not None:
            self.past.map(function)
