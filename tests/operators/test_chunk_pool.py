"""`chunk_gla_`: prompts on a pool of states, in place, and checkpoints."""

import pytest
import torch
from common import DTYPES, assert_close
from pool_inputs import HAS_INITIAL, N, P, Prompts

from gla_ext import batch_invariant, chunk_gla_, recurrent_gla_step_

by_packing = pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
by_layout = pytest.mark.parametrize("v_first", [False, True])
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def assert_same(prompts, o):
    expected, pool = prompts.expected()
    assert o.dtype == expected.dtype
    assert torch.equal(o, expected)
    assert torch.equal(prompts.pool, pool)


@by_dtype
@by_packing
@by_layout
def test_is_chunk_gla_between_gather_and_scatter(device, v_first, packed, dtype, head):
    prompts = Prompts(device, packed, sizes=(2, *head), v_first=v_first, dtype=dtype)
    assert_same(prompts, prompts.run())


@by_packing
@pytest.mark.parametrize("gate", [0.0, 10.0, "reset"])
def test_gates(device, packed, gate, head):
    prompts = Prompts(device, packed, sizes=(2, *head), dtype=torch.bfloat16, gate=gate)
    assert_same(prompts, prompts.run())


@by_packing
@pytest.mark.parametrize("kind", ["values", "heads", "none"])
def test_other_gates(device, packed, kind):
    prompts = Prompts(device, packed, gv=kind == "values", dtype=torch.bfloat16)
    if kind == "heads":
        prompts.tokens["g"] = prompts.tokens["g"][..., 0]
    if kind == "none":
        prompts.tokens["g"] = None
    assert_same(prompts, prompts.run())


def test_out_with_gates_on_values(device):
    prompts, plain = (Prompts(device, True, gv=True) for _ in range(2))
    expected = plain.run()
    out = torch.full_like(expected, torch.nan)
    prompts.run(out=out)
    assert torch.equal(out, expected) and torch.equal(prompts.pool, plain.pool)


@by_packing
@pytest.mark.parametrize("left_out", ["slots", "write_slots", "has_initial_state"])
def test_defaults(device, packed, left_out):
    prompts = Prompts(device, packed)
    prompts.rows[left_out] = None
    if left_out == "slots":
        prompts.pool = prompts.pool[:N]
        prompts.rows["write_slots"] = None
        o = prompts.run()
        expected, pool = prompts.expected()
        assert torch.equal(o, expected) and torch.equal(prompts.pool, pool[:N])
    else:
        assert_same(prompts, prompts.run())


@pytest.mark.sanitizer
@pytest.mark.parametrize("packed, T", [(True, 150), (False, 150), (False, 1)])
@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float16], ids=str)
@by_layout
def test_short_states(device, v_first, storage, packed, T, head):
    sizes, dtypes = (2, *head), {"storage": storage, "dtype": torch.bfloat16}
    prompts = Prompts(device, packed, T=T, sizes=sizes, v_first=v_first, **dtypes)
    assert_same(prompts, prompts.run())


def test_an_empty_pool(device):
    for prompts in (Prompts(device, True), Prompts(device, True, dtype=torch.float16, gv=True)):
        o = prompts.run(state=prompts.pool[:0], write_slots=None)
        assert not o.any() and o.dtype == prompts.tokens["v"].dtype


def test_several_go_on_from_one_row(device):
    prompts = Prompts(device, False)
    prompts.rows = {
        "slots": prompts.indices([3] * N),
        "write_slots": prompts.indices([0, 1, 2, -1, 4, 5, 6]),
        "has_initial_state": None,
    }
    assert_same(prompts, prompts.run())


def run_piece(prompts, part, packed):
    """o of some of every prompt's tokens, in a batch or packed; after the first piece all go on."""
    tokens = {name: t[:, part].contiguous() for name, t in prompts.tokens.items()}
    count, options = tokens["q"].shape[1], {}
    if part.start:
        options["has_initial_state"] = None
    if packed:
        options["cu_seqlens"] = prompts.indices(range(N + 1)) * count
        tokens = {name: t.flatten(0, 1)[None] for name, t in tokens.items()}
    return prompts.run(**tokens, **options).view(N, count, *prompts.tokens["v"].shape[2:])


@by_packing
def test_pieces_of_a_prompt_are_the_whole(device, packed):
    """A prompt in two pieces on the pool, cut at a chunk, then a step of decoding."""
    whole, pieces = (Prompts(device, False, T=193) for _ in range(2))
    whole.rows["write_slots"] = pieces.rows["write_slots"] = None
    o = whole.run()
    found = [run_piece(pieces, part, packed) for part in (slice(0, 128), slice(128, 192))]
    token = {name: t[:, 192:].contiguous() for name, t in pieces.tokens.items()}
    rows = {"state": pieces.pool, "slots": pieces.rows["slots"]}
    found.append(recurrent_gla_step_(gk=token.pop("g"), **token, **rows))
    assert_close(torch.cat(found, 1), o, 1e-5)
    assert_close(pieces.pool, whole.pool, 1e-5)


