"""k, v and gates of fewer heads than q, read in place: as if they were repeated, bit for bit."""

import re

import pytest
import torch
from common import DTYPES, PACKED_LENGTHS, assert_same_bits
from recurrence import (
    CALLS,
    GATINGS,
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
by_packing = pytest.mark.parametrize("lengths", [None, PACKED_LENGTHS], ids=["batch", "packed"])


def inputs(H=4, HK=2, T=70, K=8, V=12, lengths=None, B=2, **options):
    B, T = (B, T) if lengths is None else (1, 165)
    return make_recurrence(B, T, H, K, V, lengths=lengths, **options).sharing(HK)


@by_dtype
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("H, HK", [(6, 3), (6, 2), (3, 1)])
@pytest.mark.parametrize(
    "lengths, states", [(None, True), (None, False), (PACKED_LENGTHS, True)], ids=str
)
def test_bits_of_repeats(call, H, HK, lengths, states, dtype):
    """The gradients are those that autograd sums over the repeats."""
    B, T = (2, 70) if lengths is None else (1, 165)
    x = call.make(B, T, H, 20, 28, lengths=lengths, states=states, dtype=dtype).sharing(HK)
    assert_same_bits(call.run(x), call.run(x, repeat=True))


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


@pytest.mark.parametrize("name", ["chunk_gla_bwd", "recurrent_gla_bwd"])
def test_shapes_without_memory(name):
    x = inputs().to("meta")
    leaves = x.leaves().values()
    gradients = getattr(ops, name)(x.do, x.dht, *leaves, None, None, False, False)
    assert [t.shape for t in gradients] == [t.shape for t in leaves]


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
