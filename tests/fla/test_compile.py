"""FLA's layer under `accelerate_fla` and `torch.compile(fullgraph=True)`: every option of it."""

import pytest
import torch
from common import assert_close
from fla_kernels import BOUND, LAYER_OPTIONS, LAYER_SIZES, make_layer
from torch._dynamo.testing import CompileCounterWithBackend

import gla_ext.fla
from gla_ext.cache import GLACache

# Dynamo's graph decides whether an option compiles whole; torch's autograd takes it from there, in
# two cases here and in all of many lengths below.
BACKENDS = {name: "aot_eager" if name in ("default", "all") else "eager" for name in LAYER_OPTIONS}

FAST = ("default", "kv heads 1", "short conv", "fused_recurrent", "all")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in LAYER_OPTIONS],
)
def test_the_layer_compiles_whole_with_every_option(fla, device, name):
    options = LAYER_SIZES | LAYER_OPTIONS[name]
    layer = make_layer(fla, "GatedLinearAttention", device, **options)
    gla_ext.fla.accelerate_fla()
    compiled = torch.compile(layer, fullgraph=True, backend=BACKENDS[name])
    x = torch.randn(2, 70, 64, device=device)
    mask = (torch.arange(70) >= torch.tensor([[4], [0]])).long().to(device)
    results = []
    for module in (layer, compiled):
        o = module(x, mask)[0]
        results.append([o, *torch.autograd.grad(o.square().sum(), list(layer.parameters()))])
    for got, wanted in zip(*results, strict=True):
        assert_close(got, wanted, BOUND[device])


@pytest.mark.parametrize("call", ["plain", "masked", "packed", "cached"])
def test_the_layer_compiles_once_for_many_lengths(fla, device, call):
    layer = make_layer(fla, "GatedLinearAttention", device, hidden_size=32, **LAYER_OPTIONS["all"])
    gla_ext.fla.accelerate_fla()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    parameters = list(layer.parameters())
    for T in (90, 70, 101):
        x = torch.randn(1 if call == "packed" else 2, T, 32, device=device)
        arguments = {}
        if call == "masked":
            mask = (torch.arange(T) >= torch.tensor([[4], [0]])).long().to(device)
            arguments["attention_mask"] = mask
            x[0, :4] = float("nan")  # padding reaches nothing
        elif call == "packed":
            arguments["cu_seqlens"] = torch.tensor([0, 5, T], device=device)
        results = []
        for module in (layer, compiled):
            if call == "cached":
                arguments = {"past_key_values": GLACache(), "use_cache": True}
            o, _, cache = module(x, **arguments)
            results.append([o, *torch.autograd.grad(o.square().sum(), parameters)])
            if call == "cached":
                entry = cache[0]
                results[-1] += [entry["recurrent_state"], *(entry["conv_state"] or ())]
        for got, wanted in zip(*results, strict=True):
            assert got.isfinite().all()
            assert_close(got, wanted, BOUND[device])
    assert counter.frame_count == 1
