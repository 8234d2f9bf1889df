"""Language models of the layers that are compared: `GLAForCausalLM`s with their blocks changed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from experiments import borrowed
from experiments.hyena import Hyena, ImplicitFilter
from experiments.layers import LinearAttention, WithoutMLP
from experiments.runs import Run
from gla_ext.layers.attention import Attention
from gla_ext.model import GLAForCausalLM
from gla_ext.model.config import GLAConfig
from gla_ext.model.weights import reset_convolutions
from gla_ext.train.presets import Settings

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
    "hyena": {},
}


def make_model(layer: str, config: GLAConfig, mlp: bool = True) -> GLAForCausalLM:
    """A language model of one of LAYERS, with initial weights.

    Args:
        layer: the layer's name.
        config: sizes; what is GLA's alone is the layers' too. max_position_embeddings is the length
            of training, which the times of Hyena are a part of.
        mlp: whether blocks have an MLP. Default: True.
    """
    model = GLAForCausalLM(config)
    for index, block in enumerate(model.model.layers):
        block.attn = _attention(layer, config, index)
        if not mlp:
            model.model.layers[index] = WithoutMLP(block)
    model.reset_parameters()
    reset_convolutions(model)
    for module in model.modules():
        if isinstance(module, ImplicitFilter):
            module.reset_parameters()
    return model


def _attention(layer: str, config: GLAConfig, index: int) -> nn.Module:
    if layer == "attention":
        return Attention(config.hidden_size, config.num_heads, layer_idx=index)
    if layer == "hyena":
        return Hyena(config.hidden_size, config.max_position_embeddings)
    return LinearAttention(
        **LAYERS[layer],
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        norm_eps=config.norm_eps,
        layer_idx=index,
    )


def has_state(layer: str) -> bool:
    """Whether a layer's model can go on from a state."""
    return layer not in ("attention", "hyena", *borrowed.NAMES)


def settings_of(run: Run, device: torch.device) -> Settings:
    """What a run tells the trainer."""
    same = ("steps", "batch_size", "seq_len", "segments", "layers", "heads", "lr", "seed")
    return Settings(
        dtype="bfloat16" if device.type == "cuda" else "float32",
        hidden_size=run.width,
        schedule="cosine",
        warmup=run.steps // 10,
        spike=0,
        **{name: getattr(run, name) for name in same},
    )
