"""Linear attention with one decay per head: `chunk_gla` and the recurrence with g `[B, T, HK]`.

The decay depends on the data (simple GLA, gated RetNet, Mamba-2), is constant for each head
(RetNet, Lightning attention), or is absent (plain linear attention). Signatures are those of
flash-linear-attention 0.6.0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gla_ext.ops._checks import check_tensors
from gla_ext.ops._door import on_shards
from gla_ext.ops.chunk import chunk_gla
from gla_ext.ops.recurrent import fused_recurrent_gla


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    cp_context: Any = None,
) -> tuple[Tensor, Tensor | None]:
    r"""Linear attention with one decay per head, in the chunkwise form.

    Computes, for every sequence and head,

        S_t = exp(g_t) S_{t-1} + k_t v_t^T,    o_t = scale * S_t^T q_t

    This is `chunk_gla` with the same g for all key channels. It is differentiable in the same
    tensors.

    Args:
        q, k, v: `[B, T, H, K]`, `[B, T, HK, K]`, `[B, T, HK, V]`, as in `chunk_gla`.
        g: natural logarithm of the decay of each head, `[B, T, HK]`, as in `chunk_gla`. Default: no
            decay.
        g_gamma: natural logarithm of a decay that is constant over tokens, `[HK]`. Only one of g
            and g_gamma may be given. Default: None.
        scale, initial_state, output_final_state, state_v_first, cu_seqlens, cu_seqlens_cpu,
            cp_context: as in `chunk_gla`.

    Returns:
        The same as `chunk_gla`.

    Raises the errors of `chunk_gla`, and ValueError if both g and g_gamma are given.
    """
    gate = _gate_of_heads("chunk_simple_gla", q, k, g, g_gamma)
    args = (q, k, v, gate, scale, initial_state, output_final_state, state_v_first)
    return chunk_gla(*args, cu_seqlens, cu_seqlens_cpu, cp_context=cp_context)


fused_chunk_simple_gla = chunk_simple_gla


def fused_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: bool,
) -> tuple[Tensor, Tensor | None]:
    """`chunk_simple_gla` token by token: for short sequences and reverse time.

    Args:
        q, k, v, g, g_gamma, scale, initial_state, output_final_state, state_v_first, cu_seqlens: as
            in `chunk_simple_gla`.
        reverse: process the tokens from last to first. Default: False.
        **kwargs: `transpose_state_layout`, the old name of state_v_first; it warns.

    Results and errors are those of `chunk_simple_gla`; unknown keywords raise TypeError.
    """
    gate = _gate_of_heads("fused_recurrent_simple_gla", q, k, g, g_gamma)
    args = (q, k, v, gate, None, scale, initial_state, output_final_state)
    return fused_recurrent_gla(*args, reverse, state_v_first, cu_seqlens, **kwargs)


def chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Retention (Sun et al., arXiv 2307.08621): `chunk_simple_gla` with RetNet's constant decays.

    Head h decays by `1 - 2 ** (-5 - h)` per token.

    Args:
        q, k, v, scale, initial_state, output_final_state, cu_seqlens: as in `chunk_simple_gla`,
            with HK = H.

    Results and errors are those of `chunk_simple_gla`.
    """
    g_gamma = retention_decay(_heads("chunk_retention", q, k), q)
    args = (q, k, v, None, g_gamma, scale, initial_state, output_final_state)
    return chunk_simple_gla(*args, cu_seqlens=cu_seqlens)


fused_chunk_retention = chunk_retention


def fused_recurrent_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: bool,
) -> tuple[Tensor, Tensor | None]:
    """`chunk_retention` token by token.

    Args:
        q, k, v, scale, initial_state, output_final_state, cu_seqlens: as in `chunk_retention`.
        reverse, state_v_first, **kwargs: as in `fused_recurrent_simple_gla`.

    Results and errors are those of `fused_recurrent_simple_gla`.
    """
    g_gamma = retention_decay(_heads("fused_recurrent_retention", q, k), q)
    args = (q, k, v, None, g_gamma, scale, initial_state, output_final_state)
    return fused_recurrent_simple_gla(*args, reverse, state_v_first, cu_seqlens, **kwargs)


