"""chunk_gla under torch.compile, export, AOTInductor, autocast and activation checkpointing.

Equal bits (see common.py): own sums.
"""

import functools

import pytest
import torch
from common import make_inputs
from models import BATCH_INVARIANT_ARGUMENT
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from gla_ext import batch_invariant, chunk_gla
from gla_ext.ops import chunk as ops


def loss(q, k, v, g, h0, call=chunk_gla):
    o, final_state = call(q, k, v, g, initial_state=h0, output_final_state=True)
    return o.sin().sum() + final_state.square().sum()


def gradients(function, x):
    leaves = [t.clone().requires_grad_() for t in (x.q, x.k, x.v, x.g, x.initial_state)]
    value = function(*leaves)
    return [value.detach(), *torch.autograd.grad(value, leaves)]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_for_many_lengths(device, backend):
    """The loss stays outside: inductor guards on the size of a reduction of its own."""
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(chunk_gla, fullgraph=True, dynamic=True, backend=counter)
    for T in (70, 2, 64, 65, 130, 300):
        x = make_inputs(2, T, 2, 8, 12, device=device)
        results = [
            gradients(functools.partial(loss, call=call), x) for call in (chunk_gla, compiled)
        ]
        for eager, graph in zip(*results, strict=True):
            assert torch.equal(graph, eager)
    assert counter.frame_count == 1


def test_expanded_gradient_from_inductor():
    """o.sum() hands do over with strides 0."""
    x = make_inputs(1, 70, 2, 8, 12)

    def total(q, k, v, g, h0):
        return chunk_gla(q, k, v, g, initial_state=h0)[0].sum()

    compiled = torch.compile(total, fullgraph=True)
    for eager, graph in zip(gradients(total, x), gradients(compiled, x), strict=True):
        torch.testing.assert_close(graph, eager, rtol=2e-5, atol=2e-5)


def test_packed_compiles_whole(device):
    x = make_inputs(1, 100, 2, 8, 12, lengths=(30, 0, 50), device=device)

    def packed(q, k, v, g, h0, cu_seqlens):
        return chunk_gla(q, k, v, g, initial_state=h0, cu_seqlens=cu_seqlens)[0]

    compiled = torch.compile(packed, fullgraph=True, dynamic=True)
    for offsets in ([0, 30, 30, 80], [0, 1, 64, 100]):
        args = (x.q, x.k, x.v, x.g, x.initial_state, x.cu_seqlens.new_tensor(offsets))
        assert torch.equal(compiled(*args), packed(*args))


def test_unbacked_length():
    def cut(q, k, v, g, length):
        n = length.item()
        torch._check(n >= 0)
        torch._check(n <= q.shape[1])
        return chunk_gla(*(t.narrow(1, 0, n) for t in (q, k, v, g)))[0].sum()

    x = make_inputs(1, 100, 2, 8, 12)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(cut, fullgraph=True)
        for n in (70, 1, 0, 100):
            args = (x.q, x.k, x.v, x.g, torch.tensor(n))
            torch.testing.assert_close(compiled(*args), cut(*args))


class Module(torch.nn.Module):
    def forward(self, q, k, v, g):
        return chunk_gla(q, k, v, g, output_final_state=True)


def assert_equal_outputs(call, x):
    inputs = (x.q, x.k, x.v, x.g)
    for a, b in zip(call(*inputs), Module()(*inputs), strict=True):
        assert torch.equal(a, b)


@pytest.fixture(scope="module")
def exported():
    x = make_inputs(2, 70, 2, 8, 12)
    T = torch.export.Dim("T", min=2, max=4096)
    return torch.export.export(Module(), (x.q, x.k, x.v, x.g), dynamic_shapes=({1: T},) * 4)


def test_export_keeps_one_operator(exported):
    calls = [n for n in exported.graph.nodes if n.target is torch.ops.gla_ext.chunk_gla_fwd.default]
    assert len(calls) == 1
    x = make_inputs(2, 33, 2, 8, 12)
    assert_equal_outputs(exported.module(), x)


