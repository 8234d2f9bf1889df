"""The layers that the experiments compare, against their definitions."""

import pytest
import torch
from torch.nn.functional import logsigmoid

from experiments.comparisons.ablations import SCALES, VARIANTS
from experiments.layers import LinearAttention, WithoutMLP, rotate
from experiments.models import LAYERS, has_state, make_model
from gla_ext import reference
from gla_ext.cache import GLACache
from gla_ext.model import count_parameters
from gla_ext.model.config import GLAConfig

B, T, D, H = 2, 37, 24, 3
TINY = {"hidden_size": D, "num_hidden_layers": 2, "num_heads": H, "vocab_size": 31}


def make_layer(**options) -> LinearAttention:
    torch.manual_seed(0)
    layer = LinearAttention(hidden_size=D, num_heads=H, layer_idx=0, **options).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, mean=0.1, std=0.4)
    return layer.train()


def make_x(seed=1) -> torch.Tensor:
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(seed), dtype=torch.double)


def expected(layer: LinearAttention, x: torch.Tensor, g: torch.Tensor, gv=None) -> torch.Tensor:
    """The layer with log gates g `[B, T, H, K]`, in plain PyTorch."""
    q, k, v, gate = (
        projection(x).unflatten(-1, (H, -1))
        for projection in (layer.q_proj, layer.k_proj, layer.v_proj, layer.g_proj)
    )
    o = reference.recurrence(q, k, v, g, gv=gv)[0]
    o = o * (o.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * layer.norm.weight
    return layer.o_proj((o * torch.nn.functional.silu(gate)).flatten(-2))


def gate_of(layer: LinearAttention, x: torch.Tensor) -> torch.Tensor:
    K = layer.head_k_dim
    if layer.gate == "none":
        return torch.zeros(B, T, H, K, dtype=torch.double)
    if layer.gate == "constant":
        decays = [[1 - 2.0 ** (-5 - h)] * K for h in range(H)]
        return torch.tensor(decays, dtype=torch.double).log().expand(B, T, H, K)
    g = logsigmoid(layer.gk_proj[1](layer.gk_proj[0](x))) / 16
    if layer.gate == "head":
        return g.unsqueeze(-1).expand(B, T, H, K)
    return g.unflatten(-1, (H, K))


@pytest.mark.parametrize("gate", ["channel", "head", "constant", "none"])
@pytest.mark.parametrize("value_gate", [False, True])
def test_linear_attention_is_the_recurrence_with_its_gate(gate, value_gate):
    layer, x = make_layer(gate=gate, value_gate=value_gate), make_x()
    gv = None
    if value_gate:
        gv = (logsigmoid(layer.gv_proj(x)) / 16).unflatten(-1, (H, -1))
    wanted = expected(layer, x, gate_of(layer, x), gv)
    torch.testing.assert_close(layer(x)[0], wanted, rtol=1e-10, atol=1e-10)


def test_rotation_depends_on_distance_alone():
    q, k = (make_x(seed).view(B, T, 2, 12)[:, :1] for seed in (2, 3))
    products = [(rotate(q, 5 + s) * rotate(k, s)).sum(-1) for s in (0, 7, 100)]
    torch.testing.assert_close(products[1], products[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(products[2], products[0], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(products[0], (rotate(q, 6) * k).sum(-1))
    torch.testing.assert_close(rotate(q, 0), q)


def test_rotary_layers_refuse_packed_rows():
    with pytest.raises(NotImplementedError, match="expected plain rows"):
        make_layer(rotary=True)(make_x()[:1], cu_seqlens=torch.tensor([0, 10, T]))
    with pytest.raises(ValueError, match="expected gate to be one of channel, head"):
        make_layer(gate="other")


@pytest.mark.parametrize("layer", LAYERS)
def test_every_model_trains(layer):
    torch.manual_seed(0)
    model = make_model(layer, GLAConfig(**TINY, initializer_range=0.3))
    ids = torch.arange(2 * 20).remainder(31).view(2, 20)
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())
    if has_state(layer):
        parts, cache = [], GLACache()
        for part in ids.split(10, 1):
            parts.append(model(part, past_key_values=cache, use_cache=True).logits)
        torch.testing.assert_close(torch.cat(parts, 1), model(ids).logits, rtol=1e-3, atol=1e-3)


def test_without_mlp_a_block_is_its_layer():
    model = make_model("gla", GLAConfig(**TINY), mlp=False)
    assert all(isinstance(block, WithoutMLP) for block in model.model.layers)
    block, x = model.model.layers[0].double(), make_x()
    torch.testing.assert_close(block(x), x + block.attn(block.attn_norm(x))[0])


SIZES = {  # layers and heads, and how far apart their numbers of parameters may be
    "ablations": ([(layer, heads) for layer, heads, _ in VARIANTS.values()], 1.005),
    "all layers": ([(layer, 4 if has_state(layer) else 8) for layer in LAYERS], 1.02),
}


@pytest.mark.parametrize("case", SIZES.values(), ids=SIZES)
def test_what_is_compared_has_about_as_many_parameters(case):
    compared, ratio = case
    size, sizes = SCALES["full"], []
    for layer, heads in compared:
        config = GLAConfig(
            hidden_size=size.width, num_hidden_layers=size.layers, num_heads=heads, vocab_size=256
        )
        with torch.device("meta"):
            sizes.append(count_parameters(make_model(layer, config)))
    assert max(sizes) < ratio * min(sizes)
    assert 13e6 < min(sizes) < 15e6
