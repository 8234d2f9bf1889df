"""FLA's `GatedLinearAttention` with a cp_context, which `accelerate_fla` adds to its forward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from gla_ext.layers.gated_linear_attention import GatedLinearAttention
from gla_ext.layers.short_convolution import causal_convolution
from gla_ext.ops._context import NO_MASK, refuse_context


def layer_forward(original: Callable) -> Callable:
    """FLA's forward, which has no cp_context, or gla_ext's if a cp_context is given."""

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
    layer: nn.Module, x: Tensor, cache: Any | None, use_cache: bool, kwargs: dict[str, Any]
) -> tuple[Tensor, None, Any | None]:
    """gla_ext's forward with FLA's modules, which have the same names."""
    ours = object.__new__(GatedLinearAttention)
    vars(ours).update(vars(layer), mode="chunk", batch_projections=False)
    if layer.use_short_conv:
        names = ("q_conv1d", "k_conv1d", "v_conv1d")
        vars(ours).update({name: _Convolution(getattr(layer, name)) for name in names})
    own = {name: kwargs.get(name) for name in ("cu_seqlens", "cp_context")}
    return ours.forward(x, past_key_values=cache, use_cache=use_cache, **own)


class _Convolution:
    """FLA's convolution with gla_ext's operator, as the cache needs a gradient."""

    def __init__(self, conv: nn.Module) -> None:
        if conv.activation is None:
            raise NotImplementedError(
                "ShortConvolution: expected the activation 'silu' with cp_context, got None"
            )
        self.kernel_size = conv.kernel_size
        self._call = partial(causal_convolution, conv)

    def __call__(self, *args: Any) -> tuple[Tensor, Tensor | None]:
        return self._call(*args)
