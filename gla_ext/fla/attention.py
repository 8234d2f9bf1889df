"""Replacements for flash_attn, which FLA's `Attention` needs, if that package is missing; and for
FLA's rotary embedding, whose kernel does not run on a CPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gla_ext.cache._key_values import sequence_of
from gla_ext.fla.activations import needs_torch
from gla_ext.layers._attend import attend_last, attend_packed, attend_rows
from gla_ext.layers.attention import rotary_embedding


def replacements() -> list[tuple[Any, str, Any]]:
    """Owner, name and new value of each attribute to replace."""
    try:
        layer = importlib.import_module("fla.layers.attn")
        rotary = importlib.import_module("fla.modules").RotaryEmbedding
    except ModuleNotFoundError:  # the package fla-core has no layers
        return []
    changes: list[tuple[Any, str, Any]] = [(rotary, "forward", _rotary_forward(rotary.forward))]
    if layer.flash_attn_func is None:
        changes.append((layer, "flash_attn_func", flash_attn_func))
        changes.append((layer, "flash_attn_varlen_func", flash_attn_varlen_func))
    return changes


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """flash_attn's function of that name, for q `[B, T, H, D]` and k, v `[B, L, HK, D]`, L >= T."""
    window = _window(causal, window_size)
    B, T, L = q.shape[0], q.shape[1], k.shape[1]
    if T == L:
        return attend_rows(q, k, v, window)
    if T == 1:
        seen = slice(None if window is None else max(0, L - window), None)
        return attend_last(q, k[:, seen], v[:, seen], None)
    cu_q, cu_k = (torch.arange(B + 1, device=q.device) * n for n in (T, L))
    flat = (x.flatten(0, 1) for x in (q, k, v))
    return attend_packed(*flat, cu_q, cu_k, T, L, window).unflatten(0, (B, T))


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """flash_attn's function of that name, for q `[TQ, H, D]` and k, v `[TK, HK, D]`."""
    window = _window(causal, window_size)
    longest = (int(max_seqlen_q), int(max_seqlen_k))
    return attend_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, *longest, window)


def _window(causal: bool, window_size: tuple[int, int]) -> int | None:
    left, right = window_size
    if not causal or right > 0:
        raise NotImplementedError(
            "accelerate_fla: what stands for flash_attn is implemented for causal attention alone"
        )
    return None if left < 0 else left + 1


def _rotary_forward(original: Callable) -> Callable:
    """Makes the replacement for `RotaryEmbedding.forward`."""

    def forward(
        self: nn.Module,
        q: Tensor,
        k: Tensor,
        seqlen_offset: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        if self.interleaved or self.scale is not None or not needs_torch(q):
            return original(self, q, k, seqlen_offset, cu_seqlens, max_seqlen, *args, **kwargs)
        positions, offset = torch.arange(q.shape[1], device=q.device), seqlen_offset
        if cu_seqlens is not None:
            of = sequence_of(cu_seqlens, q.shape[1])
            positions = positions - cu_seqlens[of]
            offset = offset[of] if isinstance(offset, Tensor) else offset
        elif isinstance(offset, Tensor):
            offset = offset.unsqueeze(-1)
        return tuple(rotary_embedding(x, positions + offset, self.base) for x in (q, k))

    return forward
