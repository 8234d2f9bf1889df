"""The layer against a composition in fp64 plain torch, its norms, names, errors.

Equal bits (see common.py): own sums.
"""

import pytest
import torch
from common import assert_close, make_inputs, run_python
from models import EVERY, SMALL, composed_with, make_layer, make_x

from gla_ext import GatedLinearAttention, chunk_gla, fused_recurrent_gla
from gla_ext.layers._options import MODES
from gla_ext.layers.activations import ACTIVATIONS
from gla_ext.layers.norms import GatedRMSNorm, RMSNorm

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
    assert_close(layer(x)[0], composed_with(options, layer, x)[0], 1e-12)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("options", [{}, {"fuse_norm": False}, EVERY])
def test_lower_precision_stays_close(dtype, bound, options):
    layer = make_layer(dtype, **options)
    x = make_x(dtype=dtype)
    y = layer(x)[0]
    assert y.dtype == dtype
    assert_close(y, composed_with(options, layer, x.double())[0], bound)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.03), (torch.float16, 2e-3)])
@pytest.mark.parametrize("options", [{}, EVERY], ids=["default", "all"])
def test_autocast_keeps_close(dtype, bound, options):
    layer, x = make_layer(torch.float32, **options), make_x(dtype=torch.float32)
    with torch.autocast("cpu", dtype):
        y = layer(x)[0]
    assert y.dtype == dtype
    assert_close(y, composed_with(options, layer, x.double())[0], bound)


@pytest.mark.parametrize("operator", [chunk_gla, fused_recurrent_gla])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_that_share_memory_change_no_bit(device, operator, dtype):
    """What the layer hands over for one key/value head: strides of 0."""
    x = make_inputs(2, 130, 4, 32, 64, dtype, device=device)
    one_head = [t[:, :, :1] for t in (x.k, x.v, x.g)]
    results = []
    for copied in (False, True):
        leaves = [x.q, *one_head, x.initial_state]
        leaves = [t.detach().clone().requires_grad_() for t in leaves]
        k, v, g = (t.expand(-1, -1, 4, -1) for t in leaves[1:4])
        if copied:
            k, v, g = k.contiguous(), v.contiguous(), g.contiguous()
        o, state = operator(leaves[0], k, v, g, initial_state=leaves[4], output_final_state=True)
        assert (k.stride(2) == 0) != copied
        results.append([o, state, *torch.autograd.grad((o, state), leaves, (x.do, x.dht))])
    for shared, copy in zip(*results, strict=True):
        assert torch.equal(shared, copy)


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


@pytest.mark.parametrize("bias", [True, False])
def test_state_dict_of_shared_heads_with_convolutions(bias):
    layer = GatedLinearAttention(num_kv_heads=2, use_short_conv=True, conv_bias=bias, conv_size=3)
    shapes = {n: tuple(x.shape) for n, x in layer.state_dict().items()}
    channels = {"q_conv1d": 512, "k_conv1d": 256, "v_conv1d": 512}
    assert shapes == {
        "q_proj.weight": (512, 1024),
        "k_proj.weight": (256, 1024),
        "v_proj.weight": (512, 1024),
        "g_proj.weight": (1024, 1024),
        **{f"{name}.weight": (D, 1, 3) for name, D in channels.items()},
        **({f"{name}.bias": (D,) for name, D in channels.items()} if bias else {}),
        "gk_proj.0.weight": (16, 1024),
        "gk_proj.1.weight": (256, 16),
        "gk_proj.1.bias": (256,),
        "o_proj.weight": (1024, 1024),
        "g_norm_swish_gate.weight": (256,),
    }


@pytest.mark.parametrize("gate_fn", [name for name in ACTIVATIONS if name != "swish"])
def test_norm_has_its_own_name_beside_any_gate_but_swish(gate_fn):
    keys = GatedLinearAttention(gate_fn=gate_fn, **SMALL).state_dict().keys()
    assert keys == PROJECTIONS | GATE | {"g_proj.weight", "g_norm.weight"}


@pytest.mark.parametrize("norm", [RMSNorm(10), GatedRMSNorm(10)])
def test_norms_round_once(norm):
    torch.nn.init.normal_(norm.weight)
    x, gate = torch.randn(2, 7, 10).bfloat16()
    gates = [gate] if isinstance(norm, GatedRMSNorm) else []
    exact = norm.double()(x.double(), *(gate.double() for gate in gates))
    wide = norm.float()(x.float(), *(gate.float() for gate in gates))
    assert_close(wide, exact, 1e-6)
    assert torch.equal(norm(x, *gates), wide.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", [RMSNorm(256), GatedRMSNorm(256)])
def test_norms_stay_fp32_under_autocast(norm, dtype):
    inputs = (20 * torch.randn(7, 256), torch.randn(7, 256))[: 1 + isinstance(norm, GatedRMSNorm)]
    expected = norm(*inputs)
    with torch.autocast("cpu", dtype):
        assert torch.equal(norm(*inputs), expected)


@pytest.mark.parametrize("name", ["feature_map", "gate_fn"])
def test_an_activation_that_needs_more_than_its_input(name):
    with pytest.raises(NotImplementedError, match=f"{name} = 'bias_gelu' is not implemented"):
        GatedLinearAttention(**(SMALL | {name: "bias_gelu"}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
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


def test_inputs_that_are_no_tensors():
    layer, x = make_layer(), torch.zeros(1, 5, 24, dtype=torch.float64)
    with pytest.raises(TypeError, match="expected attention_mask to be a tensor, got <class 'list"):
        layer(x, [[1] * 5])
    with pytest.raises(TypeError, match="expected cu_seqlens to be a tensor, got <class 'list'>"):
        layer(x, cu_seqlens=[0, 5])
    nested = torch.nested.nested_tensor([x[0], x[0][:3]], layout=torch.jagged)
    with pytest.raises(NotImplementedError, match="nested tensors are not supported, pack the seq"):
        layer(nested)


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
