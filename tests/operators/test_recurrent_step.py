"""Decoding on a pool of states: step, and verify and commit for speculative decoding."""

import pytest
import torch
from common import DTYPES, assert_close
from recurrence import GATINGS, SLOTS, Server, assert_verified, make_recurrence

from gla_ext import (
    fused_recurrent_gla,
    recurrent_gla_commit_,
    recurrent_gla_step_,
    recurrent_gla_verify,
)

ops = torch.ops.gla_ext
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_layout = pytest.mark.parametrize("state_v_first", [False, True])
by_gating = pytest.mark.parametrize("gating", GATINGS)


@by_dtype
@by_gating
@by_layout
def test_step(device, state_v_first, gating, dtype):
    server = Server(device, 1, dtype, gating, state_v_first)
    o = recurrent_gla_step_(**server.arguments())
    expected, pool = server.expected()
    assert o.dtype == dtype
    assert torch.equal(o[server.valid], expected)
    assert not o[[1, 3, 5]].any()
    assert torch.equal(server.pool, pool)


@by_dtype
@by_layout
def test_many_steps_are_the_recurrence(device, state_v_first, dtype):
    T = 17
    server = Server(device, T, dtype, state_v_first=state_v_first)
    expected, pool = server.expected()
    arguments, pieces = server.arguments(), []
    for t in range(T):
        token = {n: x[:, t : t + 1] for n, x in server.tokens.items()}
        pieces.append(recurrent_gla_step_(**(arguments | token)))
    assert torch.equal(torch.cat(pieces, 1)[server.valid], expected)
    assert torch.equal(server.pool, pool)

    together = Server(device, T, dtype, state_v_first=state_v_first)
    assert torch.equal(recurrent_gla_step_(**together.arguments()), torch.cat(pieces, 1))
    assert torch.equal(together.pool, pool)


@by_layout
@pytest.mark.parametrize("slots_dtype", [torch.int32, torch.int64], ids=str)
def test_slots_of_either_type(device, slots_dtype, state_v_first):
    server = Server(device, 1, state_v_first=state_v_first)
    server.slots = server.slots.to(slots_dtype)
    recurrent_gla_step_(**server.arguments())
    assert torch.equal(server.pool, server.expected()[1])


def test_slots_far_outside(device):
    server = Server(device, 1)
    for slots in ([7] * 6, [-1] * 6, [2**62, -(2**62), 2**31, -(2**31), 100, 7]):
        o = recurrent_gla_step_(
            **(server.arguments() | {"slots": torch.tensor(slots, device=device)})
        )
        assert not o.any()
        assert torch.equal(server.pool, server.before)


def test_without_slots_every_row_has_its_own(device):
    server = Server(device, 1)
    server.pool, server.slots = server.pool[:6], None
    o = recurrent_gla_step_(**server.arguments())
    expected, states = fused_recurrent_gla(
        **server.tokens, initial_state=server.before[:6], output_final_state=True
    )
    assert torch.equal(o, expected)
    assert torch.equal(server.pool, states)


@pytest.mark.parametrize("view", ["rows of a wider pool", "a layer of many", "misaligned"])
@by_layout
def test_pools_that_are_views(device, state_v_first, view):
    server = Server(device, 1, state_v_first=state_v_first)
    before = server.before
    if view == "rows of a wider pool":
        whole = before.new_full((14, 3, *before.shape[2:]), torch.nan)
        server.pool = whole[::2]
    elif view == "a layer of many":
        whole = before.new_full((7, 5, 3, *before.shape[2:]), torch.nan)
        server.pool = whole[:, 2]
    else:
        whole = before.new_full((before.numel() + 1,), torch.nan)
        server.pool = whole[1:].view(before.shape)
    server.pool.copy_(before)
    o = recurrent_gla_step_(**server.arguments())
    expected, pool = server.expected()
    assert torch.equal(o[server.valid], expected)
    assert torch.equal(server.pool, pool)
    assert whole.isnan().sum() == whole.numel() - pool.numel()


