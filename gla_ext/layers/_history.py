"""The context of a layer's tokens: padding, and earlier tokens in a cache, a pool or other
ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gla_ext.layers._route import check_mask
from gla_ext.ops._context import NO_MASK, context_of, refuse_context

_NO_RECURRENCE = (
    "GatedLinearAttention: expected mode 'chunk' with cp_context, got 'fused_recurrent'"
)


def valid_tokens(attention_mask: Tensor, B: int, T: int) -> Tensor:
    """The mask's last T columns as bool `[B, T]`.

    Raises TypeError if the mask is no tensor and ValueError for a wrong shape. On CPU, where
    reading values costs no wait, it also raises ValueError for values other than 0 and 1.
    """
    if not isinstance(attention_mask, Tensor):
        raise TypeError(
            "GatedLinearAttention: expected attention_mask to be a tensor, got "
            f"{type(attention_mask)}"
        )
    if attention_mask.ndim != 2 or attention_mask.shape[0] != B or attention_mask.shape[1] < T:
        raise ValueError(
            f"GatedLinearAttention: expected attention_mask to have shape [B, at least T] = "
            f"[{B}, {T}], got {list(attention_mask.shape)}"
        )
    mask = attention_mask[:, attention_mask.shape[1] - T :]
    if mask.dtype == torch.bool:
        return mask
    valid = mask != 0
    check_mask(
        mask,
        lambda mask: mask == valid,
        "GatedLinearAttention: expected attention_mask to hold 1 for tokens and 0 for padding, "
        "got {}; of an additive mask pass mask == 0",
    )
    return valid


def packed_slots(valid: Tensor) -> tuple[Tensor, Tensor]:
    """The place of each token in one packed row: valid tokens first, in order, then padding.

    All shapes follow from the shape of valid, bool `[B, T]`. Nothing is read back from the device,
    so the function compiles into one graph.

    Returns:
        The slots, int64 `[B * T]`, a permutation; and cu_seqlens, int64 `[B + 1]`, the offsets of
        the B sequences in the packed row.
    """
    v = valid.flatten().to(torch.int64)
    rank, padding_rank = v.cumsum(0), (1 - v).cumsum(0)
    cu_seqlens = F.pad(valid.sum(1, dtype=torch.int64).cumsum(0), (1, 0))
    # Products, since inductor of torch 2.11 compiles torch.where of these to wrong code on AVX2.
    return v * rank + (1 - v) * (cu_seqlens[-1] + padding_rank) - 1, cu_seqlens


def pack(x: Tensor, slots: Tensor) -> Tensor:
    """Moves tokens `[B, T, D]` to their slots in one row `[1, B * T, D]`."""
    x = x.flatten(0, 1)
    return torch.zeros_like(x).index_copy(0, slots, x).unsqueeze(0)


def unpack(row: Tensor, slots: Tensor, B: int, T: int) -> Tensor:
    """The inverse of `pack`, from `[1, B * T, D]` to `[B, T, D]`."""
    return row[0].index_select(0, slots).unflatten(0, (B, T))


class Padding(NamedTuple):
    """A batch's padding, and how its valid tokens are packed in one row, with offsets
    cu_seqlens.
    """

    valid: Tensor
    slots: Tensor
    cu_seqlens: Tensor

    @classmethod
    def of(cls, attention_mask: Tensor, B: int, T: int) -> Padding:
        valid = valid_tokens(attention_mask, B, T)
        return cls(valid, *packed_slots(valid))

    def pack(self, x: Tensor) -> Tensor:
        """`[B, T, D]` to `[1, B * T, D]`."""
        # Masked first, so that a NaN in a padded token reaches no weight's gradient.
        return pack(x.masked_fill(~self.valid.unsqueeze(-1), 0), self.slots)

    def unpack(self, row: Tensor) -> Tensor:
        """The inverse of `pack`; padding is 0."""
        x = unpack(row, self.slots, *self.valid.shape)
        return x.masked_fill(~self.valid.unsqueeze(-1), 0)


def check_hidden_states(layer: str, x: Tensor, hidden_size: int) -> None:
    """Raises an error if x is not a batch of sequences of vectors."""
    if x.is_nested:
        raise NotImplementedError(
            f"{layer}: nested tensors are not supported, pack the sequences in one row and pass "
            "cu_seqlens"
        )
    if x.ndim != 3 or x.shape[-1] != hidden_size:
        raise ValueError(
            f"{layer}: expected hidden_states to have shape [B, T, hidden_size = {hidden_size}], "
            f"got {list(x.shape)}"
        )


def entry_of(cache: Any | None, layer_idx: int | None) -> Mapping[str, Any] | None:
    """A cache's entry for a layer, or None."""
    if cache is None:
        return None
    if layer_idx is None:
        raise ValueError(
            "GatedLinearAttention: expected layer_idx to be an int when past_key_values is given, "
            "got None"
        )
    return cache[layer_idx] if len(cache) > layer_idx else None


