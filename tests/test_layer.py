"""The layer against a composition in fp64 plain torch, its norms, names, errors, whole graphs."""

import pytest
import torch
from common import assert_close, run_python
from models import SMALL, composed, make_layer, make_x
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from gla_ext import GatedLinearAttention
from gla_ext.cache import GLACache
from gla_ext.layers import MODES
from gla_ext.norms import GatedRMSNorm, RMSNorm

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


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.03), (torch.float16, 2e-3)])
def test_autocast_keeps_close(dtype, bound):
    layer, x = make_layer(torch.float32), make_x(dtype=torch.float32)
    with torch.autocast("cpu", dtype):
        y = layer(x)[0]
    assert y.dtype == dtype
    assert_close(y, composed(layer, x.double())[0], bound)


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", [RMSNorm(256), GatedRMSNorm(256)])
def test_norms_stay_fp32_under_autocast(norm, dtype):
    inputs = (20 * torch.randn(7, 256), torch.randn(7, 256))[: 1 + isinstance(norm, GatedRMSNorm)]
    expected = norm(*inputs)
    with torch.autocast("cpu", dtype):
        assert torch.equal(norm(*inputs), expected)


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


def cached(layer, x, h0):
    cache = GLACache()
    cache.update(layer_idx=0, recurrent_state=h0)
    y, _, cache = layer(x, past_key_values=cache, use_cache=True)
    return y, cache[0]["recurrent_state"]


class FromState(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = make_layer(torch.float32, layer_idx=0)

    def forward(self, x, h0):
        return cached(self.layer, x, h0)


@pytest.fixture
def from_state():
    return FromState().eval()


def state_of(layer):
    return torch.randn(2, layer.num_heads, layer.head_v_dim, layer.head_k_dim)


@pytest.mark.parametrize("mark", ["dynamic", "unbacked", None])
@torch.no_grad()
def test_segments_on_a_state_compile_once(from_state, mark):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        from_state, fullgraph=True, dynamic=mark is None or None, backend=counter
    )
    h0 = state_of(from_state.layer)
    for T in (17, 5, 16, 2, 70):
        x = make_x(T=T, dtype=torch.float32)
        if mark == "dynamic":
            torch._dynamo.mark_dynamic(x, 1)
        elif mark == "unbacked":
            torch._dynamo.decorators.mark_unbacked(x, 1)
        for got, expected in zip(compiled(x, h0), from_state(x, h0), strict=True):
            assert torch.equal(got, expected)
    assert counter.frame_count == 1


@torch.no_grad()
def test_automatic_lengths_on_a_state(from_state):
    """One graph for the first length, one for any other, one for decoding."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(from_state, fullgraph=True, backend=counter)
    h0 = state_of(from_state.layer)
    for T in (20, 5, 16, 17, 2, 70, 1, 1):
        x = make_x(T=T, dtype=torch.float32)
        for got, expected in zip(compiled(x, h0), from_state(x, h0), strict=True):
            assert torch.equal(got, expected)
    assert counter.frame_count == 3


@torch.no_grad()
def test_exports_segments_on_a_state(from_state):
    T = torch.export.Dim("T", min=2, max=4096)
    h0 = state_of(from_state.layer)
    example = (make_x(T=20, dtype=torch.float32), h0)
    program = torch.export.export(from_state, example, dynamic_shapes=({1: T}, None)).module()
    for length in (2, 16, 33):
        x = make_x(T=length, dtype=torch.float32)
        for got, expected in zip(program(x, h0), from_state(x, h0), strict=True):
            assert torch.equal(got, expected)


def test_imports_no_other_framework():
    code = (
        "import sys, gla_ext.layers, gla_ext.model\n"
        "names = {'transformers', 'einops', 'fla', 'triton', 'safetensors', 'matplotlib'}\n"
        "print(sorted(names & sys.modules.keys()))"
    )
    assert run_python(code).strip() == "[]"