@by_packing
@pytest.mark.parametrize("cut", [1, 63, 64, 65, 128, 191])
def test_batch_invariant_pieces(device, packed, cut, head):
    """Cut between two chunks, two pieces have the bits of one, since chunks have the same tokens.
    Cut elsewhere, they differ by rounding.
    """
    whole, pieces = (Prompts(device, False, T=192, sizes=(2, *head)) for _ in range(2))
    whole.rows["write_slots"] = pieces.rows["write_slots"] = None
    with batch_invariant():
        o = whole.run()
        found = torch.cat(
            [run_piece(pieces, part, packed) for part in (slice(0, cut), slice(cut, 192))], 1
        )
    if cut % 64 == 0:
        assert torch.equal(found, o) and torch.equal(pieces.pool, whole.pool)
    assert_close(found, o, 1e-5)
    assert_close(pieces.pool, whole.pool, 1e-5)


# Checkpoints.


@by_packing
@by_layout
@pytest.mark.parametrize("every", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_checkpoints(device, dtype, every, v_first, packed, head):
    prompts = Prompts(device, packed, sizes=(2, *head), v_first=v_first, dtype=dtype)
    asks, made = prompts.checkpoints(every)
    with batch_invariant():
        assert_same(prompts, prompts.run(**asks))
        for n, count, row in made:
            assert torch.equal(asks["checkpoints"][row], prompts.prefix(n, count)), (n, count)
    others = set(range(len(asks["checkpoints"]))) - {row for *_, row in made}
    assert asks["checkpoints"][list(others)].isnan().all()


def test_checkpoints_of_strong_gates(device, head):
    prompts = Prompts(device, True, sizes=(2, *head), dtype=torch.bfloat16, gate="reset")
    asks, made = prompts.checkpoints()
    with batch_invariant():
        prompts.run(**asks)
        for n, count, row in made:
            assert torch.equal(asks["checkpoints"][row], prompts.prefix(n, count)), (n, count)


def test_checkpoints_in_the_pool(device):
    """Rows that no sequence has, by their own numbers and some of them not wanted."""
    prompts = Prompts(device, False, T=150)
    slots = [-1] * (2 * N)
    slots[0], slots[1], slots[7], slots[4] = 7, P, 8, 5
    o = prompts.run(checkpoint_every=64, checkpoint_slots=prompts.indices(slots))
    expected, pool = prompts.expected()
    assert torch.equal(o, expected)
    for n, count, row in ((0, 64, 7), (3, 128, 8), (2, 64, 5)):
        assert_close(prompts.pool[row], prompts.prefix(n, count), 1e-6)
        pool[row] = prompts.pool[row]
    assert torch.equal(prompts.pool, pool)


@by_packing
def test_checkpoints_one_after_the_other(device, packed):
    prompts = Prompts(device, packed, storage=torch.bfloat16, dtype=torch.bfloat16)
    asks, made = prompts.checkpoints()
    total = len(asks.pop("checkpoint_slots"))
    prompts.run(**asks)
    for n, count, row in made:  # there the rows were total .. 1
        found, expected = asks["checkpoints"][total - row], prompts.prefix(n, count)
        assert_close(found.float(), expected, 0.004)


def test_offsets_of_checkpoints_that_are_wrong(device):
    """Nothing is written but the rows that are there."""
    prompts = Prompts(device, True)
    asks, _ = prompts.checkpoints()
    whole = torch.full((60, *prompts.pool.shape[1:]), torch.nan, device=device)
    into = whole[20:28]
    for starts in ([0] * (N + 1), [5, 3, 2, 9, 100, 7, 8, 1], [-4, 60, -4, 60, -4, 60, -4, 60]):
        numbers = prompts.indices(starts)
        prompts.run(**asks | {"checkpoints": into, "checkpoint_cu_starts": numbers})
        prompts.run(checkpoint_every=64, checkpoints=into, checkpoint_cu_starts=numbers)
    assert whole[:20].isnan().all() and whole[28:].isnan().all()


def test_going_on_from_a_checkpoint(device):
    prompts = Prompts(device, False, T=192)
    prompts.rows["write_slots"] = None
    asks, made = prompts.checkpoints(128)
    o = prompts.run(**asks)
    rest = {name: t[:, 128:].contiguous() for name, t in prompts.tokens.items()}
    slots = prompts.indices([-1] * N)
    for n, _, row in made:
        slots[n] = row
    again = chunk_gla_(
        **rest, state=asks["checkpoints"], slots=slots, write_slots=slots.new_full((N,), -1)
    )
    assert_close(again, o[:, 128:], 1e-5)


def test_batch_invariance(device):
    """A sequence's o and state are the same alone and packed among others, one of them skipped."""
    with batch_invariant():
        prompts = Prompts(device, True, dtype=torch.bfloat16, sizes=(2, 24, 40))
        o = prompts.run()
        for n in (0, 3, 6):
            tokens = {name: prompts.of(t, n).contiguous() for name, t in prompts.tokens.items()}
            state = prompts.before.clone()
            alone = chunk_gla_(**tokens, state=state, slots=prompts.rows["slots"][n : n + 1])
            if HAS_INITIAL[n]:
                assert torch.equal(alone, prompts.of(o, n)), n
