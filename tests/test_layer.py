"""The layer against a composition in fp64 plain torch, its masks, packing, cache, names, errors."""

import itertools

import pytest
import torch
from common import assert_close, run_python
from torch.nn.functional import logsigmoid
from torch.utils.checkpoint import checkpoint

from gla_ext import GatedLinearAttention, reference
from gla_ext.cache import GLACache
from gla_ext.layers import MODES
from gla_ext.norms import GatedRMSNorm, RMSNorm

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


OPTIONS = {
    "default": {},
    "unfused norm": {"fuse_norm": False},
    "no output gate": {"use_output_gate": False},
    "no norm weight": {"elementwise_affine": False},
    "no norm weight, unfused": {"elementwise_affine": False, "fuse_norm": False},
    "clamp_min": {"clamp_min": -0.05},
    "gate_logit_normalizer": {"gate_logit_normalizer": 1},
    "norm_eps": {"norm_eps": 0.1},
    "expand": {"expand_k": 1.0, "expand_v": 2.0},
    "one head": {"num_heads": 1},
    "rank": {"gate_low_rank_dim": 7},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_equals_the_composition_with_gradients(options):
    layer, x = make_layer(**options), make_x().requires_grad_()
    leaves = [x, *layer.parameters()]
    generator = torch.Generator().manual_seed(2)
    actual, nothing, cache = layer(x)
    assert nothing is None
    assert cache is None
    expected, _ = composed(layer, x)
    upstream = torch.randn(actual.shape, generator=generator, dtype=actual.dtype)
    assert_close(actual, expected, 1e-12)
    gradients = [torch.autograd.grad(y, leaves, upstream) for y in (actual, expected)]
    names = ["x", *dict(layer.named_parameters())]
    for name, got, wanted in zip(names, *gradients, strict=True):
        assert_close(got, wanted, 1e-10, name=name)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("T", [0, 1, 64, 65])
def test_every_mode_at_any_length(mode, T):
    layer, x = make_layer(mode=mode), make_x(T=T)
    assert_close(layer(x)[0], composed(layer, x)[0], 1e-12)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("fuse_norm", [True, False])
def test_lower_precision_stays_close(dtype, bound, fuse_norm):
    layer = make_layer(dtype, fuse_norm=fuse_norm)
    x = make_x(dtype=dtype)
    y = layer(x)[0]
    assert y.dtype == dtype
    assert_close(y, composed(layer, x.double())[0], bound)


def test_autocast_keeps_close():
    layer, x = make_layer(torch.float32), make_x(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)[0]
    assert y.dtype == torch.bfloat16
    assert_close(y, composed(layer, x.double())[0], 0.03)


MASKS = {
    "left": [[0, 0, 0, 1, 1], [0, 1, 1, 1, 1]],
    "right": [[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]],
    "none": [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1]],
    "all-padded row": [[0, 0, 0, 0, 0], [1, 1, 1, 1, 1]],
    "holes": [[1, 0, 1, 0, 1], [0, 1, 1, 0, 1]],
    "nothing": [[0, 0, 0, 0, 0], [0, 0, 0, 0, 0]],
}


def stretched(rows, to=70, dtype=torch.long):
    return torch.tensor(rows, dtype=dtype).repeat_interleave(to // 5, 1)


@pytest.mark.parametrize("rows", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("dtype", [torch.long, torch.bool])
def test_mask_skips_padding(rows, dtype):
    layer, x, mask = make_layer(layer_idx=0), make_x(), stretched(rows, dtype=dtype)
    valid = mask.bool()
    y, _, cache = layer(x, attention_mask=mask, past_key_values=GLACache(), use_cache=True)
    assert (y[~valid] == 0).all()
    for b in range(2):
        expected, state = composed(layer, x[b : b + 1, valid[b]])
        assert_close(y[b : b + 1, valid[b]], expected, 1e-12)
        assert_close(cache[0]["recurrent_state"][b : b + 1], state.mT, 1e-12)
    assert cache.get_seq_length() == 70


def test_mask_gradients_ignore_nan_in_padding():
    layer, mask = make_layer(), stretched(MASKS["left"])
    valid = mask.bool()
    clean = make_x()
    dirty = clean.masked_fill(~valid.unsqueeze(-1), torch.nan)
    results = []
    for x in (clean, dirty):
        x = x.detach().requires_grad_()
        y = layer(x, attention_mask=mask)[0]
        results.append((y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])))
    for got, wanted in zip(*results, strict=True):
        assert wanted.isfinite().all()
        assert torch.equal(got, wanted)
    assert (results[1][1][~valid] == 0).all()