class History:
    """The states that one call of a `GatedLinearAttention` starts from, and where it stores new
    ones.

    The layer gets its tokens without padding from `take` and passes its output through `keep`. In
    between, it replaces the states by the states after its tokens.

    Attributes:
        state: state of the recurrence, `[N, H, V, K]`, or None.
        conv_state: states that the convolutions start from, or None.
        wants_state: whether the states after the tokens are needed.
        in_place: whether a token step overwrites the state that it starts from.
        slots: int64 `[B]`, the slots of the rows of a batch in place, -1 for a row that waits; or
            None.
        pool: the pool that holds the states of prompts, as arguments of `chunk_gla_`; or None.
        cu_seqlens: offsets of the sequences packed by `take` or by the caller; or None.
        cp_context: the context if the tokens are one rank's part of a sequence, or None.
    """

    def __init__(self, layer: Any, cache: Any | None, use_cache: bool | None, context: Any) -> None:
        if layer.mode == "fused_recurrent":
            refuse_context(context, _NO_RECURRENCE)
        self._cache, self.cp_context = cache, context
        # Not read without a cache, or each compiled block would get its own graph for its index.
        self._layer_idx = None if cache is None else layer.layer_idx
        self.wants_state = bool(use_cache)
        self.in_place = self.wants_state and getattr(cache, "in_place", False)
        self.pool = self.slots = self.state = self.conv_state = None
        if self.in_place:
            self.slots = getattr(cache, "slots", None)
            if layer.mode != "fused_recurrent" and not torch.is_grad_enabled():
                self.pool = cache.prompt_rows(self._layer_idx)
        entry = entry_of(cache, self._layer_idx)
        if entry is not None:
            # With a pool, the convolution states of the entry are copies of the rows that are used.
            self.state = entry["recurrent_state"] if self.pool is None else None
            self.conv_state = entry["conv_state"] if layer.use_short_conv else None

    def take(self, x: Tensor, attention_mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
        """The tokens `[B, T, D]`. With a mask they are packed into `[1, B * T, D]`, padding
        last.
        """
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
        self, convolutions: Sequence[nn.Module], inputs: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """The outputs of convolutions over the tokens."""
        if self.pool is not None:
            self._cache.keep_inputs(self._layer_idx, inputs)
        outputs, self.conv_state = context_of(self.cp_context).convolve(
            convolutions, inputs, self.conv_state, self.wants_state, self.cu_seqlens
        )
        return outputs

    def token_buffers(self, k: Tensor, v: Tensor, gk: Tensor) -> dict[str, Tensor] | None:
        """See `StaticGLACache.token_buffers`; None if no state is overwritten in place."""
        return self._cache.token_buffers(self._layer_idx, k, v, gk) if self.in_place else None

    def keep(self, o: Tensor) -> Tensor:
        """Stores the states in the cache and returns o in the shape of x, with 0 at padding."""
        if self._cache is not None:
            states = {"recurrent_state": self.state, "conv_state": self.conv_state}
            self._cache.update(layer_idx=self._layer_idx, **states, offset=self._tokens)
        return o if self._padding is None else self._padding.unpack(o)
