"""FLA's `GatedLinearAttention` on one rank's tokens: what `accelerate_fla` adds to its forward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from gla_ext.layers.short_convolution import causal_convolution
from gla_ext.ops._context import NO_MASK, context_of, refuse_context
from gla_ext.ops.chunk import chunk_gla


def layer_forward(original: Callable) -> Callable:
    """FLA's forward, which knows no context, but where one is given."""

    def forward(
        self: nn.Module,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any | None = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        **kwargs: Any,
    ) -> tuple[Tensor, None, Any | None]:
        if kwargs.get("cp_context") is None:
            args = (hidden_states, attention_mask, past_key_values, use_cache, output_attentions)
            return original(self, *args, **kwargs)
        if attention_mask is not None:
            refuse_context(kwargs["cp_context"], f"GatedLinearAttention: {NO_MASK}")
        return _forward(self, hidden_states, past_key_values, bool(use_cache), kwargs)

    return forward


def _forward(
    layer: nn.Module,
    x: Tensor,
    past_key_values: Any | None,
    use_cache: bool,
    kwargs: dict[str, Any],
) -> tuple[Tensor, None, Any | None]:
    cp_context, cu_seqlens = kwargs["cp_context"], kwargs.get("cu_seqlens")
    entry = None
    if past_key_values is not None and len(past_key_values) > layer.layer_idx:
        entry = past_key_values[layer.layer_idx]
    q, k, v = layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)
    conv_state = None
    if layer.use_short_conv:
        convolutions = (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d)
        (q, k, v), conv_state = context_of(cp_context).convolve(
            [_Convolution(conv) for conv in convolutions],
            (q, k, v),
            None if entry is None else entry["conv_state"],
            use_cache,
            cu_seqlens,
        )
    gk = F.logsigmoid(layer.gk_proj(x)) / layer.gate_logit_normalizer
    if layer.clamp_min is not None:
        gk = gk.clamp_min(layer.clamp_min)
    K, V = layer.head_k_dim, layer.head_v_dim
    q, k, v, gk = (t.unflatten(-1, (-1, n)) for t, n in ((q, K), (k, K), (v, V), (gk, K)))
    if layer.feature_map_fn is not None:
        q, k = layer.feature_map_fn(q), layer.feature_map_fn(k)
    o, state = chunk_gla(
        q,
        k,
        v,
        gk,
        initial_state=None if entry is None else entry["recurrent_state"],
        output_final_state=use_cache,
        state_v_first=True,
        cu_seqlens=cu_seqlens,
        cp_context=cp_context,
    )
    if past_key_values is not None:
        past_key_values.update(
            layer_idx=layer.layer_idx,
            recurrent_state=state,
            conv_state=conv_state,
            offset=x.shape[1],
        )
    return layer.o_proj(_norm_and_gate(layer, o, x)), None, past_key_values


def _norm_and_gate(layer: nn.Module, o: Tensor, x: Tensor) -> Tensor:
    if not layer.use_output_gate:
        return layer.g_norm(o).flatten(-2)
    gate = layer.g_proj(x)
    if layer.fuse_norm_and_gate:
        return layer.g_norm_swish_gate(o, gate.unflatten(-1, (-1, layer.head_v_dim))).flatten(-2)
    return layer.g_norm(o).flatten(-2) * layer.gate_fn(gate)


class _Convolution:
    """FLA's module as `convolve` calls one: by gla_ext's operator, for its cache's gradient."""

    def __init__(self, conv: nn.Module) -> None:
        if conv.activation is None:
            raise NotImplementedError(
                "ShortConvolution: expected the activation 'silu' with cp_context, got None"
            )
        self.kernel_size = conv.kernel_size
        self._call = partial(causal_convolution, conv)

    def __call__(self, *args: Any) -> tuple[Tensor, Tensor | None]:
        return self._call(*args)