def chunk_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Lightning attention (Qin et al., arXiv 2401.04658): `chunk_simple_gla` with its decays.

    Head h decays by `exp(-8 h / H * (1 - layer_idx / num_layers))` per token.

    Args:
        q, k, v, scale, initial_state, output_final_state, cu_seqlens: as in `chunk_simple_gla`,
            with HK = H.
        layer_idx: index of the layer, from 0.
        num_layers: number of layers of the model.

    Results and errors are those of `chunk_simple_gla`; also raises those of `lightning_decay`.
    """
    H = _heads("chunk_lightning_attn", q, k)
    g_gamma = lightning_decay(H, layer_idx, num_layers, q)
    args = (q, k, v, None, g_gamma, scale, initial_state, output_final_state)
    return chunk_simple_gla(*args, cu_seqlens=cu_seqlens)


def fused_recurrent_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`chunk_lightning_attn` token by token.

    Args:
        q, k, v, layer_idx, num_layers, scale, initial_state, output_final_state, cu_seqlens: as in
            `chunk_lightning_attn`.
        reverse: as in `fused_recurrent_simple_gla`.

    Results and errors are those of `chunk_lightning_attn`.
    """
    H = _heads("fused_recurrent_lightning_attn", q, k)
    g_gamma = lightning_decay(H, layer_idx, num_layers, q)
    args = (q, k, v, None, g_gamma, scale, initial_state, output_final_state)
    return fused_recurrent_simple_gla(*args, reverse, cu_seqlens=cu_seqlens)


def retention_decay(H: int, like: Tensor) -> Tensor:
    """RetNet's `g_gamma`: `log(1 - 2 ** (-5 - h))` for head h.

    Args:
        H: number of heads.
        like: a tensor that gives the device. If it is float64, so is the result, otherwise float32.

    Returns:
        `[H]`.
    """
    return torch.log1p(-torch.exp2(-5.0 - _numbers_of_heads(H, like)))


def lightning_decay(H: int, layer_idx: int, num_layers: int, like: Tensor) -> Tensor:
    """Lightning attention's `g_gamma`: `-8 h / H * (1 - layer_idx / num_layers)` for head h.

    Args:
        H, like: as in `retention_decay`.
        layer_idx, num_layers: as in `chunk_lightning_attn`.

    Returns:
        `[H]`.

    Raises:
        ValueError: layer_idx below 0, or not below num_layers.
    """
    if not 0 <= layer_idx < num_layers:
        raise ValueError(
            f"lightning_decay: expected layer_idx to be from 0 to {num_layers - 1}, of "
            f"{num_layers} layers, got {layer_idx}"
        )
    return -(8 / max(H, 1) * (1 - layer_idx / num_layers)) * _numbers_of_heads(H, like)


def _numbers_of_heads(H: int, like: Tensor) -> Tensor:
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return torch.arange(H, device=like.device, dtype=dtype)


def _heads(op: str, q: Tensor, k: Tensor) -> int:
    """The number of q's heads, which k must have too; 0 if q does not have 4 dimensions, which the
    operator rejects later.
    """
    check_tensors(op, "q k", q, k)
    if q.ndim == 4 and k.ndim == 4 and k.shape[2] != q.shape[2]:
        raise ValueError(
            f"{op}: expected k and v of as many heads as q, {q.shape[2]}, each with its own decay, "
            f"got {k.shape[2]}"
        )
    return q.shape[2] if q.ndim == 4 else 0


def _gate_of_heads(
    op: str, q: Tensor, k: Tensor, g: Tensor | None, g_gamma: Tensor | None
) -> Tensor | None:
    """The gate in the shape that the operators take, `[B, T, HK]`, from g or g_gamma."""
    check_tensors(op, "q k g g_gamma", q, k, g, g_gamma)
    if g is not None:
        if g_gamma is not None:
            raise ValueError(f"{op}: expected only one of g and g_gamma, got both")
        if g.ndim != 3:
            raise ValueError(
                f"{op}: expected g to have 3 dimensions [B, T, HK], got {g.ndim} with shape "
                f"{list(g.shape)}; chunk_gla takes a gate of every key channel"
            )
        return g
    if g_gamma is None:
        return None
    if g_gamma.ndim != 1 or (k.ndim == 4 and g_gamma.shape[0] != k.shape[2]):
        raise ValueError(
            f"{op}: expected g_gamma to have shape [HK] = {list(k.shape[2:3])}, got "
            f"{list(g_gamma.shape)}"
        )
    if q.dtype == torch.float64:
        g_gamma = g_gamma.double()
    if type(g_gamma) is not type(k) and (sharding := on_shards(op, "k", (k,))) is not None:
        g_gamma = sharding.replicated(g_gamma, k.device_mesh)  # every rank has all of it
    return g_gamma.expand(*k.shape[:2], -1)
