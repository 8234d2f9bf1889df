"""The layer in whole graphs: torch.compile, export, AOTInductor, activation checkpointing.

Equal bits (see common.py): the same calls, made again by a checkpoint.
"""

import collections
import copy
import functools

import pytest
import torch
from common import assert_close
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from models import EVERY, make_ids, make_layer, make_model, make_x
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from gla_ext.cache import GLACache
from gla_ext.layers.norms import GatedRMSNorm, RMSNorm
from gla_ext.layers.short_convolution import ShortConvolution

with_options = pytest.mark.parametrize("options", [{}, EVERY], ids=["default", "all"])
FORWARD = torch.ops.gla_ext.chunk_gla_fwd.default
SELECTIVE = functools.partial(create_selective_checkpoint_contexts, [FORWARD])


class Calls(TorchDispatchMode):
    """Counts the calls of each operator."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[function] += 1
        return function(*args, **(kwargs or {}))


@with_options
@pytest.mark.parametrize(
    ("context_fn", "runs"), [(noop_context_fn, 2), (SELECTIVE, 1)], ids=["all", "selective"]
)
def test_activation_checkpointing_changes_nothing(options, context_fn, runs):
    """Selective by the operator's name: its outputs are saved, what surrounds it runs again."""
    layer, x = make_layer(**options), make_x().requires_grad_()
    leaves = [x, *layer.parameters()]
    plain = layer(x)[0]
    gradients = torch.autograd.grad(plain.square().sum(), leaves)
    with Calls() as calls:
        y = checkpoint(lambda z: layer(z)[0], x, use_reentrant=False, context_fn=context_fn)
        before = calls.counts.copy()
        recomputed = torch.autograd.grad(y.square().sum(), leaves)
    assert torch.equal(plain, y)
    for got, wanted in zip(recomputed, gradients, strict=True):
        assert torch.equal(got, wanted)
    assert calls.counts[FORWARD] == runs
    gate = torch.ops.gla_ext.gate_projection_fwd.default
    assert (before[gate], calls.counts[gate]) == (1, 2)


@pytest.mark.parametrize("selective", [False, True])
def test_selective_checkpointing_in_one_graph(selective):
    layer, x = make_layer(torch.float32, **EVERY), make_x(dtype=torch.float32)
    backward = []

    def remember(graph, _):
        backward.append([node.target for node in graph.graph.nodes])
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        bw_compiler=remember,
        partition_fn=min_cut_rematerialization_partition,
    )

    def recomputing(z):
        if selective:
            return checkpoint(layer, z, use_reentrant=False, context_fn=SELECTIVE)
        return checkpoint(layer, z, use_reentrant=False)

    compiled = torch.compile(recomputing, fullgraph=True, backend=backend)
    for got, wanted in zip(results(compiled, x, layer), results(layer, x, layer), strict=True):
        assert_close(got, wanted, 1e-5)
    assert [targets.count(FORWARD) for targets in backward] == [0 if selective else 1]


def sequences(kind, T, device="cpu"):
    """x and what tells the layer where its sequences are: nothing, a mask, or cu_seqlens."""
    x = make_x(1 if kind == "packed" else 2, T, torch.float32).to(device)
    if kind == "masked":
        return x, {"attention_mask": torch.arange(T, device=device) >= x.new_tensor([[2], [0]])}
    if kind == "packed":
        return x, {"cu_seqlens": torch.tensor([0, 2, T - 1], device=device)}
    return x, {}


@pytest.mark.parametrize("kind", ["plain", "masked", "packed"])
@with_options
def test_compiles_whole_once_for_many_lengths(kind, options):
    layer = make_layer(torch.float32, layer_idx=0, **options)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for T in (70, 5, 33):
        x, where = sequences(kind, T)
        y, _, cache = compiled(x, past_key_values=GLACache(), use_cache=True, **where)
        expected, _, expected_cache = layer(x, past_key_values=GLACache(), use_cache=True, **where)
        pairs = [(y, expected)]
        pairs.append(tuple(c[0]["recurrent_state"] for c in (cache, expected_cache)))
        pairs += zip(*(c[0]["conv_state"] or () for c in (cache, expected_cache)), strict=True)
        for got, wanted in pairs:
            assert_close(got, wanted, 1e-6)
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("attn", "graphs"),
    [(None, 2), ({"layers": [3, 7], "num_heads": 2}, 3)],
    ids=["gla", "hybrid"],
)
def test_blocks_of_a_kind_share_a_graph(attn, graphs):
    """The first has no residual. A graph a block would be more than torch allows, eight."""
    model = make_model(num_hidden_layers=10, attn=attn).train()
    counter = CompileCounterWithBackend("aot_eager")
    for block in model.model.layers:
        block.compile(fullgraph=True, dynamic=False, backend=counter)
    ids = make_ids()
    model(ids, labels=ids).loss.backward()
    assert counter.frame_count == graphs


