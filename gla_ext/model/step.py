"""A token step of a block in five kernels, instead of about fourteen.

Each kernel computes a product and the norms, gates, activations and residual sums before or after
it. The products are gla_ext's own kernels for few rows:

    norm_linear                   norm, then q, k, v, the output gate and the gate's first map
    recurrent_gla_low_rank_step_  the gate's second map, and the recurrence on the pool of states
    norm_gate_linear_residual     the heads' norm with the output gate, o_proj, residual
    norm_swiglu                   norm, gate_proj and up_proj, SwiGLU
    linear_residual               down_proj, residual

They are used if skipping the modules changes nothing, for example if there are no hooks. Otherwise
the functions here return None, and the block's modules are called one after the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gla_ext.layers._history import entry_of
from gla_ext.layers._projections import is_plain, is_plain_norm, nobody_sees
from gla_ext.layers._route import way_of_step
from gla_ext.layers.gated_linear_attention import GatedLinearAttention
from gla_ext.layers.norms import RMSNorm
from gla_ext.ops import decode
from gla_ext.ops._context import context_of
from gla_ext.ops.recurrent import recurrent_gla_low_rank_step_

# The largest batch, with one token per row. This is the kernels' limit; for larger batches, cuBLAS
# is as fast.
MOST_ROWS = 32
DEVICES = ("cuda",)
DTYPES = (torch.bfloat16, torch.float16)
_COLUMNS = 32  # columns that the kernels process at once


def takes_step(x: Tensor, residual: Tensor | None, *beside: Any) -> bool | None:
    """`way_of_step` for x `[B, 1, D]`, a token of few rows, without a gradient.

    Returns None in batch-invariant mode, which uses the same products for any number of rows, and
    under autocast, which casts the weights.
    """
    if x.device.type not in DEVICES or x.dtype not in DTYPES or x.ndim != 3:
        return None
    way = way_of_step(x.shape[1], *beside)
    if way is None or x.shape[0] > MOST_ROWS or x.shape[2] % _COLUMNS:
        return None
    if residual is not None and (residual.dtype != x.dtype or residual.shape != x.shape):
        return None
    return None if torch.is_autocast_enabled(x.device.type) else way


def step_attention(
    norm: nn.Module,
    layer: nn.Module,
    x: Tensor,
    residual: Tensor | None,
    overlaps: bool,
    past_key_values: Any | None = None,
    use_cache: bool | None = False,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """Returns `residual + x` plus the layer's output for the norm of that sum; or None.

    Used if the cache's states are written in place, as with `Decoder` and `gla_ext.serve`.

    Args:
        x, residual: `[B, 1, D]`; a residual of None is 0.
        overlaps: whether this kernel may read its weights and states before earlier kernels end.
            This is so if the kernel before it is also one of a token step, and that kernel began
            after all kernels before it had ended.
        The other arguments are those of `GatedLinearAttention.forward`.
    """
    if type(layer) is not GatedLinearAttention or layer.training:
        return None
    may_begin_early = takes_step(x, residual, attention_mask, cu_seqlens, cp_context)
    if may_begin_early is None or not (use_cache and getattr(past_key_values, "in_place", False)):
        return None
    if past_key_values.buffering:  # the recurrence's kernel here writes states
        return None
    entry = entry_of(past_key_values, layer.layer_idx)
    state = None if entry is None else entry["recurrent_state"]
    if state is None or not (is_plain_norm(norm, RMSNorm) and _is_plain_layer(layer, x.dtype)):
        return None
    conv_state = entry["conv_state"] if layer.use_short_conv else None
    x = x if residual is None else residual + x
    down, up = layer.gk_proj
    linears = (layer.q_proj, layer.k_proj, layer.v_proj, layer.g_proj, down)
    weights = [linear.weight for linear in linears]
    q, k, v, gate, h = decode.norm_linear(x, norm.weight, norm.eps, weights, overlaps)
    if layer.use_short_conv:
        convolutions = (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d)
        args = (convolutions, (q, k, v), conv_state, True, None)
        (q, k, v), conv_state = context_of(None).convolve(*args)
    q, k, v = layer._heads_of(q, k, v)
    clamp_min = None if layer.clamp_min is None else float(layer.clamp_min)
    normalizer = float(layer.gate_logit_normalizer)
    slots = getattr(past_key_values, "slots", None)
    gate_options = (up.weight, up.bias, normalizer, clamp_min)
    options = (state, slots, None, True, may_begin_early)
    o = recurrent_gla_low_rank_step_(q, k, v, h, *gate_options, *options)
    past_key_values.update(
        layer_idx=layer.layer_idx, recurrent_state=state, conv_state=conv_state, offset=1
    )
    heads = layer.norm
    return decode.norm_gate_linear_residual(
        o, heads.weight, heads.eps, gate, layer.o_proj.weight, x, True
    )


def step_mlp(norm: nn.Module, mlp: nn.Module, x: Tensor, residual: Tensor | None) -> Tensor | None:
    """Returns `residual + x` plus the output of a SwiGLU MLP for the norm of that sum; or None. x
    and residual are `[B, 1, D]`; a residual of None is 0.
    """
    linears = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    if mlp.training or takes_step(x, residual) is None:
        return None
    if not (is_plain_norm(norm, RMSNorm) and nobody_sees(mlp) and _are_plain(linears, x.dtype)):
        return None
    overlaps = residual is None  # otherwise the kernel before is of another kind
    x = x if residual is None else residual + x
    y = decode.norm_swiglu(x, norm.weight, norm.eps, linears[0].weight, linears[1].weight, overlaps)
    return decode.linear_residual(y, linears[2].weight, x, True)


def _is_plain_layer(layer: GatedLinearAttention, dtype: torch.dtype) -> bool:
    """Whether the kernels compute the same as the layer, and its modules need not be called."""
    if not (layer.fuse_norm_and_gate and nobody_sees(layer) and layer._gate_is_two_maps()):
        return False
    norm, (down, up) = layer.norm, layer.gk_proj
    if not (is_plain_norm(norm) and norm.activation in ("swish", "silu")):
        return False
    linears = (layer.q_proj, layer.k_proj, layer.v_proj, layer.g_proj, down, layer.o_proj)
    if layer.head_v_dim % _COLUMNS or not _are_plain(linears, dtype):
        return False
    return is_plain(up, biased=True) and up.weight.dtype == dtype


def _are_plain(linears: tuple[nn.Module, ...], dtype: torch.dtype) -> bool:
    return all(is_plain(linear) and linear.weight.dtype == dtype for linear in linears)
