"""`chunk_gla_` on CUDA: the fused kernels read and write the pool, and make checkpoints; of
sequences of one token the recurrence takes care, whatever else comes in the call.
"""

import pytest
import torch
from common import BAD_OFFSETS, assert_close
from cuda_tools import gpu_of, launched, peak_bytes
from pool_inputs import N, P, Prompts

from gla_ext import batch_invariant, plan, recurrent_gla_step_

pytestmark = pytest.mark.cuda

BF16 = torch.bfloat16
KINDS = {  # H, K, V; gate dtype, or one gate a head
    "small": ((2, 64, 64), BF16),
    "fused": ((1, 64, 136), BF16),
    "fused fp32 gates": ((1, 64, 64), torch.float32),
    "fused 128": ((1, 128, 64), BF16),
    "cluster": ((1, 128, 256), BF16),
    "prepared 128": ((1, 128, 72), torch.float32),
    "prepared 192": ((1, 192, 64), BF16),
    "prepared 256": ((1, 256, 136), BF16),
    **{
        f"a gate a head, {sizes}": (sizes, "head")
        for sizes in ((2, 64, 64), (1, 64, 128), (1, 128, 256), (1, 192, 64), (1, 256, 128))
    },
}
LONG = (700, 1, 0, 1300, 64, 2500, 65)
hopper = pytest.mark.usefixtures("hopper")
by_kind = pytest.mark.parametrize("sizes, gates", KINDS.values(), ids=KINDS)
by_packing = pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
by_layout = pytest.mark.parametrize("v_first", [False, True])
in_nan = pytest.mark.usefixtures("nan_in_fresh_memory")


def make(sizes, gates=BF16, packed=True, **options):
    gate_dtype = torch.float32 if gates == "head" else gates
    options = {"dtype": BF16, "gate_dtype": gate_dtype} | options
    prompts = Prompts("cuda", packed, sizes=sizes, **options)
    if gates == "head":
        prompts.tokens["g"] = prompts.tokens["g"][..., 0]
    return prompts


def make_long(sizes, gates=BF16, packed=True, **options):
    return make(sizes, gates, packed, **{"T": 1500, "lengths": LONG, "gate": 0.01} | options)


def assert_same(prompts, o):
    """With every bit, as the kernels' arithmetic is that of `chunk_gla`."""
    expected, pool = prompts.expected()
    assert torch.equal(o, expected)
    assert torch.equal(prompts.pool, pool)


def assert_near(prompts, o):
    expected, pool = prompts.expected()
    assert_close(o, expected, 0.006)
    assert_close(prompts.pool.float(), pool.float(), 0.006)


def assert_checkpoints(prompts, asks, made, rtol=None):
    for n, count, row in made:
        found, expected = asks["checkpoints"][row], prompts.prefix(n, count)
        if rtol is None:
            assert torch.equal(found, expected), (n, count)
        else:
            assert_close(found.float(), expected, rtol)
    others = set(range(len(asks["checkpoints"]))) - {row for *_, row in made}
    assert asks["checkpoints"][list(others)].isnan().all()


@hopper
@in_nan
@by_kind
@by_packing
@by_layout
@pytest.mark.parametrize("gate", [0.1, "reset"])
def test_is_chunk_gla(gate, v_first, packed, sizes, gates):
    """Batch-invariant also the checkpoints."""
    prompts = make(sizes, gates, packed, v_first=v_first, gate=gate)
    if gates != "head":
        assert_same(prompts, prompts.run())
    prompts.pool.copy_(prompts.before)
    asks, made = prompts.checkpoints()
    with batch_invariant():
        assert_same(prompts, prompts.run(**asks))
        assert_checkpoints(prompts, asks, made)


@hopper
@in_nan
@by_kind
@by_packing
def test_segments(packed, sizes, gates):
    """Sequences that are cut, in place and from one row to another."""
    prompts = make_long(sizes, gates, packed)
    asks, made = prompts.checkpoints(128)
    o = prompts.run(**asks)
    assert_near(prompts, o)
    assert_checkpoints(prompts, asks, made, 0.006)
    in_place = make_long(sizes, gates, packed)
    in_place.rows["write_slots"] = None
    assert torch.equal(in_place.run(), o)


