"""FLA's operators and layers with one gate a head, or none, under `accelerate_fla`."""

import importlib
import inspect

import pytest
import torch
from common import DTYPES, assert_close, make_inputs
from fla_kernels import HIDDEN, require_kernels

import gla_ext.fla
from gla_ext import ops, reference
from gla_ext.fla import simple
from gla_ext.ops import lightning_decay, retention_decay
from gla_ext.selftest import tolerance

LAYERS = [
    ("simple_gla.SimpleGatedLinearAttention", {}),
    ("yoco.YOCOGatedRetention", {}),
    ("multiscale_retention.MultiScaleRetention", {}),
    ("linear_attn.LinearAttention", {"feature_map": "elementwise_product"}),
    ("linear_attn.LinearAttention", {"feature_map": "elu", "do_feature_map_norm": True}),
]
D = 16


@pytest.fixture
def accelerated(fla):
    gla_ext.fla.accelerate_fla()
    return fla


def homes(fla):
    """The functions that FLA's packages hold now, by name."""
    packages = ("simple_gla", "retention", "lightning_attn", "linear_attn")
    found = {}
    for package in packages:
        found |= vars(getattr(fla.ops, package))
    return {name: found[name] for name in simple.HOMES}


def test_signatures_are_those_of_fla(fla):
    """Names, order and defaults; gla_ext's own come after them. FLA's fused_chunk_simple_gla lacks
    two of the arguments of its chunk_simple_gla, which gla_ext's has.
    """
    own = {"chunk_simple_gla": {"cp_context"}}
    own["fused_chunk_simple_gla"] = {"state_v_first", "cu_seqlens_cpu", "cp_context"}
    for name, theirs in homes(fla).items():
        expected = described(theirs)
        found = described(getattr(ops, name))
        if name != "fused_chunk_simple_gla":
            assert list(found)[: len(expected)] == list(expected), name
        assert found.keys() - expected.keys() == own.get(name, set()), name
        assert {key: found[key] for key in expected} == expected, name


def described(function):
    parameters = inspect.signature(function).parameters.values()
    return {x.name: x.default for x in parameters if x.kind is not x.VAR_KEYWORD}


def test_other_arguments_are_not_taken():
    expected = simple.arguments("chunk_retention")
    assert simple.arguments_of(lambda q, k, v, scale=None: None) != expected
    parameters = ["q", "k", "v", "scale", "initial_state", "output_final_state", "cu_seqlens"]
    theirs = inspect.Signature([inspect.Parameter(x, 1) for x in (*parameters, "chunk_size")])

    def function():
        pass

    function.__signature__ = theirs
    assert simple.arguments_of(function) == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operators(accelerated, calls, dtype):
    x = make_inputs(2, 70, 2, D, D, dtype=dtype)
    gate = x.g[..., 0]
    truth = x.double()
    decays = {
        "simple_gla": truth.g[..., 0],
        "retention": retention_decay(2, truth.q).expand(2, 70, 2),
        "lightning_attn": lightning_decay(2, 1, 4, truth.q).expand(2, 70, 2),
        "linear_attn": None,
    }
    own = {"simple_gla": {"g": gate}, "lightning_attn": {"layer_idx": 1, "num_layers": 4}}
    own["linear_attn"] = {"normalize": False}
    for name, function in homes(accelerated).items():
        family = name.removeprefix("fused_").removeprefix("chunk_").removeprefix("recurrent_")
        o, state = function(
            q=x.q, k=x.k, v=x.v, initial_state=x.initial_state, output_final_state=True,
            **own.get(family, {}),
        )  # fmt: skip
        expected = reference.recurrence(
            truth.q, truth.k, truth.v, decays[family], None, truth.initial_state
        )
        assert_close(o, expected.o, tolerance("o", dtype), name=name)
        assert_close(state, expected.final_state, tolerance("final_state", dtype), name=name)
    assert len(calls) == len(simple.HOMES)


