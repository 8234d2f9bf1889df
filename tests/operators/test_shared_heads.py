"""k, v and gates of fewer heads than q, read in place: as if they were repeated, bit for bit."""

import re

import pytest
import torch
from common import DTYPES, LAYOUTS, PACKED_LENGTHS, assert_same_bits, relayout
from recurrence import (
    GATINGS,
    SHARED,
    assert_chunked_close,
    assert_results_close,
    chunked,
    exact,
    make_recurrence,
    ours,
    repeated,
)
from torch._dynamo.testing import CompileCounterWithBackend

from gla_ext import (
    chunk_gla,
    fused_recurrent_gla,
    recurrent_gla_commit_,
    recurrent_gla_step_,
    recurrent_gla_verify,
    reference,
)

ops = torch.ops.gla_ext
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_gating = pytest.mark.parametrize("gating", GATINGS)
by_heads = pytest.mark.parametrize("H, HK", [(4, 2), (6, 3), (6, 2), (3, 1)])
by_packing = pytest.mark.parametrize("lengths", [None, PACKED_LENGTHS], ids=["batch", "packed"])
by_operator = pytest.mark.parametrize("operator", [chunked, ours], ids=["chunk", "recurrent"])
CLOSE = {chunked: assert_chunked_close, ours: assert_results_close}


def inputs(H=4, HK=2, T=70, K=8, V=12, lengths=None, B=2, **options):
    B, T = (B, T) if lengths is None else (1, 165)
    return make_recurrence(B, T, H, K, V, lengths=lengths, **options).sharing(HK)


@by_operator
@by_heads
@by_packing
@by_gating
@by_dtype
def test_bits_of_repeats_and_the_truth(operator, H, HK, lengths, gating, dtype):
    """The gradients are those that autograd sums over the repeats."""
    x = inputs(H, HK, K=20, V=28, lengths=lengths, gating=gating, dtype=dtype)
    results = operator(x)
    assert_same_bits(results, operator(x, repeat=True))
    CLOSE[operator](results, exact(x), x)


