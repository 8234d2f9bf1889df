"""Layers whose projections are sharded by columns and o_proj by rows, as tensor parallelism does:
each rank computes its heads, and the outputs of all ranks sum up to that of the whole layer.
"""

import copy

import pytest
import torch
from common import assert_close
from models import make_layer, make_model, make_x
from torch import nn

from gla_ext import MultiheadGLA
from gla_ext.cache import GLACache, StaticGLACache
from gla_ext.model import fuse_projections

RANKS = 2
ROWS = ("q_proj", "k_proj", "v_proj", "g_proj", "gk_proj.1", "q_conv1d", "k_conv1d", "v_conv1d")
OPTIONS = {
    "heads": {},
    "shared kv heads": {"num_kv_heads": 2},
    "short conv": {"use_short_conv": True, "conv_bias": True, "num_kv_heads": 2},
    "unfused norm": {"fuse_norm": False},
    "no output gate": {"use_output_gate": False},
    "recurrent": {"mode": "fused_recurrent"},
}
each = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def shard(module, rank, rows=ROWS, columns=("o_proj",)):
    """A rank's module, of its parts of the weights."""
    module = copy.deepcopy(module)
    for dim, names in ((0, rows), (1, columns)):
        for name, child in module.named_modules():
            if name in names:
                for key, whole in list(child.named_parameters()):
                    part = whole.detach().chunk(RANKS, dim)[rank].clone()
                    setattr(child, key, nn.Parameter(part))
    return module


def make(**options):
    layer = make_layer(hidden_size=32, num_heads=4, layer_idx=0, **options)
    return layer, [shard(layer, rank) for rank in range(RANKS)]


def inputs(T=70):
    return torch.cat([make_x(T=T), make_x(T=T, seed=2)], -1)[..., :32].contiguous()


def total(ranks, call):
    return sum(call(rank) for rank in ranks)


@each
@pytest.mark.parametrize("batch_projections", [True, False])
def test_outputs_and_gradients(options, batch_projections):
    layer, ranks = make(**options)
    for module in (layer, *ranks):
        module.batch_projections = batch_projections
    x = inputs().requires_grad_()
    expected, found = layer(x)[0], total(ranks, lambda rank: rank(x)[0])
    assert_close(found, expected, 1e-12)
    upstream = torch.randn_like(expected)
    (dx,), (wanted,) = (
        torch.autograd.grad(y, x, upstream, retain_graph=True) for y in (found, expected)
    )
    assert_close(dx, wanted, 1e-12)
    found.backward(upstream)
    expected.backward(upstream)
    parts = [rank.q_proj.weight.grad for rank in ranks]
    assert_close(torch.cat(parts), layer.q_proj.weight.grad, 1e-12)
    assert_close(
        torch.cat([rank.o_proj.weight.grad for rank in ranks], 1), layer.o_proj.weight.grad, 1e-12
    )


@each
def test_masked_and_packed(options):
    layer, ranks = make(**options)
    x, mask = inputs(), torch.ones(2, 70, dtype=torch.bool)
    mask[1, 40:] = False
    expected = layer(x, mask)[0]
    assert_close(total(ranks, lambda rank: rank(x, mask)[0]), expected, 1e-12)
    packed, cu_seqlens = x[:1], torch.tensor([0, 5, 70])
    expected = layer(packed, cu_seqlens=cu_seqlens)[0]
    found = total(ranks, lambda rank: rank(packed, cu_seqlens=cu_seqlens)[0])
    assert_close(found, expected, 1e-12)


@each
@pytest.mark.parametrize("static", [False, True])
@torch.no_grad()
def test_decoding_from_caches_of_local_heads(options, static):
    layer, ranks = make(**options)
    modules, x = [fuse_projections(m.eval()) for m in (layer, *ranks)], inputs(9)
    caches = [StaticGLACache(2) if static else GLACache() for _ in modules]
    for start, end in ((0, 5), (5, 6), (6, 7), (7, 9)):
        segment = x[:, start:end]
        outputs = [
            module(segment, past_key_values=cache, use_cache=True)[0]
            for module, cache in zip(modules, caches, strict=True)
        ]
        assert_close(sum(outputs[1:]), outputs[0], 1e-12)
    states = [cache[0]["recurrent_state"] for cache in caches]
    assert_close(torch.cat(states[1:], 1), states[0], 1e-12)


def test_multihead():
    module = MultiheadGLA(32, 4, batch_first=True, dtype=torch.float64)
    rows = [f"attention.{name}" for name in ROWS]
    ranks = [shard(module, rank, rows, ("attention.o_proj",)) for rank in range(RANKS)]
    nn.init.normal_(module.bias)
    x = inputs()
    for rank in ranks:
        rank.bias = None  # which comes after the sum
    found = total(ranks, lambda rank: rank(x, x, x, is_causal=True)[0])
    assert_close(found + module.bias, module(x, x, x, is_causal=True)[0], 1e-12)


def test_mlp():
    mlp, x = make_model(torch.float64).model.layers[0].mlp, torch.randn(2, 7, 16).double()
    ranks = [shard(mlp, rank, ("gate_proj", "up_proj"), ("down_proj",)) for rank in range(RANKS)]
    assert_close(total(ranks, lambda rank: rank(x)), mlp(x), 1e-12)


def test_compiles_whole():
    _, (rank, _) = make(num_kv_heads=2, use_short_conv=True)
    compiled = torch.compile(rank, fullgraph=True, backend="eager")
    assert_close(compiled(inputs())[0], rank(inputs())[0], 1e-12)


def test_parts_of_heads_are_refused():
    layer, _ = make()
    layer.q_proj.weight = nn.Parameter(layer.q_proj.weight[:6].detach())
    with pytest.raises(
        ValueError, match="to be a multiple of the head's, 4, got 6: shards hold wh"
    ):
        layer(inputs())
