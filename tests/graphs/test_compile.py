"""The operators under torch.compile, export and autocast.

Equal bits (see common.py): own sums.
"""

import functools

import pytest
import torch
from common import make_inputs
from models import BATCH_INVARIANT_ARGUMENT
from recurrence import CALLS
from torch._dynamo.testing import CompileCounterWithBackend

from gla_ext import batch_invariant, chunk_gla
from gla_ext.ops import chunk as ops
from gla_ext.ops import (
    chunk_lightning_attn,
    chunk_linear_attn,
    chunk_retention,
    fused_recurrent_lightning_attn,
    fused_recurrent_linear_attn,
    fused_recurrent_retention,
)


def loss(q, k, v, g, h0, call=chunk_gla):
    o, final_state = call(q, k, v, g, initial_state=h0, output_final_state=True)
    return o.sin().sum() + final_state.square().sum()


def gradients(function, x):
    leaves = [t.clone().requires_grad_() for t in (x.q, x.k, x.v, x.g, x.initial_state)]
    value = function(*leaves)
    return [value.detach(), *torch.autograd.grad(value, leaves)]


def linear_forms(q, k, v, *_):
    """Outputs of the operators whose gates are constants, one after the other, and no state."""
    calls = [
        functools.partial(chunk_lightning_attn, layer_idx=1, num_layers=4),
        functools.partial(fused_recurrent_lightning_attn, layer_idx=1, num_layers=4),
        functools.partial(fused_recurrent_linear_attn, normalize=True),
        *(chunk_retention, fused_recurrent_retention, chunk_linear_attn),
    ]
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k.abs(), v))
    o = torch.stack([call(q.abs(), k, v)[0] for call in calls])
    return o, o[:0]


# A function of q, k, v, gates on keys and on values and states, and a draw of these by T.
FORMS = {
    **{name: (call.outputs, call) for name, call in CALLS.items()},
    "linear attention": (linear_forms, CALLS["chunk, none"]),
}


def draw(call, T, device="cpu", HK=2, dtype=torch.float32):
    return call.make(2, T, 4, 8, 12, dtype=dtype, device=device).sharing(HK)


@pytest.mark.parametrize(
    "name, backend",
    [
        *((name, "aot_eager") for name in FORMS),
        *((name, "inductor") for name in ("chunk", "recurrent, both")),
    ],
)
def test_one_graph_for_many_lengths(device, name, backend):
    """With heads that share k, v and gates. The loss stays outside: inductor guards on the size of
    a reduction of its own."""
    function, call = FORMS[name]
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for T in (70, 2, 65):
        x = draw(call, T, device)
        results = []
        for f in (function, compiled):
            leaves = {n: t for n, t in x.leaves().items() if t is not None}
            leaves = {n: t.clone().requires_grad_() for n, t in leaves.items()}
            outputs = f(*(dict.fromkeys(x.leaves()) | leaves).values())
            loss = sum(t.sin().sum() for t in outputs)
            gradients = torch.autograd.grad(loss, [*leaves.values()], allow_unused=True)
            results.append([*outputs, *(t for t in gradients if t is not None)])
        for eager, graph in zip(*results, strict=True):
            assert torch.equal(graph, eager)
    assert counter.frame_count == 1


class Module(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        self.function = FORMS[name][0]

    def forward(self, *leaves):
        return self.function(*leaves)


@pytest.mark.parametrize("name", ["chunk", "chunk, gv", "chunk, a head's", "linear attention"])
def test_export(device, name):
    """One program of any number of tokens."""
    call, T = FORMS[name][1], torch.export.Dim("T", min=2, max=4096)
    shapes = [None if t is None else {1: T} for t in draw(call, 70).leaves().values()]
    shapes[-1] = None  # of the state
    example = tuple(draw(call, 70, device).leaves().values())
    program = torch.export.export(Module(name), example, dynamic_shapes=(tuple(shapes),))
    if name.startswith("chunk"):
        forward = torch.ops.gla_ext.chunk_gla_fwd.default
        assert sum(node.target is forward for node in program.graph.nodes) == 1
    leaves = tuple(draw(call, 33, device).leaves().values())
    for got, wanted in zip(program.module()(*leaves), FORMS[name][0](*leaves), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "name", ["chunk", "chunk, both", "chunk, a head's", "recurrent, both", "recurrent, a head's"]
)
def test_autocast_casts_q_k_v_alone(device, name, compiled):
    call = CALLS[name]
    leaves = draw(call, 70, device).leaves()
    leaves = {n: t if t is None else t.detach().requires_grad_() for n, t in leaves.items()}
    function = call.outputs
    if compiled:
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    with torch.autocast(device, dtype=torch.bfloat16):
        o, final_state = function(**leaves)
    short = leaves | {name: leaves[name].bfloat16() for name in "qkv"}
    assert o.dtype == torch.bfloat16 and final_state.dtype == torch.float32
    assert torch.equal(o, call.outputs(**short)[0])
    o.float().sum().backward()
    assert all(t is None or t.grad.dtype == torch.float32 for t in leaves.values())


def test_packed_compiles_whole(device):
    x = make_inputs(1, 100, 2, 8, 12, lengths=(30, 0, 50), device=device)

    def packed(q, k, v, g, h0, cu_seqlens):
        return chunk_gla(q, k, v, g, initial_state=h0, cu_seqlens=cu_seqlens)[0]

    compiled = torch.compile(packed, fullgraph=True, dynamic=True, backend="aot_eager")
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
        compiled = torch.compile(cut, fullgraph=True, backend="aot_eager")
        for n in (70, 1, 0, 100):
            args = (x.q, x.k, x.v, x.g, torch.tensor(n))
            torch.testing.assert_close(compiled(*args), cut(*args))


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
    """The size is -1 (the plan's choice) or 0 (nothing). It is part of the graph, and so of the
    keys of torch's caches.
    """
    monkeypatch.setattr(ops, "_for_backward_bytes", for_backward_bytes)
    x = make_inputs(1, 20, 1, 4, 4)
    compiled, arguments = compile_noting(11)
    compiled(x.q, x.k, x.v, x.g)
    assert arguments == [for_backward_bytes]