def test_mask_counts_its_last_columns():
    layer, x = make_layer(), make_x(T=30)
    mask = torch.cat([torch.zeros(2, 9), stretched(MASKS["left"], 30)], 1)
    assert torch.equal(layer(x, mask)[0], layer(x, mask[:, 9:])[0])


def test_mask_with_cached_states():
    layer, x = make_layer(layer_idx=0), make_x()
    cache = GLACache()
    layer(x[:, :30], past_key_values=cache, use_cache=True)
    mask = torch.cat([torch.ones(2, 30), stretched(MASKS["all-padded row"], 40)], 1)
    before = cache[0]["recurrent_state"].clone()
    y = layer(x[:, 30:], mask, past_key_values=cache, use_cache=True)[0]
    assert (y[0] == 0).all()
    assert torch.equal(cache[0]["recurrent_state"][0], before[0])
    assert_close(y[1:], composed(layer, x)[0][1:, 30:], 1e-12)


@pytest.mark.parametrize("masked", [False, True])
def test_empty_batch(masked):
    mask = torch.ones(0, 7) if masked else None
    assert make_layer()(make_x(B=0, T=7), mask)[0].shape == (0, 7, 24)


def test_cu_seqlens_separates_sequences_and_beats_the_mask():
    layer, x = make_layer(), make_x(B=1)
    offsets = [0, 5, 5, 69]
    y = layer(x, cu_seqlens=torch.tensor(offsets))[0]
    for start, end in itertools.pairwise(offsets):
        assert_close(y[:, start:end], composed(layer, x[:, start:end])[0], 1e-12)
    assert (y[:, 69:] == 0).all()
    zero_mask = torch.zeros(1, 70)
    assert torch.equal(layer(x, zero_mask, cu_seqlens=torch.tensor(offsets))[0], y)


@pytest.mark.parametrize("cuts", [(0, 70), (0, 40, 70), (0, 1, 65, 66, 70), (*range(12), 70)])
def test_cached_segments_equal_the_whole(cuts):
    layer, x = make_layer(layer_idx=1), make_x()
    cache, pieces = GLACache(), []
    for start, end in itertools.pairwise(cuts):
        y, _, same = layer(x[:, start:end], past_key_values=cache, use_cache=True)
        assert same is cache
        pieces.append(y)
    expected, state = composed(layer, x)
    assert_close(torch.cat(pieces, 1), expected, 1e-12)
    assert_close(cache[1]["recurrent_state"], state.mT, 1e-12)  # v-first
    assert (len(cache), cache.get_seq_length(1), cache.get_seq_length(0)) == (2, 70, 0)


def test_cached_state_is_fp32_below_fp64():
    layer = make_layer(torch.bfloat16, layer_idx=0)
    cache = layer(make_x(dtype=torch.bfloat16), None, GLACache(), use_cache=True)[2]
    assert cache[0]["recurrent_state"].dtype == torch.float32


def test_without_use_cache_the_state_stays():
    layer, x = make_layer(layer_idx=0), make_x()
    cache = GLACache()
    layer(x, past_key_values=cache, use_cache=True)
    before = cache[0]["recurrent_state"].clone()
    layer(x, past_key_values=cache)
    assert torch.equal(cache[0]["recurrent_state"], before)


