"""Small seeded layers and language models, their inputs, and the layer in plain torch."""

import torch
from torch.nn.functional import logsigmoid

from gla_ext import GatedLinearAttention, reference
from gla_ext.config import GLAConfig
from gla_ext.model import GLAForCausalLM

SMALL = {"hidden_size": 24, "num_heads": 3, "gate_low_rank_dim": 4}


def make_layer(dtype=torch.float64, seed=0, **options) -> GatedLinearAttention:
    torch.manual_seed(seed)
    layer = GatedLinearAttention(**(SMALL | options))
    for parameter in layer.parameters():  # norm weights and gate biases that do something
        torch.nn.init.normal_(parameter, mean=0.2, std=0.5)
    return layer.to(dtype)


def make_x(B=2, T=70, dtype=torch.float64, seed=1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, T, 24, generator=generator, dtype=torch.float64).to(dtype)


def composed(layer, x, state=None):
    """The layer in plain torch on the recurrence; state [N, H, K, V]."""
    w = {name: parameter.to(x.dtype) for name, parameter in layer.named_parameters()}

    def heads(y):
        return y.unflatten(-1, (layer.num_heads, y.shape[-1] // layer.num_heads))

    q, k, v = (heads(x @ w[f"{name}_proj.weight"].T) for name in "qkv")
    low_rank = x @ w["gk_proj.0.weight"].T
    gk = logsigmoid(low_rank @ w["gk_proj.1.weight"].T + w["gk_proj.1.bias"])
    gk = heads(gk) / layer.gate_logit_normalizer
    if layer.clamp_min is not None:
        gk = torch.where(gk < layer.clamp_min, layer.clamp_min, gk)
    o, state = reference.recurrence(q, k, v, gk, initial_state=state)
    norm = layer.g_norm_swish_gate if layer.fuse_norm_and_gate else layer.g_norm
    o = o / (o.pow(2).sum(-1, keepdim=True) / layer.head_v_dim + norm.eps).sqrt()
    if norm.weight is not None:
        o = o * norm.weight.to(x.dtype)
    if layer.use_output_gate:
        gate = heads(x @ w["g_proj.weight"].T)
        o = o * gate / (1 + (-gate).exp())
    return o.flatten(2) @ w["o_proj.weight"].T, state


TINY = {"hidden_size": 16, "num_heads": 2, "num_hidden_layers": 2, "vocab_size": 31}


def make_model(dtype=torch.float32, seed=0, **options) -> GLAForCausalLM:
    torch.manual_seed(seed)
    options = TINY | {"initializer_range": 0.3, "intermediate_size": 24} | options
    return GLAForCausalLM(GLAConfig(**options)).to(dtype).eval()


def make_ids(B=2, T=70, seed=1) -> torch.Tensor:
    return torch.randint(31, (B, T), generator=torch.Generator().manual_seed(seed))
