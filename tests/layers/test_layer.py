"""The layer against a composition in fp64 plain torch, its norms, names, errors.

Equal bits (see common.py): own sums.
"""

import pytest
import torch
from common import assert_close, run_python
from dispatch import Calls
from models import EVERY, SMALL, composed_with, make_layer, make_x

from gla_ext import GatedLinearAttention
from gla_ext.layers._options import MODES
from gla_ext.layers.activations import ACTIVATIONS

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
    "kv heads 1": {"num_kv_heads": 1},
    "kv heads 2 of 4": {"num_kv_heads": 2, "num_heads": 4},
    "short conv": {"use_short_conv": True},
    "short conv, bias, 3": {"use_short_conv": True, "conv_bias": True, "conv_size": 3},
    "short conv of 1": {"use_short_conv": True, "conv_size": 1},
    "short conv longer than T": {"use_short_conv": True, "conv_size": 80},
    **{f"feature_map {name}": {"feature_map": name} for name in ACTIVATIONS},
    **{f"gate_fn {name}": {"gate_fn": name} for name in ACTIVATIONS},
    "gate_fn, unfused": {"gate_fn": "sigmoid", "fuse_norm": False},
    "all": EVERY,
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_equals_the_composition_with_gradients(options):
    layer, x = make_layer(**options), make_x().requires_grad_()
    leaves = [x, *layer.parameters()]
    generator = torch.Generator().manual_seed(2)
    actual, nothing, cache = layer(x)
    assert nothing is None
    assert cache is None
    expected, _ = composed_with(options, layer, x)
    upstream = torch.randn(actual.shape, generator=generator, dtype=actual.dtype)
    assert_close(actual, expected, 1e-12)
    gradients = [torch.autograd.grad(y, leaves, upstream) for y in (actual, expected)]
    names = ["x", *dict(layer.named_parameters())]
    for name, got, wanted in zip(names, *gradients, strict=True):
        assert_close(got, wanted, 1e-10, name=name)


