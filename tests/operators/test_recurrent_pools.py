"""Pools in 16 bits, slots to write to, and outputs that are given."""

import pytest
import torch
from common import assert_close
from recurrence import Server, assert_verified, make_recurrence

from gla_ext import (
    recurrent_gla_commit_,
    recurrent_gla_step_,
    recurrent_gla_verify,
)

SHORT = (torch.bfloat16, torch.float16)
by_state_dtype = pytest.mark.parametrize("state_dtype", SHORT, ids=str)
by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
by_layout = pytest.mark.parametrize("state_v_first", [False, True])
SIZES = [
    *[(3, 20, 28), (2, 64, 64), (1, 128, 72), (1, 200, 33), (1, 256, 64), (1, 320, 24)],
    *[(1, 512, 40), (1, 512, 1024), (1, 1000, 1016)],
]


# Pools in 16 bits: fp32 arithmetic, rounded once when a state is written.


@by_layout
@by_state_dtype
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("T", [1, 2, 9])
def test_head_sizes(device, T, sizes, state_dtype, state_v_first):
    options = {"state_v_first": state_v_first, "state_dtype": state_dtype, "sizes": sizes}
    server = Server(device, T, torch.bfloat16, **options)
    verified = recurrent_gla_verify(**server.arguments())
    assert torch.equal(server.pool, server.before)
    o = recurrent_gla_step_(**server.arguments())
    expected, pool = server.expected()
    assert torch.equal(o[server.valid], expected)
    assert torch.equal(server.pool, pool)
    assert_verified(verified, o)


@pytest.mark.cuda
@by_layout
@by_state_dtype
def test_blocks_of_several_tiles(state_dtype, state_v_first):
    """More rows than a GPU has at once: a block takes all values of a head, the last tile odd."""
    x = make_recurrence(700, 1, 1, 512, 56, gating="both", device="cuda")
    x = x.v_first() if state_v_first else x
    tokens = {n: getattr(x, n) for n in ("q", "k", "v", "gk", "gv")}
    pool = x.initial_state.to(state_dtype, memory_format=torch.contiguous_format)
    wide, options = pool.float(), {"state_v_first": state_v_first}
    o = recurrent_gla_step_(**tokens, state=pool, **options)
    assert torch.equal(o, recurrent_gla_step_(**tokens, state=wide, **options))
    assert torch.equal(pool, wide.to(state_dtype))


@by_layout
@by_state_dtype
def test_verify_is_as_exact_as_with_wide_states(device, state_dtype, state_v_first):
    """To fp32 rounding: 16-bit states are what tensor cores take as they are."""
    options = {"state_v_first": state_v_first, "state_dtype": state_dtype, "sizes": (2, 128, 100)}
    server = Server(device, 12, torch.float32, **options)
    o = recurrent_gla_verify(**server.arguments())
    wide = server.arguments() | {"state": server.pool.float()}
    assert_close(o, recurrent_gla_verify(**wide), 1e-6)
    double = {n: t if t is None else t.double().cpu() for n, t in server.tokens.items()}
    pools = {"state": server.pool.double().cpu(), "slots": server.slots.cpu()}
    truth = recurrent_gla_verify(**double, **pools, **server.options)
    assert_close(o.cpu(), truth, 1e-6)


@by_state_dtype
def test_a_call_rounds_once(device, state_dtype):
    """Eight tokens in one call keep what single steps lose."""
    q = torch.ones(1, 8, 1, 1, device=device)
    small = torch.finfo(state_dtype).eps / 4  # of 1: a quarter of a unit in the last place
    tokens = {"q": q, "k": q, "v": q * small}
    together = torch.ones(1, 1, 1, 1, device=device, dtype=state_dtype)
    alone = together.clone()
    o = recurrent_gla_step_(**tokens, state=together)
    assert together.item() == 1 + 2 * torch.finfo(state_dtype).eps
    assert torch.equal(o.flatten(), 1 + small * torch.arange(1, 9, device=device))
    for t in range(8):
        o = recurrent_gla_step_(**{n: x[:, t : t + 1] for n, x in tokens.items()}, state=alone)
        assert o.item() == 1 + small
    assert alone.item() == 1


def test_overflow_of_fp16_states_is_infinite(device):
    """o of the token that overflows is still what fp32 makes of it."""
    x = torch.full((1, 1, 1, 1), 60000.0, device=device)
    pool = x.half()
    o = recurrent_gla_step_(torch.ones_like(x), torch.ones_like(x), x, state=pool)
    assert o.item() == 120000
    assert pool.item() == torch.inf


