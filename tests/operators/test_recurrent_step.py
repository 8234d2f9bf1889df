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

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_layout = pytest.mark.parametrize("state_v_first", [False, True])
by_gating = pytest.mark.parametrize("gating", GATINGS)
SHORT = (torch.bfloat16, torch.float16)
STORED = [(dtype, None) for dtype in DTYPES]  # what tokens and states are kept in
STORED += [(dtype, short) for dtype in (torch.float32, torch.bfloat16) for short in SHORT]
by_stored = pytest.mark.parametrize(("dtype", "state_dtype"), STORED, ids=str)


@by_stored
@by_gating
@by_layout
@pytest.mark.parametrize("T", [1, 5])
def test_step(device, T, state_v_first, gating, dtype, state_dtype):
    server = Server(device, T, dtype, gating, state_v_first, state_dtype)
    o = recurrent_gla_step_(**server.arguments())
    expected, pool = server.expected()
    assert o.dtype == dtype and server.pool.dtype == pool.dtype
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


def test_without_slots_every_row_has_its_own(device):
    server = Server(device, 1)
    server.pool, server.slots = server.pool[:6], None
    o = recurrent_gla_step_(**server.arguments())
    expected, states = fused_recurrent_gla(
        **server.tokens, initial_state=server.before[:6], output_final_state=True
    )
    assert torch.equal(o, expected)
    assert torch.equal(server.pool, states)


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


@by_stored
@by_layout
@by_gating
@pytest.mark.parametrize("accepted_dtype", [torch.int32, torch.int64], ids=str)
def test_commit_of_what_is_accepted(
    device, accepted_dtype, gating, state_v_first, dtype, state_dtype
):
    T, counts = 6, (0, 3, 2, 5, 6, 1)
    server = Server(device, T, dtype, gating, state_v_first, state_dtype)
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