@pytest.mark.slow  # test_package.py has a layer on its states
def test_aot_inductor(exported, tmp_path):
    path = torch._inductor.aoti_compile_and_package(
        exported, package_path=str(tmp_path / "gla.pt2")
    )
    package = torch._inductor.aoti_load_package(path)
    x = make_inputs(2, 99, 2, 8, 12)
    assert_equal_outputs(package, x)


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_casts_q_k_v_alone(device, compiled):
    x = make_inputs(2, 70, 2, 8, 12, device=device).map(lambda t: t.requires_grad_())
    graph = torch.compile(chunk_gla, fullgraph=True, backend="aot_eager")
    call = graph if compiled else chunk_gla
    with torch.autocast(device, dtype=torch.bfloat16):
        o, final_state = call(
            x.q, x.k, x.v, x.g, initial_state=x.initial_state, output_final_state=True
        )
    expected, _ = chunk_gla(
        x.q.bfloat16(), x.k.bfloat16(), x.v.bfloat16(), x.g, initial_state=x.initial_state
    )
    assert o.dtype == torch.bfloat16 and final_state.dtype == torch.float32
    assert torch.equal(o, expected)
    o.float().sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in (x.q, x.k, x.v, x.g, x.initial_state))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_changes_no_bit(use_reentrant):
    x = make_inputs(2, 70, 2, 8, 12)

    def recomputed(*leaves):
        return checkpoint(loss, *leaves, use_reentrant=use_reentrant)

    leaves = [t.clone().requires_grad_() for t in (x.q, x.k, x.v, x.g, x.initial_state)]
    recomputed(*leaves).backward()
    for leaf, expected in zip(leaves, gradients(loss, x)[1:], strict=True):
        assert torch.equal(leaf.grad, expected)


def test_vmap_equals_a_loop():
    x = make_inputs(3, 70, 2, 8, 12)

    def one(q, k, v, g):
        return chunk_gla(q[None], k[None], v[None], g[None])[0][0]

    assert torch.equal(torch.vmap(one)(x.q, x.k, x.v, x.g), chunk_gla(x.q, x.k, x.v, x.g)[0])


@pytest.mark.parametrize("output_final_state", [False, True])
def test_compiled_autograd(output_final_state):
    x = make_inputs(2, 70, 2, 8, 12)

    def total(*leaves):
        o, final_state = chunk_gla(
            *leaves[:4], initial_state=leaves[4], output_final_state=output_final_state
        )
        return o.sum() + (final_state.sum() if output_final_state else 0)

    leaves = [t.clone().requires_grad_() for t in (x.q, x.k, x.v, x.g, x.initial_state)]
    value = total(*leaves)
    compiler = torch.compile(backend="eager", fullgraph=True)
    with torch._dynamo.compiled_autograd._enable(compiler):
        value.backward()
    for leaf, expected in zip(leaves, gradients(total, x)[1:], strict=True):
        assert torch.equal(leaf.grad, expected)


def compile_noting(position):
    """chunk_gla compiled, and a list of that argument of the operator in every graph."""
    torch._dynamo.reset()
    arguments = []

    def backend(graph, _):
        target = torch.ops.gla_ext.chunk_gla_fwd.default
        arguments.extend(n.args[position] for n in graph.graph.nodes if n.target is target)
        return graph.forward

    return torch.compile(chunk_gla, fullgraph=True, backend=backend), arguments


def test_batch_invariant_mode_reaches_the_graph():
    x = make_inputs(1, 20, 1, 4, 4)
    compiled, arguments = compile_noting(BATCH_INVARIANT_ARGUMENT["fwd"])
    compiled(x.q, x.k, x.v, x.g)
    with batch_invariant():
        compiled(x.q, x.k, x.v, x.g)
        with batch_invariant(False):
            compiled(x.q, x.k, x.v, x.g)
    assert arguments == [False, True]  # two graphs, the first one reused


@pytest.mark.parametrize("for_backward_bytes", [-1, 0])
def test_what_to_keep_reaches_the_graph(for_backward_bytes, monkeypatch):
    """And so the keys of torch's caches: -1, the plan's choice, or nothing."""
    monkeypatch.setattr(ops, "_for_backward_bytes", for_backward_bytes)
    x = make_inputs(1, 20, 1, 4, 4)
    compiled, arguments = compile_noting(11)
    compiled(x.q, x.k, x.v, x.g)
    assert arguments == [for_backward_bytes]