@by_layout
@by_state_dtype
def test_nan_and_infinity_in_short_states(device, state_dtype, state_v_first):
    options = {"state_v_first": state_v_first, "state_dtype": state_dtype, "sizes": (2, 64, 40)}
    server = Server(device, 3, gating="gk", **options)
    clean = recurrent_gla_verify(**server.arguments())
    where = (0, 1, 7, 5) if state_v_first else (0, 1, 5, 7)  # key 5, value 7 of row 2
    for value in (torch.nan, torch.inf):
        server.pool[where] = value
        o = recurrent_gla_verify(**server.arguments())
        assert not o[2, :, 1, 7].isfinite().any()
        o[2, :, 1, 7] = clean[2, :, 1, 7]
        assert torch.equal(o, clean)


# Slots to write to.


@by_layout
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("T", [0, 1, 5])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_copy_on_write(device, index_dtype, T, state_dtype, state_v_first):
    """Rows 0 to 2 go on from one beginning; row 3 has none, row 4 writes nothing, row 5 back."""
    read, write = (2, 2, 2, -1, 3, 1), (0, 4, 5, 6, torch.iinfo(index_dtype).max, 1)
    server = Server(device, T, state_v_first=state_v_first, state_dtype=state_dtype)
    server.slots = torch.tensor(read, device=device, dtype=index_dtype)
    write_slots = torch.tensor(write, device=device, dtype=index_dtype)
    o = recurrent_gla_step_(**server.arguments(), write_slots=write_slots)
    server.valid = torch.tensor([0, 1, 2, 4, 5], device=device)
    before, states = server.before, [server.before[n] for n in read]
    server.before = torch.stack(states)
    server.slots = torch.arange(6, device=device)
    expected, after = server.expected()
    assert torch.equal(o[server.valid], expected)
    assert not o[3].any()
    for row in (0, 1, 2, 5):
        assert torch.equal(server.pool[write[row]], after[row]), row
    assert torch.equal(server.pool[2:4], before[2:4])  # rows that nobody writes
    assert torch.equal(server.pool[6], before[6])


@pytest.mark.parametrize("packed", [False, True])
def test_commit_to_other_slots(device, packed):
    """A row without accepted tokens copies its state."""
    T, counts = 4, [0, 3, 4, 2, 1, 0]
    server = Server(device, T)
    arguments = server.arguments("q")
    if packed:
        tokens = {n: server.tokens[n].flatten(0, 1)[None] for n in ("k", "v", "gk", "gv")}
        arguments |= tokens | {"cu_seqlens": torch.arange(0, 6 * T + 1, T, device=device)}
    arguments["slots"] = torch.tensor([2, 2, 3, -1, 1, 1], device=device)
    write_slots = torch.tensor([0, 4, 5, 6, -1, 1], device=device)
    accepted = torch.tensor(counts, device=device)
    recurrent_gla_commit_(**arguments, accepted=accepted, write_slots=write_slots)
    expected = server.before.clone()
    for row, to in ((0, 0), (1, 4), (2, 5)):
        tokens = {n: x[row : row + 1, : counts[row]] for n, x in server.tokens.items()}
        state = server.before[arguments["slots"][row]][None].clone()
        recurrent_gla_step_(**tokens, state=state)
        expected[to] = state[0]
    assert torch.equal(server.pool, expected)


@pytest.mark.cuda
@by_layout
def test_graph_replays_with_other_slots(state_v_first):
    step = Server(
        "cuda", 1, torch.bfloat16, state_dtype=torch.bfloat16, state_v_first=state_v_first
    )
    write_slots, out = step.slots.clone(), torch.empty_like(step.tokens["v"])
    recurrent_gla_step_(**step.arguments(), write_slots=write_slots, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recurrent_gla_step_(**step.arguments(), write_slots=write_slots, out=out)
    for slots in ((0, 1, 2, 3, 4, 5), (6, -1, 3, 2, 1, 0)):
        write_slots.copy_(torch.tensor(slots))
        step.pool.copy_(step.before)
        graph.replay()
        pool = step.pool.clone()
        step.pool.copy_(step.before)
        again = recurrent_gla_step_(**step.arguments(), write_slots=write_slots)
        assert torch.equal(out, again) and torch.equal(step.pool, pool)


SANITIZED = {"aligned": (2, 128, 64), "odd": (1, 33, 65), "wide": (1, 512, 32)}
SANITIZED |= {"widest": (1, 1000, 1016)}


@pytest.mark.cuda
@pytest.mark.sanitizer
@by_state_dtype
@by_layout
@pytest.mark.parametrize("what", SANITIZED)
def test_for_the_sanitizer(what, state_v_first, state_dtype):
    options = {"sizes": SANITIZED[what], "state_dtype": state_dtype, "state_v_first": state_v_first}
    server = Server("cuda", 1, torch.bfloat16, **options)
    write_slots = torch.tensor([1, 2, 3, -1, 5, 0], device="cuda")
    out = torch.empty_like(server.tokens["v"])
    recurrent_gla_step_(**server.arguments(), write_slots=write_slots, out=out)
    assert out.isfinite().all()
