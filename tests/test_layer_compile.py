"""The layer in whole graphs: torch.compile, export, AOTInductor, activation checkpointing."""

import pytest
import torch
from models import make_layer, make_x
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from gla_ext.cache import GLACache


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