@by_operator
@pytest.mark.parametrize("gate", [0.1, 10.0, "reset"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_gate_and_layout(operator, layout, gate):
    x = inputs(gate=gate).map(lambda t: relayout(t, layout))
    results = operator(x)
    assert_same_bits(results, operator(x, repeat=True))
    CLOSE[operator](results, exact(x), x)


@by_operator
@by_packing
def test_without_states(operator, lengths):
    x = inputs(lengths=lengths, states=False)
    assert_same_bits(operator(x), operator(x, repeat=True))


@pytest.mark.parametrize("mode", ["sweep", "materialised"])
def test_both_modes_on_cpu(mode, monkeypatch):
    monkeypatch.setenv("GLA_EXT_CPU_MODE", mode)
    x = inputs(T=130)
    assert_same_bits(chunked(x), chunked(x, repeat=True))


def test_state_layout_and_reverse_time():
    x = inputs().v_first()
    for operator, options in ((chunked, {}), (ours, {"reverse": True})):
        options = {"state_v_first": True} | options
        assert_same_bits(operator(x, **options), operator(x, repeat=True, **options))


@by_packing
def test_every_form_of_the_reference(lengths):
    """The recurrence is the definition, and repeats; so do the others."""
    x = inputs(6, 2, gating="gk", dtype=torch.float64, lengths=lengths)
    expected = exact(x)
    operands = (x.q, x.k, x.v, x.gk, None, x.initial_state)
    forward = reference.chunked_forward(*operands, cu_seqlens=x.cu_seqlens)
    backward = reference.chunked_backward(x.do, *operands, x.dht, x.cu_seqlens)
    results = forward._asdict() | backward._asdict()
    fast = reference.chunk_gla(*operands, x.cu_seqlens)
    compared = {name: results["dg" if name == "dgk" else name] for name in expected}
    assert_results_close(compared, expected, x)
    assert_results_close(fast._asdict(), {n: expected[n] for n in fast._fields}, x)
    if lengths is None:
        o = reference.parallel(*operands)
        assert_results_close({"o": o}, {"o": expected["o"]}, x)


@by_operator
@by_packing
def test_gradcheck(operator, lengths):
    call = {chunked: chunk_gla, ours: fused_recurrent_gla}[operator]
    x = inputs(4, 2, T=66, K=2, V=1, B=1, lengths=lengths, dtype=torch.float64)
    leaves = {n: t.requires_grad_() for n, t in x.leaves().items()}
    gates = {"gv": leaves.pop("gv")}

    def function(q, k, v, g, initial_state, gv):
        return call(
            q, k, v, g, initial_state=initial_state, output_final_state=True, gv=gv,
            cu_seqlens=x.cu_seqlens,
        )  # fmt: skip

    assert torch.autograd.gradcheck(function, [*leaves.values(), *gates.values()], fast_mode=True)


# The pool.


@by_dtype
@by_gating
@pytest.mark.parametrize("state_v_first", [False, True])
def test_pool(device, state_v_first, gating, dtype):
    """Step, verify and commit, with rows without a slot."""
    x = inputs(6, 2, T=5, K=64, V=128, B=4, gating=gating, dtype=dtype, device=device)
    x = x.v_first() if state_v_first else x
    tokens = {name: t for name, t in x.leaves().items() if name != "initial_state"}
    slots, accepted = (torch.tensor(n, device=device) for n in ([2, -1, 3, 0], [5, 5, 2, 0]))
    where = {"slots": slots, "state_v_first": state_v_first}
    pools = []
    for own in (tokens, repeated(tokens)):
        pool = x.initial_state.clone()
        verified = recurrent_gla_verify(**own, state=pool, **where)
        assert torch.equal(pool, x.initial_state)
        q = own.pop("q")
        recurrent_gla_commit_(**own, state=pool, accepted=accepted, **where)
        committed = pool.clone()
        stepped = recurrent_gla_step_(q, **own, state=pool, **where)
        pools.append((verified, committed, stepped, pool))
    for mine, of_repeats in zip(*pools, strict=True):
        assert torch.equal(mine, of_repeats)
    assert not torch.equal(pools[0][1], x.initial_state)


# What is refused.


def raises(message):
    return pytest.raises(ValueError, match="^" + re.escape(message) + "$")


@pytest.mark.parametrize("H, HK", [(4, 3), (3, 4), (4, 0)])
@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_heads_that_do_not_divide(where, H, HK):
    x = inputs(12, HK).to(where)
    message = f"expected HK, the heads of k, to divide H = {H}, got {HK}"
    q, state = x.q[:, :, :H], x.initial_state[:, :H]
    with raises("chunk_gla: " + message):
        chunk_gla(q, x.k, x.v, x.gk)
    with raises("fused_recurrent_gla: " + message):
        fused_recurrent_gla(q, x.k, x.v, x.gk, x.gv)
    for call in (recurrent_gla_step_, recurrent_gla_verify):
        with raises(f"{call.__name__}: " + message):
            call(q, x.k, x.v, state=state)
    with raises("recurrent_gla_commit_: " + message):
        recurrent_gla_commit_(
            x.k, x.v, state=state, accepted=torch.ones(2, dtype=torch.int64, device=where)
        )


def test_all_but_q_have_the_same_heads():
    x = inputs(4, 2)
    for name, last, size in (("v", "V", 12), ("g", "K", 8), ("gv", "V", 12)):
        arguments = {"q": x.q, "k": x.k, "v": x.v, "g": x.gk, "gv": x.gv}
        arguments[name] = arguments[name].repeat_interleave(2, 2)
        shape = f"[B, T, HK, {last}] = [2, 70, 2, {size}], got [2, 70, 4, {size}]"
        with raises(f"chunk_gla: expected {name} to have shape {shape}"):
            chunk_gla(**arguments)


def test_steps_by_themselves_take_every_head():
    x = inputs(4, 2)
    b = torch.zeros_like(x.q)
    with raises(
        "_scores_diagonal: expected k to have shape [B, T, H, K] = [2, 70, 4, 8], got [2, 70, 2, 8]"
    ):
        ops._scores_diagonal(x.q, x.k, b, None, None)


# Tracing.


def forward_calls(x):
    flags = (True, False)
    pool = x.initial_state[: x.q.shape[0]].detach().clone()
    recurrent = (x.q, x.k, x.v, x.gk, x.gv)
    return {
        "chunk_gla_fwd": (*recurrent, x.initial_state, x.cu_seqlens, None, *flags, False),
        "recurrent_gla_fwd": (
            *recurrent,
            x.initial_state,
            x.cu_seqlens,
            None,
            True,
            *flags[1:] * 2,
        ),
        "recurrent_gla_step_": (*recurrent, pool, None, None, False),
        "recurrent_gla_verify": (*recurrent, pool, None, None, False),
    }


def backward_calls(x):
    inputs = (x.do, x.dht, x.q, x.k, x.v, x.gk, x.gv, x.initial_state, x.cu_seqlens)
    return {
        "chunk_gla_bwd": (*inputs, None, False, False),
        "recurrent_gla_bwd": (*inputs, None, False, False),
    }


@by_packing
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", ["chunk_gla_fwd", "recurrent_gla_fwd"])
def test_opcheck_forward(name, requires_grad, lengths):
    x = inputs(lengths=lengths)
    if requires_grad:
        x = x.map(lambda t: t.requires_grad_())
    torch.library.opcheck(getattr(ops, name).default, forward_calls(x)[name])


@by_packing
@pytest.mark.parametrize("name", ["chunk_gla_bwd", "recurrent_gla_bwd"])
def test_opcheck_backward(name, lengths):
    x = inputs(lengths=lengths, dtype=torch.bfloat16)
    torch.library.opcheck(getattr(ops, name).default, backward_calls(x)[name])


@pytest.mark.parametrize("name", ["recurrent_gla_step_", "recurrent_gla_verify"])
def test_opcheck_pool(name):
    x = inputs(T=3)
    torch.library.opcheck(getattr(ops, name).default, forward_calls(x)[name])
    arguments = (x.k, x.v, x.gk, x.gv, x.initial_state.clone(), None, torch.tensor([2, 0]), False)
    torch.library.opcheck(ops.recurrent_gla_commit_.default, arguments)


@pytest.mark.parametrize("name", ["chunk_gla_bwd", "recurrent_gla_bwd"])
def test_shapes_without_memory(name):
    x = inputs().to("meta")
    gradients = getattr(ops, name)(*backward_calls(x)[name])
    of = (x.q, x.k, x.v, x.gk, x.gv, x.initial_state)
    assert [t.shape for t in gradients] == [t.shape for t in of]


def loss(call, *leaves):
    q, k, v, gk, gv, initial_state = leaves
    o, final_state = call(q, k, v, gk, gv=gv, initial_state=initial_state, output_final_state=True)
    return o.sin().sum() + final_state.square().sum()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("call", [chunk_gla, fused_recurrent_gla])
def test_compiles_whole_once_for_many_lengths(call, backend):
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    for T in (70, 2, 65):
        leaves = [t.requires_grad_() for t in inputs(T=T).leaves().values()]
        results = [torch.autograd.grad(loss(c, *leaves), leaves) for c in (call, compiled)]
        for eager, graph in zip(*results, strict=True):
            assert torch.equal(graph, eager)
    assert counter.frame_count == 1


def test_any_number_of_heads_in_one_graph():
    """The heads of q and of k are symbols of their own."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(chunk_gla, fullgraph=True, backend=counter)
    for H, HK in ((4, 2), (6, 3), (10, 2), (12, 4)):
        x = inputs(H, HK)
        for t in (x.q, x.k, x.v, x.gk):
            torch._dynamo.mark_dynamic(t, 2)
        arguments = (x.q, x.k, x.v, x.gk)
        assert torch.equal(compiled(*arguments)[0], chunk_gla(*arguments)[0])
    assert counter.frame_count == 1


class Module(torch.nn.Module):
    def forward(self, q, k, v, g):
        return chunk_gla(q, k, v, g, output_final_state=True)


def test_export():
    x = inputs()
    T = torch.export.Dim("T", min=2, max=4096)
    example = (x.q, x.k, x.v, x.gk)
    program = torch.export.export(Module(), example, dynamic_shapes=({1: T},) * 4)
    x = inputs(T=33)
    arguments = (x.q, x.k, x.v, x.gk)
    for got, wanted in zip(program.module()(*arguments), Module()(*arguments), strict=True):
        assert torch.equal(got, wanted)


def test_autocast_keeps_dtypes_of_gradients():
    x = inputs().map(lambda t: t.requires_grad_())
    with torch.autocast("cpu", torch.bfloat16):
        o, _ = chunk_gla(x.q, x.k, x.v, x.gk, gv=x.gv)
        gradients = torch.autograd.grad(o.float().sum(), [getattr(x, name) for name in SHARED])
    assert o.dtype == torch.bfloat16
    assert all(t.dtype == torch.float32 for t in gradients)