@pytest.mark.parametrize("options", [{}, EVERY], ids=["default", "all"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("T", [0, 1, 64, 65])
def test_every_mode_at_any_length(mode, T, options):
    layer, x = make_layer(mode=mode, **options), make_x(T=T)
    with Calls() as calls:
        y = layer(x)[0]
    assert_close(y, composed_with(options, layer, x)[0], 1e-12)
    assert calls.count("recurrent_gla_fwd") == (mode == "fused_recurrent")


CASES = [(torch.float32, None, 1e-5), (torch.bfloat16, None, 0.03)]
CASES += [(torch.float32, torch.bfloat16, 0.03), (torch.float32, torch.float16, 2e-3)]


@pytest.mark.parametrize(("dtype", "autocast", "bound"), CASES)
@pytest.mark.parametrize("options", [{}, {"fuse_norm": False}, EVERY])
def test_lower_precision_stays_close(dtype, autocast, bound, options):
    layer, x = make_layer(dtype, **options), make_x(dtype=dtype)
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        y = layer(x)[0]
    assert y.dtype == (autocast or dtype)
    assert_close(y, composed_with(options, layer, x.double())[0], bound)


SHAPES = {
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
NO_NORM = {"g_norm_swish_gate.weight": None}
OTHER_NORM = NO_NORM | {"g_norm.weight": (256,)}  # beside any gate but swish
NO_GATE = {"g_proj.weight": None}
SHARED = {"k_proj.weight": (256, 1024), "gk_proj.1.weight": (256, 16), "gk_proj.1.bias": (256,)}
SHARED |= {"v_proj.weight": (512, 1024)}
CONVOLUTIONS = {"q_conv1d": 512, "k_conv1d": 256, "v_conv1d": 512}
SHARED |= {f"{name}.weight": (D, 1, 3) for name, D in CONVOLUTIONS.items()}
SHORT = {"num_kv_heads": 2, "use_short_conv": True, "conv_size": 3, "conv_bias": False}
NAMES = [
    ({}, {}),
    ({"fuse_norm": False}, OTHER_NORM),
    ({"use_output_gate": False}, OTHER_NORM | NO_GATE),
    ({"fuse_norm": False, "use_output_gate": False}, OTHER_NORM | NO_GATE),
    ({"elementwise_affine": False}, NO_NORM),
    ({"elementwise_affine": False, "fuse_norm": False}, NO_NORM),
    ({"elementwise_affine": False, "use_output_gate": False}, NO_NORM | NO_GATE),
    (SHORT, SHARED),
    (SHORT | {"conv_bias": True}, SHARED | {f"{n}.bias": (D,) for n, D in CONVOLUTIONS.items()}),
    *(({"gate_fn": name}, OTHER_NORM) for name in ACTIVATIONS if name != "swish"),
]


@pytest.mark.parametrize(("options", "changes"), NAMES, ids=str)
def test_names_and_shapes(options, changes):
    with torch.device("meta"):
        layer = GatedLinearAttention(**options)
    expected = {name: shape for name, shape in (SHAPES | changes).items() if shape is not None}
    assert {name: tuple(t.shape) for name, t in layer.state_dict().items()} == expected


WRONG_OPTIONS = [
    ({"mode": "chunky"}, "expected mode to be one of chunk, .*, got 'chunky'"),
    ({"num_heads": 0}, "expected num_heads to be at least 1, got 0"),
    ({"num_kv_heads": 2}, "expected num_kv_heads to divide num_heads = 3, got 2"),
    ({"conv_size": 0}, "expected conv_size to be at least 1, got 0"),
    ({"feature_map": "tanh"}, "expected feature_map to be one of relu, .*, got 'tanh'"),
    ({"gate_fn": "powlu"}, "expected gate_fn to be one of relu, .*, got 'powlu'"),
    ({"hidden_size": 25}, r"hidden_size \* expand_k .* num_heads = 3, got 25 \* 0.5 = 12.5"),
    ({"num_heads": 5}, r"hidden_size \* expand_k .* num_heads = 5, got 24 \* 0.5 = 12"),
    ({"expand_v": 0.3}, r"hidden_size \* expand_v .* got 24 \* 0.3 = 7.2"),
    ({"expand_v": 0.0}, r"hidden_size \* expand_v .* got 24 \* 0.0 = 0"),
    ({"expand_k": float("inf")}, r"hidden_size \* expand_k .* got 24 \* inf = inf"),
    ({"gate_logit_normalizer": 0}, "expected gate_logit_normalizer to be above 0, got 0"),
    ({"gate_logit_normalizer": -16}, "expected gate_logit_normalizer to be above 0, got -16"),
    ({"clamp_min": 0.1}, "expected clamp_min, a bound of the log gate, to be at most 0, got 0.1"),
    ({"gate_low_rank_dim": 0}, "expected gate_low_rank_dim to be at least 1, got 0"),
]


@pytest.mark.parametrize(("options", "message"), WRONG_OPTIONS)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        GatedLinearAttention(**(SMALL | options))


@pytest.mark.parametrize("name", ["feature_map", "gate_fn"])
def test_an_activation_that_needs_more_than_its_input(name):
    with pytest.raises(NotImplementedError, match=f"{name} = 'bias_gelu' is not implemented"):
        GatedLinearAttention(**(SMALL | {name: "bias_gelu"}))


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


def test_parts_of_heads_and_nested_tensors():
    layer, x = make_layer(), make_x(T=5)
    nested = torch.nested.nested_tensor([x[0], x[0][:3]], layout=torch.jagged)
    with pytest.raises(NotImplementedError, match="nested tensors are not supported, pack the seq"):
        layer(nested)
    layer.q_proj.weight = torch.nn.Parameter(layer.q_proj.weight[:6].detach())
    with pytest.raises(ValueError, match="multiple of the head's, 4, got 6: shards hold whole"):
        layer(x)


@pytest.mark.slow
def test_imports_no_other_framework():
    code = (
        "import sys, torch.nn.attention.varlen\n"
        "torchs = set(sys.modules)\n"  # from 2.15 on with triton
        "import gla_ext.layers, gla_ext.model\n"
        "names = {'transformers', 'einops', 'fla', 'triton', 'safetensors', 'matplotlib'}\n"
        "print(names & (sys.modules.keys() - torchs))\n"
        "import gla_ext.fla\n"
        "print({'transformers', 'fla'} & sys.modules.keys())"
    )
    assert run_python(code).split() == ["set()", "set()"]
