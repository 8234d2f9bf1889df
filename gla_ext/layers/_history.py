"""Where the past of a layer's tokens is: in a cache, a server's pool, or on the ranks before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gla_ext.layers._padding import Padding
from gla_ext.layers.short_convolution import ShortConvolution
from gla_ext.ops._context import NO_MASK, context_of, refuse_context

_NO_RECURRENCE = (
    "GatedLinearAttention: expected mode 'chunk' with cp_context, got 'fused_recurrent'"
)


def entry_of(cache: Any | None, layer_idx: int | None) -> Mapping[str, Any] | None:
    """What a cache has of a layer, or None."""
    if cache is None:
        return None
    if layer_idx is None:
        raise ValueError(
            "GatedLinearAttention: expected layer_idx to be an int when past_key_values is given, "
            "got None"
        )
    return cache[layer_idx] if len(cache) > layer_idx else None


class History:
    """What one call of a `GatedLinearAttention` goes on from, and where it leaves what follows.

    The layer takes its tokens from here, `take`, without their padding, and gives its output back,
    `keep`. On the way it replaces the states by those after its tokens.

    Attributes:
        state: of the recurrence, `[N, H, V, K]`, or None.
        conv_state: what the convolutions go on from, or None.
        wants_state: whether states after the tokens are wanted.
        in_place: whether a decoded token writes its state over the one that is here.
        slots: int64 `[B]`, the rows of a batch in place, -1 for one that waits; or None.
        pool: where the states of prompts lie, as `chunk_gla_` takes it; or None.
        cu_seqlens: offsets of the sequences that `take` has packed, or the caller; or None.
        cp_context: where these are one rank's tokens, or None.
    """

    def __init__(self, layer: Any, cache: Any | None, use_cache: bool | None, context: Any) -> None:
        if layer.mode == "fused_recurrent":
            refuse_context(context, _NO_RECURRENCE)
        self._cache, self._layer_idx, self.cp_context = cache, layer.layer_idx, context
        self.wants_state = bool(use_cache)
        self.in_place = self.wants_state and getattr(cache, "in_place", False)
        self.pool = self.slots = self.state = self.conv_state = None
        if self.in_place:
            self.slots = getattr(cache, "slots", None)
            if layer.mode != "fused_recurrent" and not torch.is_grad_enabled():
                self.pool = cache.prompt_rows(layer.layer_idx)
        entry = entry_of(cache, layer.layer_idx)
        if entry is not None:
            # A prompt's entry copies what is asked for.
            self.state = entry["recurrent_state"] if self.pool is None else None
            self.conv_state = entry["conv_state"] if layer.use_short_conv else None

    def take(self, x: Tensor, attention_mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
        """The tokens `[B, T, D]`, of a batch with a mask `[1, B * T, D]`, padding last."""
        self._tokens, self._padding, self.cu_seqlens = x.shape[1], None, cu_seqlens
        if attention_mask is None:
            return x
        refuse_context(self.cp_context, f"GatedLinearAttention: {NO_MASK}")
        if cu_seqlens is not None:
            return x
        self._padding = Padding.of(attention_mask, x.shape[0], x.shape[1])
        self.cu_seqlens = self._padding.cu_seqlens
        return self._padding.pack(x)

    def convolve(
        self, convolutions: Sequence[ShortConvolution], inputs: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """The outputs of convolutions over the tokens."""
        if self.pool is not None:
            self._cache.keep_inputs(self._layer_idx, inputs)
        outputs, self.conv_state = context_of(self.cp_context).convolve(
            convolutions, inputs, self.conv_state, self.wants_state, self.cu_seqlens
        )
        return outputs

    def keep(self, o: Tensor) -> Tensor:
        """Leaves the states in the cache; the output is as x was, 0 in place of padding."""
        if self._cache is not None:
            states = {"recurrent_state": self.state, "conv_state": self.conv_state}
            self._cache.update(layer_idx=self._layer_idx, **states, offset=self._tokens)
        return o if self._padding is None else self._padding.unpack(o)