def kernels(function, *inputs):
    """Number of kernels inductor makes of a function of tensors, forward alone."""
    torch._dynamo.reset()
    with torch.no_grad():
        _, code = run_and_get_code(torch.compile(function, fullgraph=True), *inputs)
    names = ("async_compile.cpp_pybinding(", "async_compile.triton(")
    return sum(text.count(name) for text in code for name in names)


@pytest.mark.parametrize("what, count", [("norm", 1), ("gated norm", 0), ("convolution", 0)])
def test_inductor_makes_one_kernel_of_a_norm_and_none_beside_an_operator(device, what, count):
    """A gated norm is an operator, as a short convolution is."""
    modules = {"norm": RMSNorm, "gated norm": GatedRMSNorm}
    module = modules[what](64) if what in modules else ShortConvolution(64, 4, True)
    x, gate = torch.randn(2, 2, 50, 64, device=device)
    assert kernels(module.to(device), x, *([gate] if what == "gated norm" else [])) == count


def results(call, x, layer, **where):
    leaf = x.clone().requires_grad_()
    y = call(leaf, **where)[0]
    return [y, *torch.autograd.grad(y.square().sum(), [leaf, *layer.parameters()])]


@pytest.mark.slow
def test_inductor_gives_the_same_gradients(device):
    layer = make_layer(torch.float32, **EVERY).to(device)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for T in (70, 33):
        x, where = sequences("masked", T, device)
        pair = (results(call, x, layer, **where) for call in (compiled, layer))
        for got, wanted in zip(*pair, strict=True):
            assert_close(got, wanted, 2e-5)


def error(actual, exact):
    """RMS, relative."""
    exact = exact.to(actual.device)
    return ((actual - exact).square().mean() / exact.square().mean()).sqrt().item()


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["plain", "masked", "packed"])
@with_options
def test_reduce_overhead_replays_graphs(kind, options):
    """As close to fp64 as the layer in eager mode, but for a factor."""
    counters.clear()
    layer = make_layer(torch.float32, **options).cuda()
    exact_layer = copy.deepcopy(layer).cpu().double()
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    for seed in range(4):  # warm-up, capture, replays
        x, where = sequences(kind, 70, "cuda")
        x = (seed + 1) * x
        torch.compiler.cudagraph_mark_step_begin()
        got = [t.clone() for t in results(compiled, x, layer, **where)]
        eager = results(layer, x, layer, **where)
        where = {name: t.cpu() for name, t in where.items()}
        exact = results(exact_layer, x.cpu().double(), exact_layer, **where)
        for a, b, c in zip(got, eager, exact, strict=True):
            assert error(a, c) <= 3 * error(b, c) + 1e-6
    assert counters["inductor"]["cudagraph_skips"] == 0


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


LENGTHS = (17, 5, 16, 2, 70)


@pytest.mark.parametrize(
    "mark, lengths, graphs",
    [
        *((mark, LENGTHS, 1) for mark in ("dynamic", "unbacked", "all")),
        # One graph for the first length, one for any other, one for decoding.
        ("automatic", (20, 5, 16, 17, 2, 70, 1, 1), 3),
    ],
)
@torch.no_grad()
def test_segments_on_a_state(from_state, mark, lengths, graphs):
    counter, dynamic = CompileCounterWithBackend("aot_eager"), True if mark == "all" else None
    compiled = torch.compile(from_state, fullgraph=True, dynamic=dynamic, backend=counter)
    h0 = state_of(from_state.layer)
    for T in lengths:
        x = make_x(T=T, dtype=torch.float32)
        if mark == "dynamic":
            torch._dynamo.mark_dynamic(x, 1)
        elif mark == "unbacked":
            torch._dynamo.decorators.mark_unbacked(x, 1)
        for got, expected in zip(compiled(x, h0), from_state(x, h0), strict=True):
            assert_close(got, expected, 1e-5)
    assert counter.frame_count == graphs


def test_compiled_training_has_one_product_of_the_projections():
    layer, x = make_layer(), make_x()
    counted = []

    def backend(graph, inputs):
        counted.append(sum(node.target is torch._C._nn.linear for node in graph.graph.nodes))
        return graph

    torch.compile(layer, backend=backend, fullgraph=True)(x)
    assert counted == [1]  # o_proj's is part of an operator
