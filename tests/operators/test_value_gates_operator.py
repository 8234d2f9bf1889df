"""`chunk_gla` with gates on values as an operator: gradcheck, opcheck, compile, autocast."""

import pytest
import torch
from recurrence import GATINGS, make_recurrence
from torch._dynamo.testing import CompileCounterWithBackend

from gla_ext import chunk_gla

ops = torch.ops.gla_ext


def call(q, k, v, gk, gv, initial_state, cu_seqlens=None, scale=None, state_v_first=False):
    return chunk_gla(q, k, v, gk, scale, initial_state, True, state_v_first, cu_seqlens, gv=gv)


@pytest.mark.parametrize("gate", [0.0, 0.1, 1.0, 2.0, 10.0])
@pytest.mark.parametrize("gating", ["none", "gv", "both"])
@pytest.mark.parametrize(
    "options, fast",
    [
        (((1, 20, 2, 3, 2), {}), False),
        (((1, 70, 1, 2, 2), {}), False),
        (((2, 130, 2, 5, 3), {}), True),
        (((1, 80, 1, 2, 1), {"lengths": (3, 0, 66, 5)}), False),
        (((1, 70, 1, 2, 3), {"states": False}), True),
    ],
)
def test_gradcheck(options, fast, gating, gate):
    sizes, rest = options
    x = make_recurrence(*sizes, dtype=torch.float64, gating=gating, gate=gate, **rest)
    leaves = {n: t.requires_grad_() for n, t in x.leaves().items() if t is not None}

    def function(*given):
        operands = dict.fromkeys(x.leaves()) | dict(zip(leaves, given, strict=True))
        return call(**operands, cu_seqlens=x.cu_seqlens, scale=0.7)

    assert torch.autograd.gradcheck(function, [*leaves.values()], fast_mode=fast)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("gating", GATINGS)
def test_opcheck(device, gating, packed, requires_grad):
    lengths = (30, 0, 36) if packed else None
    x = make_recurrence(
        1 if packed else 2, 70, 2, 8, 12, gating=gating, states=packed, lengths=lengths,
        device=device,
    )  # fmt: skip
    operands = x.leaves()
    if requires_grad:
        operands = {n: t if t is None else t.requires_grad_() for n, t in operands.items()}
    arguments = (*operands.values(), x.cu_seqlens)
    flags = (packed, False, packed)
    torch.library.opcheck(ops.chunk_gla_fwd.default, (*arguments, None, *flags))
    if not requires_grad:
        arguments = (x.do, x.dht, *arguments, 0.3, False, packed)
        torch.library.opcheck(ops.chunk_gla_bwd.default, arguments)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("gating", ["gv", "both"])
def test_one_graph_for_many_lengths(device, gating, backend):
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    for T in (70, 2, 64, 130):
        x = make_recurrence(2, T, 2, 8, 12, gating=gating, device=device)
        results = []
        for function in (call, compiled):
            leaves = {
                n: None if t is None else t.clone().requires_grad_() for n, t in x.leaves().items()
            }
            outputs = function(**leaves)
            torch.autograd.backward(outputs, [x.do, x.dht])
            results.append([*outputs, *(t.grad for t in leaves.values() if t is not None)])
        for eager, graph in zip(*results, strict=True):
            assert torch.equal(graph, eager)
    assert counter.frame_count == 1


def test_export(device):
    class Module(torch.nn.Module):
        def forward(self, q, k, v, gv):
            return chunk_gla(q, k, v, None, gv=gv)[0]

    x = make_recurrence(2, 70, 2, 8, 12, device=device)
    T = torch.export.Dim("T", min=1, max=4096)
    arguments = (x.q, x.k, x.v, x.gv)
    exported = torch.export.export(Module(), arguments, dynamic_shapes=({1: T},) * 4)
    y = make_recurrence(2, 131, 2, 8, 12, device=device)
    arguments = (y.q, y.k, y.v, y.gv)
    assert torch.equal(exported.module()(*arguments), Module()(*arguments))


def test_autocast_casts_q_k_v_alone(device):
    x = make_recurrence(2, 70, 2, 8, 12, device=device).map(lambda t: t.requires_grad_())
    with torch.autocast(device, dtype=torch.bfloat16):
        o, final_state = call(**x.leaves())
    short = x.leaves() | {n: getattr(x, n).bfloat16() for n in "qkv"}
    assert o.dtype == torch.bfloat16 and final_state.dtype == torch.float32
    assert torch.equal(o, call(**short)[0])
    o.float().sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in x.leaves().values())


def test_vmap_equals_a_loop():
    x = make_recurrence(3, 70, 2, 8, 12)

    def one(q, k, v, gv):
        return chunk_gla(q[None], k[None], v[None], None, gv=gv[None])[0][0]

    expected = chunk_gla(x.q, x.k, x.v, None, gv=x.gv)[0]
    assert torch.equal(torch.vmap(one)(x.q, x.k, x.v, x.gv), expected)


def test_no_gates_at_all_is_linear_attention(device):
    x = make_recurrence(2, 130, 2, 8, 12, states=False, device=device).map(torch.Tensor.double)
    if device == "cuda":
        x = x.map(torch.Tensor.float)
    o, _ = chunk_gla(x.q, x.k, x.v, None, 1.0)
    A = torch.einsum("bihk,bjhk->bhij", x.q, x.k).tril()
    torch.testing.assert_close(o, torch.einsum("bhij,bjhv->bihv", A, x.v), rtol=1e-4, atol=1e-4)
