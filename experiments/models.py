"""Language models of the layers that are compared: `GLAForCausalLM`s with their blocks changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from experiments.layers import LinearAttention, NoMLP, SoftmaxAttention
from gla_ext.model import GLAForCausalLM
from gla_ext.model.config import GLAConfig
from gla_ext.model.weights import reset_convolutions

# The name of a layer in runs and pages: what makes it.
LAYERS: dict[str, dict[str, Any]] = {
    "gla": {},
    "gla, convolution": {"use_short_conv": True},
    "gla, slower gates": {"gate_logit_normalizer": 64},
    "head gate": {"gate": "head"},
    "constant": {"gate": "constant"},
    "retnet": {"gate": "constant", "rotary": True},
    "no gate": {"gate": "none"},
    "gla, values too": {"value_gate": True},
    "values alone": {"gate": "none", "value_gate": True},
    "attention": {},
}


def make_model(layer: str, config: GLAConfig, mlp: bool = True) -> GLAForCausalLM:
    """A language model of one of LAYERS, with initial weights.

    Args:
        layer: the layer's name.
        config: sizes; what is GLA's alone is the layers' too.
        mlp: whether blocks have an MLP. Default: True.
    """
    model = GLAForCausalLM(config)
    for index, block in enumerate(model.model.layers):
        block.attn = _maker(layer)(layer, config, index)
        if not mlp:
            block.mlp, block.mlp_norm = NoMLP(), nn.Identity()
            block.fuse_norm = False  # whose sums want an MLP's output of full size
    model.reset_parameters()
    reset_convolutions(model)
    return model


def has_state(layer: str) -> bool:
    """Whether a layer's model can go on from a state."""
    return layer != "attention"


def _maker(layer: str) -> Callable[[str, GLAConfig, int], nn.Module]:
    return _attention if layer == "attention" else _linear


def _linear(layer: str, config: GLAConfig, index: int) -> nn.Module:
    return LinearAttention(
        **LAYERS[layer],
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        norm_eps=config.norm_eps,
        layer_idx=index,
    )


def _attention(layer: str, config: GLAConfig, index: int) -> nn.Module:
    return SoftmaxAttention(config.hidden_size, config.num_heads)