class OtherCache(list):
    """A cache that has what the layer asks for and nothing more."""

    def update(self, *, layer_idx, recurrent_state, conv_state, offset):
        assert conv_state is None
        self[layer_idx:] = [{"recurrent_state": recurrent_state, "conv_state": None}]
        self.offset = offset


def test_takes_any_cache_of_its_kind():
    layer, x, cache = make_layer(layer_idx=0), make_x(), OtherCache()
    layer(x[:, :20], past_key_values=cache, use_cache=True)
    y = layer(x[:, 20:], past_key_values=cache, use_cache=True)[0]
    assert_close(y, composed(layer, x)[0][:, 20:], 1e-12)
    assert (len(cache), cache.offset) == (1, 50)


def test_cache_selects_repeats_detaches_and_resets():
    cache = GLACache()
    state = torch.arange(3.0, requires_grad=True).view(3, 1)
    cache.update(0, state, conv_state=(state * 2,), offset=4)
    cache.batch_select_indices(torch.tensor([2, 0]))
    assert cache[0]["recurrent_state"].flatten().tolist() == [2, 0]
    cache.batch_repeat_interleave(2)
    assert cache[0]["conv_state"][0].flatten().tolist() == [4, 4, 0, 0]
    cache.reorder_cache(torch.tensor([3, 1]))
    assert cache[0]["recurrent_state"].flatten().tolist() == [0, 2]
    assert cache[0]["recurrent_state"].requires_grad
    cache.detach()
    assert not cache[0]["recurrent_state"].requires_grad
    assert [*cache] == [cache[0]]
    assert cache.get_seq_length() == 4
    cache.reset()
    assert (len(cache), cache.get_seq_length()) == (0, 0)


PROJECTIONS = {"q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"}
GATE = {"gk_proj.0.weight", "gk_proj.1.weight", "gk_proj.1.bias"}


@pytest.mark.parametrize(
    ("fuse_norm", "use_output_gate", "norm"),
    [
        (True, True, "g_norm_swish_gate"),
        (False, True, "g_norm"),
        (True, False, "g_norm"),
        (False, False, "g_norm"),
    ],
)
@pytest.mark.parametrize("affine", [True, False])
def test_state_dict_keys(fuse_norm, use_output_gate, norm, affine):
    layer = GatedLinearAttention(
        fuse_norm=fuse_norm, use_output_gate=use_output_gate, elementwise_affine=affine, **SMALL
    )
    expected = PROJECTIONS | GATE
    expected |= {"g_proj.weight"} if use_output_gate else set()
    expected |= {f"{norm}.weight"} if affine else set()
    assert layer.state_dict().keys() == expected


def test_state_dict_shapes_of_the_default_layer():
    shapes = {n: tuple(x.shape) for n, x in GatedLinearAttention().state_dict().items()}
    assert shapes == {
        "q_proj.weight": (512, 1024),
        "k_proj.weight": (512, 1024),
        "v_proj.weight": (1024, 1024),
        "g_proj.weight": (1024, 1024),
        "gk_proj.0.weight": (16, 1024),
        "gk_proj.1.weight": (512, 16),
        "gk_proj.1.bias": (512,),
        "o_proj.weight": (1024, 1024),
        "g_norm_swish_gate.weight": (256,),
    }


@pytest.mark.parametrize("norm", [RMSNorm(10), GatedRMSNorm(10)])
def test_norms_round_once(norm):
    torch.nn.init.normal_(norm.weight)
    x, gate = torch.randn(2, 7, 10).bfloat16()
    gates = [gate] if isinstance(norm, GatedRMSNorm) else []
    exact = norm.double()(x.double(), *(gate.double() for gate in gates))
    assert torch.equal(norm.float()(x, *gates), exact.to(torch.bfloat16))