@in_nan
@by_layout
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", [(1, 64, 136), (2, 33, 40)], ids=str)
def test_segments_of_the_steps(sizes, dtype, v_first, monkeypatch):
    monkeypatch.setenv("GLA_EXT_CUDA_PATH", "steps")
    prompts = make_long(sizes, dtype, packed=False, v_first=v_first, dtype=dtype)
    assert plan(N, 1500, *sizes, dtype=dtype).forward_segments == 6
    asks, made = prompts.checkpoints(128)
    o = prompts.run(**asks)
    assert_checkpoints(prompts, asks, made, 1e-5 if dtype == torch.float32 else 0.006)
    prompts.pool.copy_(prompts.before)
    assert_same(prompts, prompts.run())
    prompts.pool.copy_(prompts.before)
    assert torch.equal(prompts.run(write_slots=None), o)


@hopper
@by_kind
@by_packing
@pytest.mark.parametrize("storage", [BF16, torch.float16], ids=str)
def test_short_states(storage, packed, sizes, gates):
    if gates != "head":
        for v_first in (False, True):
            prompts = make(sizes, gates, packed, storage=storage, v_first=v_first, gate=0.1)
            assert_same(prompts, prompts.run())
    prompts = make_long(sizes, gates, packed, storage=storage, gate=0.1)
    asks, made = prompts.checkpoints(128)
    assert_near(prompts, prompts.run(**asks))
    assert_checkpoints(prompts, asks, made, 0.006)


@hopper
@by_packing
@by_layout
def test_a_misaligned_pool(v_first, packed):
    prompts = make_long((1, 128, 256), packed=packed, v_first=v_first, gate=1.0)
    whole = prompts.before.new_full((prompts.before.numel() + 1,), torch.nan)
    prompts.pool = whole[1:].view(prompts.before.shape)
    prompts.pool.copy_(prompts.before)
    assert_near(prompts, prompts.run())
    assert whole.isnan().sum() == 1


@hopper
@by_packing
def test_kernels_and_memory(packed):
    """The kernels alone: no gather, no copy of the pool, whatever rows the sequences have."""
    prompts = make_long((4, 128, 256), packed=packed, gate=1.0)
    pool = prompts.pool.new_zeros(4096, *prompts.pool.shape[1:])
    names, _ = launched(lambda: prompts.run(state=pool))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        prompts.run(state=pool)
        torch.cuda.synchronize()
    on_gpu = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    all_of_them = [name for name in on_gpu if not name.startswith("Memset")]
    assert len(names) > 0 and len(all_of_them) == len(names)
    assert peak_bytes(lambda: prompts.run(state=pool)) < pool.nbytes / 8


# Sequences of one token.

LENGTHS = (1, 70, 1, 0, 130, 1, 64)  # sequences 1 and 5 have no row
MIXED = (300, *[1] * 40, 0, 1, 129, *[1] * 30)
CASES = {  # H, K, V; options
    "bf16": ((2, 64, 64), {}),
    "values first": ((1, 128, 256), {"v_first": True}),
    "fp32 gates": ((1, 128, 72), {"gate_dtype": torch.float32}),
    "fp32": ((2, 20, 28), {"dtype": torch.float32, "gate_dtype": torch.float32}),
    "fp16 and gates on values": (
        *((1, 40, 24), {"dtype": torch.float16, "gate_dtype": torch.float16, "gv": True}),
    ),
    "gates on values": ((2, 64, 32), {"gv": True, "v_first": True}),
    "states in bf16": ((1, 128, 128), {"storage": BF16}),
    "states in fp16, values first": ((1, 72, 40), {"storage": torch.float16, "v_first": True}),
    "resets": ((1, 256, 64), {"gate": "reset"}),
}
by_case = pytest.mark.parametrize("sizes, options", CASES.values(), ids=CASES)


def run_alone(prompts, n, packed):
    """o of sequence n, and the pool that it leaves, in a call of its own."""
    tokens = {name: t if t is None else prompts.of(t, n) for name, t in prompts.tokens.items()}
    rows = {name: t[n : n + 1] for name, t in prompts.rows.items()}
    offsets = prompts.indices([0, 1]) if packed else None
    pool = prompts.before.clone()
    return prompts.run(**tokens, **rows, state=pool, cu_seqlens=offsets), pool


def assert_alone_is_in_company(prompts):
    o = prompts.run()
    for n in (n for n in range(N) if prompts.lengths[n] == 1):
        (alone, pool), (unpacked, same) = (
            run_alone(prompts, n, packed) for packed in (True, False)
        )
        assert torch.equal(prompts.of(o, n), alone) and torch.equal(alone, unpacked)
        assert torch.equal(pool, same)
        row = int(prompts.rows["write_slots"][n])
        there = 0 <= int(prompts.rows["slots"][n]) < P and 0 <= row < P
        others = [i for i in range(P) if not (there and i == row)]
        assert torch.equal(pool[others], prompts.before[others])
        if there:
            assert torch.equal(prompts.pool[row], pool[row])
            assert not torch.equal(pool[row], prompts.before[row])


