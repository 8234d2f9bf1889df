"""Softmax attention, the layer that a hybrid model has in some of its blocks.

Constructor, attributes and state_dict keys are those of `fla.layers.attn.Attention` 0.6.0.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from gla_ext.cache._key_values import KeyValues, sequence_of
from gla_ext.layers._attend import attend_last, attend_packed, attend_rows, has_flash
from gla_ext.layers._history import Padding, check_hidden_states
from gla_ext.layers._options import check_heads, check_keywords, check_sizes, typed_options
from gla_ext.layers._projections import lay_side_by_side, split_heads
from gla_ext.layers._route import project, read
from gla_ext.ops._checks import check_plain_tensors
from gla_ext.ops._context import refuse_context
from gla_ext.ops.chunk import is_batch_invariant


class Attention(nn.Module):
    """Causal attention with rotary positions, by `scaled_dot_product_attention` and torch's flash
    kernels.

    The flash kernels process bf16 and fp16 on a GPU if there is a window or if sequences are packed
    or padded. In other cases a mask tells which keys a query sees.

    Args:
        hidden_size: width of the input and the output. Default: 2048.
        num_heads: number of heads, each `hidden_size / num_heads` wide, which is even.
            Default: 32.
        num_kv_heads: number of heads of keys and values; divides num_heads. Default: None
            (num_heads).
        qkv_bias: whether the maps to queries, keys and values have a bias. Default: False.
        window_size: number of tokens that a token sees, itself included; None: all. Default: None.
        rope_theta: base of the rotary frequencies. Default: 10000.
        layer_idx: index of this layer in a cache. Default: None.

    Raises:
        TypeError: an option of another type.
        ValueError: sizes that do not divide or are below 1, a rope_theta that is not above 0.
    """

    @typed_options
    def __init__(
        self,
        hidden_size: int = 2048,
        num_heads: int = 32,
        num_kv_heads: int | None = None,
        qkv_bias: bool = False,
        window_size: int | None = None,
        rope_theta: float = 10000.0,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        _check(hidden_size, num_heads, num_kv_heads, window_size, rope_theta)
        self.hidden_size = hidden_size
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.num_kv_groups = num_heads // num_kv_heads
        self.head_dim = hidden_size // num_heads
        self.kv_dim = num_kv_heads * self.head_dim
        self.qkv_bias = qkv_bias
        self.window_size = window_size
        self.rope_theta = rope_theta
        self.layer_idx = layer_idx
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=qkv_bias)
        self.k_proj = nn.Linear(hidden_size, self.kv_dim, bias=qkv_bias)
        self.v_proj = nn.Linear(hidden_size, self.kv_dim, bias=qkv_bias)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any | None = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cp_context: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None, Any | None]:
        """Applies the layer to a batch of sequences.

        Args:
            hidden_states: `[B, T, hidden_size]`.
            attention_mask: as in `GatedLinearAttention.forward`. Padding has no position, is seen
                by no token and returns 0. Default: None.
            past_key_values: a `gla_ext.cache.GLACache` with the keys and values of the tokens
                before these. Default: None.
            use_cache: store the keys and values of these tokens in past_key_values. Default: False.
            output_attentions, cu_seqlens, **kwargs: as in `GatedLinearAttention.forward`.
            max_seqlen: int, at least the length of the longest sequence, which is not read from a
                GPU. Without it, more blocks of a GPU run without work. Default: None.
            cp_context: must be None.

        Returns:
            The output `[B, T, hidden_size]`, None, and past_key_values.

        Raises the errors of `GatedLinearAttention.forward`, and
            ValueError: on a CPU, for invalid offsets.
            TypeError: for other dtypes of cu_seqlens, and a cache that does not store keys and
                values.
            NotImplementedError: for DTensors, a `cp_context`, and inside `batch_invariant`.
        """
        check_keywords("Attention", kwargs)
        longest = max_seqlen
        names = "hidden_states attention_mask cu_seqlens"
        check_plain_tensors("Attention", names, hidden_states, attention_mask, cu_seqlens)
        refuse_context(
            cp_context,
            "Attention: cp_context is not implemented for attention layers, whose tokens see those "
            "of all ranks",
        )
        self._check_call(hidden_states, past_key_values)
        B, T, _ = hidden_states.shape
        if cu_seqlens is not None:
            _check_offsets(cu_seqlens, B)
        padding = None
        if cu_seqlens is None and attention_mask is not None:
            padding, longest = Padding.of(attention_mask, B, T), T
            hidden_states, cu_seqlens = padding.pack(hidden_states), padding.cu_seqlens
        linears = [self.q_proj, self.k_proj, self.v_proj]
        q, k, v = (
            split_heads(x, self.head_dim) for x in project(hidden_states, linears, self.training)
        )
        o = self._attend(q, k, v, past_key_values, bool(use_cache), cu_seqlens, longest)
        if past_key_values is not None and not use_cache:
            past_key_values.update(layer_idx=self.layer_idx, offset=T)
        o = self.o_proj(o.flatten(2))
        if padding is not None:
            o = padding.unpack(o)
        return o, None, past_key_values

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: Any | None,
        use_cache: bool,
        cu_seqlens: Tensor | None,
        longest: int | None,
    ) -> Tensor:
        """Rotates q and k `[B, T, H, D]`, attends, and stores k and v."""
        T, window = q.shape[1], self.window_size
        past = None
        if cache is not None:
            if len(cache) > self.layer_idx:
                past = cache[self.layer_idx].get("attn_state")
            longest = cache.max_seqlen if longest is None else longest
            if longest is None and cu_seqlens is not None and use_cache:
                offsets = read(cu_seqlens, waits=True)
                if offsets is not None:  # each row gets room for as many tokens
                    longest = max(b - a for a, b in pairwise(offsets))
        positions = _positions(T, cu_seqlens, past, q.device)
        q, k = (rotary_embedding(x, positions, self.rope_theta) for x in (q, k))
        dtype = q.dtype
        if past is not None:  # the cache's dtype differs if autocast was on before and is off now
            q, k, v = (x.to(past.keys.dtype) for x in (q, k, v))
        if past is not None and T == 1 and cu_seqlens is None:
            return self._decode(q, k, v, past, cache, use_cache).to(dtype)
        if past is not None:
            keys, values, *offsets = past.in_order(k, v, cu_seqlens, longest)
            o = attend_packed(q.flatten(0, 1), keys, values, *offsets, window=window)
            o = o.reshape(q.shape)
        elif cu_seqlens is not None:
            flat = (x.flatten(0, 1) for x in (q, k, v))
            o = attend_packed(*flat, cu_seqlens, cu_seqlens, longest, longest, window)
            o = o.reshape(q.shape)
        else:
            o = attend_rows(q, k, v, window)
        if use_cache and cache is not None:
            if past is None:
                N = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
                past = KeyValues.empty(k, N, window)
            kept = past.with_tokens(k, v, cu_seqlens, longest)
            cache.update(layer_idx=self.layer_idx, attn_state=kept, offset=T)
        return o.to(dtype)

    def _decode(
        self, q: Tensor, k: Tensor, v: Tensor, past: KeyValues, cache: Any, use_cache: bool
    ) -> Tensor:
        """One token of every row, after the tokens in the cache."""
        recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (k, v, past.keys))
        if cache.in_place and use_cache:
            cache.expect_token(past)
            past.write_token(k, v, None if cache.slots is None else cache.slots < 0)
            seen = past.room if cache.bucket is None else min(cache.bucket, past.room)
            lengths: Tensor | None = past.lengths
        else:
            if recorded or not use_cache:
                past = past.with_tokens(k, v)
            else:
                past.expect_token()
                past.write_token(k, v)
            lengths = None if past.even else past.lengths
            whole = lengths is not None and has_flash(q)
            seen = past.room if whole else min(past.longest, past.room)
        if use_cache:
            cache.update(layer_idx=self.layer_idx, attn_state=past, offset=1)
        if lengths is not None and self.window_size is not None:
            lengths = lengths.clamp_max(self.window_size)
        return attend_last(q, past.keys[:, :seen], past.values[:, :seen], lengths)

    def _check_call(self, x: Tensor, cache: Any | None) -> None:
        check_hidden_states("Attention", x, self.hidden_size)
        if is_batch_invariant():
            raise NotImplementedError(
                "Attention: batch_invariant is not implemented for attention, torch's kernels "
                "round a sequence by itself otherwise than in a batch"
            )
        if cache is None:
            return
        if self.layer_idx is None:
            raise ValueError("Attention: expected layer_idx to be given beside past_key_values")
        if not hasattr(cache, "bucket"):
            raise TypeError(
                "Attention: expected past_key_values to be a gla_ext.cache.GLACache, got "
                f"{type(cache).__name__}"
            )

    def fuse_projections(self) -> None:
        """See `gla_ext.model.fuse_projections`."""
        lay_side_by_side([self.q_proj, self.k_proj, self.v_proj])


def rotary_embedding(x: Tensor, positions: Tensor, theta: float = 10000.0) -> Tensor:
    """Rotary position embeddings (Su et al., 2021, arXiv:2104.09864).

    Channel i of a head's first half and channel i of its second half are turned, as one complex
    number, by the angle `position * theta ** (-2 i / D)`.

    Angles are fp32, fp64 for fp64 inputs; the result is rounded once.

    Args:
        x: `[..., T, H, D]`, D even.
        positions: `[T]`, or any shape that fits x's before H.
        theta: base of the frequencies. Default: 10000.

    Returns:
        As x.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    D = x.shape[-1]
    channels = torch.arange(D // 2, device=x.device, dtype=dtype)
    frequencies = theta ** (channels * (-2 / D))  # [D / 2]
    angles = (positions.to(dtype).unsqueeze(-1) * frequencies).unsqueeze(-2)  # [.., T, 1, D / 2]
    cos, sin = angles.cos(), angles.sin()
    a, b = x.chunk(2, -1)
    turned = torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin)
    return torch.cat([half.to(x.dtype) for half in turned], -1)


