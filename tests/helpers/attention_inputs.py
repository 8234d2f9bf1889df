"""Softmax attention by its definition in fp64, and small hybrid models."""

import torch
from models import make_model

from gla_ext.layers.attention import Attention

HYBRIDS = {  # of three blocks of width 16
    "full, kv heads 1, bias": {"layers": [1], "num_heads": 4, "num_kv_heads": 1, "qkv_bias": True},
    "window 5": {"layers": [0, 2], "num_heads": 2, "window_size": 5},
    "both": [
        {"layers": [0], "num_heads": 2, "window_size": 20},
        {"layers": [1], "num_heads": 4, "rope_theta": 100.0},
    ],
    "attention alone": {"layers": [0, 1, 2], "num_heads": 2},
}


def make_attention(dtype=torch.float64, seed=0, **options) -> Attention:
    torch.manual_seed(seed)
    layer = Attention(**{"hidden_size": 24, "num_heads": 3} | options)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return layer.to(dtype)


def make_hybrid(attn="both", **options):
    return make_model(num_hidden_layers=3, attn=HYBRIDS[attn], **options)


def rotated(x, theta):
    """x [T, H, D]; the pair of channels (i, D / 2 + i) times exp(1j * t * theta^(-2 i / D))."""
    T, _, D = x.shape
    pairs = torch.complex(x[..., : D // 2], x[..., D // 2 :])
    frequencies = theta ** (-2 * torch.arange(D // 2, dtype=torch.float64) / D)
    angles = torch.arange(T, dtype=torch.float64)[:, None, None] * frequencies
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1)


def composed_attention(layer, x):
    """The layer on one sequence [T, hidden_size] in fp64, query by query."""
    w = {name: parameter.double() for name, parameter in layer.named_parameters()}
    x, D, T = x.double(), layer.head_dim, len(x)

    def heads(name, count):
        y = x @ w[f"{name}_proj.weight"].T + w.get(f"{name}_proj.bias", 0)
        return y.view(T, count, D)

    q = rotated(heads("q", layer.num_heads), layer.rope_theta)
    k = rotated(heads("k", layer.num_kv_heads), layer.rope_theta)
    v = heads("v", layer.num_kv_heads)
    rows = []
    for t in range(T):
        first = 0 if layer.window_size is None else max(0, t + 1 - layer.window_size)
        row = []
        for h in range(layer.num_heads):
            own = h // layer.num_kv_groups
            scores = k[first : t + 1, own] @ q[t, h] / D**0.5
            row.append(scores.softmax(0) @ v[first : t + 1, own])
        rows.append(torch.cat(row))
    return torch.stack(rows) @ w["o_proj.weight"].T if rows else x