OTHER_TOKENS = {
    "a gate a head": lambda tokens: tokens | {"g": tokens["g"][..., 0]},
    "no gates": lambda tokens: tokens | {"g": None},
    "shared heads": lambda tokens: tokens | {name: tokens[name][:, :, :2] for name in "kvg"},
}


@in_nan
@pytest.mark.parametrize("name", [*CASES, *OTHER_TOKENS])
def test_alone_and_in_company(name):
    sizes, options = CASES.get(name, ((4, 64, 64), {}))
    for invariant in (False, True):
        prompts = make(sizes, lengths=LENGTHS, **options)
        if name in OTHER_TOKENS:
            prompts.tokens = OTHER_TOKENS[name](prompts.tokens)
        with batch_invariant(invariant):
            assert_alone_is_in_company(prompts)


@in_nan
@by_packing
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_batch_invariant_calls_are_chunks(dtype, packed):
    """One token has the bits of `chunk_gla`."""
    prompts = make((2, 64, 64), dtype, packed, T=1, dtype=dtype, lengths=LENGTHS)
    with batch_invariant():
        assert_same(prompts, prompts.run())


@in_nan
@by_case
def test_is_a_step_of_decoding(sizes, options):
    """With every bit, and the sequences beside these are as near to `chunk_gla` as ever."""
    prompts = make(sizes, lengths=LENGTHS, **options)
    prompts.rows["has_initial_state"] = None
    o = prompts.run()
    tokens = [n for n in range(N) if prompts.lengths[n] == 1]
    step = {
        name: torch.cat([prompts.of(t, n) for n in tokens]) for name, t in prompts.tokens.items()
    }
    rows = {name: prompts.rows[name][tokens] for name in ("slots", "write_slots")}
    pool, layout = prompts.before.clone(), prompts.options["state_v_first"]
    expected = recurrent_gla_step_(
        gk=step.pop("g"), **step, **rows, state=pool, state_v_first=layout
    )
    assert torch.equal(torch.cat([prompts.of(o, n) for n in tokens]), expected)
    written = [row for row in rows["write_slots"].tolist() if 0 <= row < P]
    assert torch.equal(prompts.pool[written], pool[written])
    assert_near(prompts, o)


def test_a_launch_for_sequences_of_one_token():
    """Which takes the whole of a batch of these."""
    names, _ = launched(make((1, 128, 128), lengths=LENGTHS).run)
    assert "recurrent" in names[-1] and len(names) > 1
    names, _ = launched(make((1, 128, 128), packed=False, T=1).run)
    assert len(names) == 1 and "recurrent" in names[0]


def test_a_call_that_lacks_memory_moves_no_state(monkeypatch):
    """It may come again with more."""
    monkeypatch.setenv("GLA_EXT_CUDA_PATH", "steps")  # whose workspace is the larger
    prompts = make((4, 128, 128), lengths=(1, 1, 1, 0, 1, 1, 2**15))
    size = torch.cuda.memory_allocated() + 60 * 2**20  # o takes 32 of these, the workspace 145
    with gpu_of(size), pytest.raises(torch.OutOfMemoryError):
        prompts.run()
    assert torch.equal(prompts.pool, prompts.before)


class Many(Prompts):
    """Sequences that each have their own row of the pool, except every third, which has no row."""

    def __init__(self, lengths, sizes, **options):
        super().__init__("cuda", True, sizes=sizes, lengths=lengths, dtype=BF16, **options)
        count = len(lengths)
        self.pool = self.normal(count, *self.pool.shape[1:]).float()
        self.before = self.pool.clone()
        slots = [-1 if n % 3 == 2 else count - 1 - n for n in range(count)]
        self.rows = {
            "slots": self.indices(slots),
            "write_slots": None,
            "has_initial_state": torch.arange(count, device="cuda") % 4 > 0,
        }

    def assert_is_its_parts(self, every=1):
        """Compares each prompt with a call of its own; of prompts of one token, only every
        `every`-th.
        """
        o = self.run()
        for n, length in enumerate(self.lengths):
            if length == 1 and n % every:
                continue
            row = int(self.rows["slots"][n])
            mine = self.of(o, n)
            if row < 0 or length == 0:
                assert not mine.any()
                continue
            tokens = {name: self.of(t, n) for name, t in self.tokens.items()}
            one = {"slots": self.indices([0]), "cu_seqlens": self.indices([0, length])}
            one["has_initial_state"] = self.rows["has_initial_state"][n : n + 1]
            pool = self.before[row : row + 1].clone()
            assert_close(mine, self.run(**tokens, **one, state=pool), 0.006)
            assert_close(self.pool[row], pool[0], 0.006)
        untouched = sorted(set(range(len(self.lengths))) - set(self.rows["slots"].tolist()))
        assert torch.equal(self.pool[untouched], self.before[untouched])