def _check_offsets(cu_seqlens: Tensor, B: int) -> None:
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            "Attention: expected cu_seqlens to be torch.int32 or torch.int64, got "
            f"{cu_seqlens.dtype}"
        )
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(
            f"Attention: expected cu_seqlens to have shape [N + 1], got {list(cu_seqlens.shape)}"
        )
    if B != 1:
        raise ValueError(f"Attention: expected a batch of one beside cu_seqlens, got B = {B}")


def _positions(
    T: int, cu_seqlens: Tensor | None, past: KeyValues | None, device: torch.device
) -> Tensor:
    """Positions of tokens in their sequences, int64 `[T]`; for rows of several lengths `[N, T]`."""
    tokens = torch.arange(T, device=device)
    if cu_seqlens is None:
        return tokens if past is None else past.lengths.unsqueeze(1) + tokens
    of = sequence_of(cu_seqlens, T)
    positions = tokens - cu_seqlens[of]
    return positions if past is None else positions + past.lengths[of]


def _check(
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int,
    window_size: int | None,
    rope_theta: float,
) -> None:
    check_heads("Attention", num_heads, num_kv_heads)
    if hidden_size < 1 or hidden_size % (2 * num_heads):
        raise ValueError(
            f"Attention: expected hidden_size to be an even multiple of num_heads = {num_heads}, "
            f"got {hidden_size}"
        )
    if window_size is not None:
        check_sizes("Attention", window_size=window_size)
    if not 0 < rope_theta < float("inf"):
        raise ValueError(f"Attention: expected rope_theta to be above 0, got {rope_theta}")