def test_positional_arguments_and_those_that_say_how(accelerated, calls):
    x = make_inputs(1, 9, 2, D, D)
    functions = homes(accelerated)
    gate, state = x.g[..., 0], x.initial_state.bfloat16()
    o, _ = functions["chunk_simple_gla"](x.q, x.k, x.v, gate, None, 0.5, chunk_size=32)
    expected = reference.recurrence(x.q, x.k, x.v, gate, 0.5).o
    assert_close(o, expected, 1e-6)
    o, _ = functions["fused_recurrent_retention"](x.q, x.k, x.v, None, state)
    decay = retention_decay(2, x.q).expand(1, 9, 2)
    assert_close(o, reference.recurrence(x.q, x.k, x.v, decay, None, state.float()).o, 1e-6)
    z = x.k[:, :1]
    o, (_, final_z) = functions["chunk_linear_attn"](
        x.q.abs(), x.k.abs(), x.v, initial_state=(x.initial_state, z.abs()), output_final_state=True
    )
    assert_close(final_z, z.abs() + x.k.abs().sum(1, keepdim=True), 1e-6)
    with pytest.raises(TypeError, match=r"^chunk_lightning_attn: expected layer_idx, num_layers"):
        functions["chunk_lightning_attn"](x.q, x.k, x.v)
    with pytest.raises(TypeError, match=r"^chunk_retention: got several values for scale"):
        functions["chunk_retention"](x.q, x.k, x.v, 1.0, scale=1.0)
    with pytest.raises(TypeError, match=r"^chunk_retention: expected at most 7 positional"):
        functions["chunk_retention"](x.q, x.k, x.v, 1.0, None, False, None, 3)


def make_fla_layer(name, device, **options):
    """A small layer of FLA's, and the module that it stands in."""
    home, name = name.split(".")
    module = importlib.import_module(f"fla.layers.{home}")
    torch.manual_seed(0)
    layer = getattr(module, name)(hidden_size=HIDDEN[device], num_heads=4, layer_idx=0, **options)
    return layer.to(device), module


def check_layer(layer, module, x, calls, monkeypatch, bound):
    """Outputs and gradients are those of the same layer with its operators in torch."""

    def results():
        leaf = x.clone().requires_grad_()
        y = layer(leaf)[0]
        gradients = torch.autograd.grad(y.float().square().sum(), [leaf, *layer.parameters()])
        return [y, *gradients]

    gla_ext.fla.accelerate_fla()
    found = results()
    assert calls
    for held in vars(module).keys() & simple.HOMES.keys():
        assert getattr(module, held).__module__ == "gla_ext.fla.simple"
        monkeypatch.setattr(module, held, in_torch(held))
    for value, expected in zip(found, results(), strict=True):
        assert_close(value, expected, bound)


@pytest.mark.parametrize("name, options", LAYERS)
@pytest.mark.parametrize("mode", ["chunk", "fused_recurrent"])
def test_layers(fla, calls, monkeypatch, name, options, mode):
    require_kernels("cpu")
    layer, module = make_fla_layer(name, "cpu", mode=mode, **options)
    T = 70 if mode == "chunk" else 9  # layers take up to 64 tokens by the recurrence
    x = torch.randn(2, T, layer.hidden_size, generator=torch.Generator().manual_seed(1))
    check_layer(layer, module, x, calls, monkeypatch, 2e-5)


@pytest.mark.cuda
@pytest.mark.parametrize("name, options", LAYERS)
def test_layers_train_in_bf16(fla, calls, monkeypatch, name, options):
    """Where FLA's own backward refuses to run: with a data-dependent gate on Hopper."""
    layer, module = make_fla_layer(name, "cuda", **options)
    generator = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(2, 130, layer.hidden_size, device="cuda", generator=generator)
    check_layer(layer.bfloat16(), module, x.bfloat16(), calls, monkeypatch, 3e-2)


def in_torch(name):
    """FLA's function of that name by the recurrence, with autograd."""

    def function(q, k, v, initial_state=None, output_final_state=False, **options):
        g = options.get("g")
        if "retention" in name:
            g = retention_decay(q.shape[2], q).expand(q.shape[:3])
        scale = q.shape[-1] ** -0.5
        dtype, (q, k, v) = v.dtype, (x.float() for x in (q, k, v))
        o = reference.recurrence(q, k, v, None if g is None else g.float(), scale).o
        if options.get("normalize"):
            o = o / ((scale * q * k.cumsum(1)).sum(-1, keepdim=True) + 1e-10)
        return o.to(dtype), None

    return function