@in_nan
@pytest.mark.parametrize(
    "sizes",
    [pytest.param((1, 64, 64), marks=pytest.mark.sanitizer), (1, 128, 256), (1, 192, 64)],
    ids=str,
)
def test_prompts_among_many_tokens(sizes):
    Many(MIXED, sizes, gate=0.1).assert_is_its_parts()


@in_nan
def test_more_sequences_than_the_map_takes_at_a_time():
    lengths = [1] * 1100
    lengths[3], lengths[700], lengths[1050] = 700, 65, 300
    Many(lengths, (1, 64, 64), gate=0.1).assert_is_its_parts(every=40)


# What is wrong, and what changes.

TURNS = [(1300, 1, 700, 1, 1, 500, 90), (1, 90, 1, 2500, 0, 1, 1), (370,) * N]  # of 2,593 tokens


def wrong_offsets(what, T):
    """Those of 165 tokens, of T tokens; or whatever stands there."""
    if what == "at random":
        generator = torch.Generator().manual_seed(0)
        return torch.randint(-(2**31), 2**31 - 1, (N + 1,), generator=generator)
    scaled = T / 165 * torch.tensor(BAD_OFFSETS[what], dtype=torch.float64)
    return scaled.clamp(-(2**31), 2**31 - 1).long()


@pytest.mark.parametrize("sizes", [(1, 64, 64), (1, 128, 256)], ids=str)
@pytest.mark.parametrize("what", [*BAD_OFFSETS, "at random"])
def test_bad_offsets_and_rows_stay_inside(what, sizes):
    """The call writes no tokens, no rows that belong to no sequence, and nothing outside of the
    pool. The next call is right.
    """
    prompts, fresh = (make(sizes, lengths=TURNS[0]) for _ in range(2))
    tokens = {name: t.clone() for name, t in prompts.tokens.items()}
    whole = prompts.before.new_full((3 * P, *prompts.before.shape[1:]), torch.nan)
    state = whole[P : 2 * P]
    state.copy_(prompts.before)
    offsets = wrong_offsets(what, tokens["q"].shape[1]).cuda()
    prompts.run(state=state, cu_seqlens=offsets)
    untouched = sorted(set(range(P)) - set(prompts.rows["write_slots"].tolist()))
    assert torch.equal(state[untouched], prompts.before[untouched])
    asks, _ = prompts.checkpoints()
    random = torch.Generator().manual_seed(1)
    slots, write_slots = (torch.randint(-20, 20, (N,), generator=random).cuda() for _ in range(2))
    for given in (prompts.options["cu_seqlens"], offsets):
        prompts.run(
            state=state, slots=slots, write_slots=write_slots, cu_seqlens=given,
            checkpoint_every=64, checkpoint_slots=asks["checkpoint_slots"],
            checkpoint_cu_starts=offsets.flip(0),
        )  # fmt: skip
    assert whole[:P].isnan().all() and whole[2 * P :].isnan().all()
    assert all(torch.equal(t, tokens[name]) for name, t in prompts.tokens.items())
    assert torch.equal(prompts.run(), fresh.run()) and torch.equal(prompts.pool, fresh.pool)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_graph_replays_with_other_lengths_and_rows(checkpoints):
    """Sequences of one token become prompts, and these tokens."""
    static = make((1, 128, 256), lengths=TURNS[0], gate=0.1)
    asks = static.checkpoints(128)[0] if checkpoints else {}
    static.run(**asks)  # before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = static.run(**asks)
    for turn, lengths in enumerate(TURNS):
        offsets = static.indices([sum(lengths[:n]) for n in range(N + 1)], torch.int64)
        static.options["cu_seqlens"].copy_(offsets)
        for t in static.rows.values():
            t.copy_(t.roll(turn))
        static.pool.copy_(static.before)
        graph.replay()
        pool = static.before.clone()
        expected = static.run(cu_seqlens=offsets, state=pool)
        assert torch.equal(o, expected) and torch.equal(static.pool, pool)