NOT_YET = {
    "num_kv_heads": 1,
    "feature_map": "relu",
    "use_short_conv": True,
    "gate_fn": "sigmoid",
}


@pytest.mark.parametrize(("name", "value"), NOT_YET.items())
def test_options_that_are_not_there_yet(name, value):
    with pytest.raises(NotImplementedError, match=name):
        GatedLinearAttention(**(SMALL | {name: value}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "chunky"}, "expected mode to be one of chunk, .*, got 'chunky'"),
        ({"num_heads": 0}, "expected num_heads to be at least 1, got 0"),
        ({"num_kv_heads": 2}, "expected num_kv_heads to divide num_heads = 3, got 2"),
        ({"hidden_size": 25}, r"hidden_size \* expand_k .* num_heads = 3, got 25 \* 0.5 = 12.5"),
        ({"num_heads": 5}, r"hidden_size \* expand_k .* num_heads = 5, got 24 \* 0.5 = 12"),
        ({"expand_v": 0.3}, r"hidden_size \* expand_v .* got 24 \* 0.3 = 7.2"),
        ({"expand_v": 0.0}, r"hidden_size \* expand_v .* got 24 \* 0.0 = 0"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        GatedLinearAttention(**(SMALL | options))


@pytest.mark.parametrize(
    ("shape", "mask", "message"),
    [
        ((2, 24), None, r"expected hidden_states to have shape \[B, T, hidden_size = 24\], got"),
        ((2, 7, 25), None, r"hidden_size = 24\], got \[2, 7, 25\]"),
        ((2, 7, 24), (2, 7, 7), r"attention_mask .* = \[2, 7\], got \[2, 7, 7\]"),
        ((2, 7, 24), (1, 7), r"attention_mask .* = \[2, 7\], got \[1, 7\]"),
        ((2, 7, 24), (2, 6), r"attention_mask .* = \[2, 7\], got \[2, 6\]"),
    ],
)
def test_wrong_inputs(shape, mask, message):
    mask = None if mask is None else torch.ones(mask)
    with pytest.raises(ValueError, match=message):
        make_layer()(torch.zeros(shape, dtype=torch.float64), mask)


def test_cache_needs_layer_idx():
    with pytest.raises(ValueError, match=r"expected layer_idx to be an int .* got None"):
        make_layer()(make_x(), past_key_values=GLACache())


def test_activation_checkpointing_changes_nothing():
    layer, x = make_layer(), make_x().requires_grad_()
    leaves = [x, *layer.parameters()]
    plain = layer(x)[0]
    recomputed = checkpoint(lambda y: layer(y)[0], x, use_reentrant=False)
    assert torch.equal(plain, recomputed)
    gradients = [torch.autograd.grad(y.square().sum(), leaves) for y in (plain, recomputed)]
    for got, wanted in zip(*gradients, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
def test_compiles_whole_once_for_many_lengths(masked):
    layer = make_layer(torch.float32, layer_idx=0)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for T in (70, 5, 33):
        x, mask = make_x(T=T, dtype=torch.float32), None
        if masked:
            mask = (torch.arange(T) >= torch.tensor([[2], [0]])).long()
        y, _, cache = compiled(x, mask, past_key_values=GLACache(), use_cache=True)
        expected, _, expected_cache = layer(x, mask, past_key_values=GLACache(), use_cache=True)
        assert torch.equal(y, expected)
        state = expected_cache[0]["recurrent_state"]
        assert torch.equal(cache[0]["recurrent_state"], state)
    assert len(graphs) == 1


def test_imports_no_other_framework():
    code = (
        "import sys, gla_ext.layers, gla_ext.model\n"
        "names = {'transformers', 'einops', 'fla', 'triton', 'safetensors', 'matplotlib'}\n"
        "print(sorted(names & sys.modules.keys()))"
    )
    assert run_python(code).strip() == "[]"