@by_layout
def test_resets_and_nan(device, state_v_first):
    server = Server(device, 1, state_v_first=state_v_first)
    server.tokens["gk"][0] = -torch.inf
    server.tokens["gv"][2, :, 1] = torch.nan
    o = recurrent_gla_step_(**server.arguments())
    fresh = {n: server.tokens[n][:1] for n in "qkv"}
    assert torch.equal(o[:1], fused_recurrent_gla(**fresh, state_v_first=state_v_first)[0])
    assert o[2, :, 1].isnan().all() and server.pool[0, 1].isnan().all()
    assert not o[2, :, [0, 2]].isnan().any() and not server.pool[0, [0, 2]].isnan().any()


@by_layout
@pytest.mark.parametrize("layout", ["transposed", "sliced", "misaligned", "expanded"])
def test_strides(device, layout, state_v_first):
    server = Server(device, 3, state_v_first=state_v_first, layout=layout)
    server.pool = server.pool.clone(memory_format=torch.contiguous_format)
    plain = {n: t.clone(memory_format=torch.contiguous_format) for n, t in server.tokens.items()}
    other = server.pool.clone()
    o = recurrent_gla_step_(**server.arguments())
    assert torch.equal(o, recurrent_gla_step_(**(server.arguments() | plain | {"state": other})))
    assert torch.equal(server.pool, other)


# Speculative decoding.


@by_dtype
@by_layout
@by_gating
@pytest.mark.parametrize("accepted_dtype", [torch.int32, torch.int64], ids=str)
def test_commit_of_what_is_accepted(device, accepted_dtype, gating, state_v_first, dtype):
    T, counts = 6, (0, 3, 2, 5, 6, 1)
    server = Server(device, T, dtype, gating, state_v_first)
    accepted = torch.tensor(counts, dtype=accepted_dtype, device=device)
    assert recurrent_gla_commit_(**server.arguments("q"), accepted=accepted) is None
    expected = server.before.clone()
    for row in server.valid.tolist():
        expected[SLOTS[row]] = server.expected(counts[row])[1][SLOTS[row]]
    assert torch.equal(server.pool, expected)


def test_commit_clamps(device):
    server = Server(device, 3)
    accepted = torch.tensor([-5, 1, 99, 1, 2**31 - 1, 1], device=device)
    recurrent_gla_commit_(**server.arguments("q"), accepted=accepted)
    _, all_of_them = server.expected()
    assert torch.equal(server.pool[4], server.before[4])
    assert torch.equal(server.pool[[0, 6]], all_of_them[[0, 6]])


def test_drafts_may_share_a_state(device):
    server = Server(device, 4)
    together = {n: t[:2] for n, t in server.tokens.items()}
    slots = torch.tensor([3, 3], device=device)
    o = recurrent_gla_verify(**together, state=server.pool, slots=slots)
    for row in range(2):
        alone = {n: t[row : row + 1] for n, t in together.items()}
        expected = recurrent_gla_verify(**alone, state=server.pool, slots=slots[:1])
        assert torch.equal(o[row : row + 1], expected)


def test_speculation_equals_decoding(device):
    """Draft, verify and commit in turns leave what one token after the other does."""
    T, server = 12, Server(device, 12, torch.bfloat16)
    expected, pool = server.expected()
    done = 0
    for drafted, count in ((4, 2), (5, 5), (3, 0), (16, 5)):
        here = slice(done, min(done + drafted, T))
        tokens = {n: t[:, here] for n, t in server.tokens.items()}
        o = recurrent_gla_verify(**(server.arguments() | tokens))
        assert_verified(o[server.valid], expected[:, here])
        accepted = torch.full((6,), count, device=device)
        del tokens["q"]
        recurrent_gla_commit_(**(server.arguments("q") | tokens), accepted=accepted)
        done += count
    assert done == T
    assert torch.equal(server.pool, pool)


def test_bf16_state_rounds_nothing(device):
    """A pool is fp32: hundreds of bf16 steps stay within rounding of the outputs."""
    x = make_recurrence(2, 300, 2, 16, 24, dtype=torch.bfloat16, gate=1 / 64, device=device)
    pool = x.initial_state.clone()
    for t in range(300):
        token = {n: getattr(x, n)[:, t : t + 1] for n in ("q", "k", "v", "gk", "gv")}
        o = recurrent_gla_step_(**token, state=pool)
    double = x.map(torch.Tensor.double).to("cpu")
    truth = fused_recurrent_gla(**double.leaves())[0][:, -1:]
    assert_close(o.cpu(), truth, 0.004)
