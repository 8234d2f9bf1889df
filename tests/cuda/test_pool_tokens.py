"""Sequences of one token in a call of `chunk_gla_`: the recurrence takes them, whatever else comes
in the call."""

import pytest
import torch
from common import BAD_OFFSETS, assert_close
from cuda_tools import gpu_of, launched
from pool_inputs import N, P, Prompts

from gla_ext import batch_invariant, recurrent_gla_step_

pytestmark = pytest.mark.cuda

BF16 = torch.bfloat16
LENGTHS = (1, 70, 1, 0, 130, 1, 64)  # sequences 1 and 5 have no row
MIXED = (300, *[1] * 40, 0, 1, 129, *[1] * 30)
CASES = {  # H, K, V; options
    "bf16": ((2, 64, 64), {}),
    "values first": ((1, 128, 256), {"v_first": True}),
    "fp32 gates": ((1, 128, 72), {"gate_dtype": torch.float32}),
    "fp32": ((2, 20, 28), {"dtype": torch.float32}),
    "fp16 and gates on values": ((1, 40, 24), {"dtype": torch.float16, "gv": True}),
    "gates on values": ((2, 64, 32), {"gv": True, "v_first": True}),
    "states in bf16": ((1, 128, 128), {"storage": BF16}),
    "states in fp16, values first": ((1, 72, 40), {"storage": torch.float16, "v_first": True}),
    "resets": ((1, 256, 64), {"gate": "reset"}),
}
by_case = pytest.mark.parametrize("sizes, options", CASES.values(), ids=CASES)
in_nan = pytest.mark.usefixtures("nan_in_fresh_memory")


def make(sizes, lengths=LENGTHS, **options):
    return Prompts("cuda", True, sizes=sizes, lengths=lengths, **({"dtype": BF16} | options))


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


@in_nan
@by_case
def test_alone_and_in_company(sizes, options):
    assert_alone_is_in_company(make(sizes, **options))
    with batch_invariant():
        assert_alone_is_in_company(make(sizes, **options))


@in_nan
@pytest.mark.parametrize("gates", ["heads", "none", "shared"])
def test_other_gates_and_shared_heads(gates):
    prompts = make((4, 64, 64))
    if gates == "heads":
        prompts.tokens["g"] = prompts.tokens["g"][..., 0]
    elif gates == "none":
        prompts.tokens["g"] = None
    else:
        prompts.tokens |= {name: prompts.tokens[name][:, :, :2] for name in ("k", "v", "g")}
    assert_alone_is_in_company(prompts)


@in_nan
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_batch_invariant_calls_are_chunks(dtype, packed):
    """One token has the bits of `chunk_gla`."""
    prompts = Prompts("cuda", packed, T=1, sizes=(2, 64, 64), dtype=dtype, lengths=LENGTHS)
    with batch_invariant():
        o = prompts.run()
        expected, pool = prompts.expected()
    assert torch.equal(o, expected) and torch.equal(prompts.pool, pool)


@in_nan
@by_case
def test_is_a_step_of_decoding(sizes, options):
    """With every bit, and the sequences beside these are as near to `chunk_gla` as ever."""
    prompts = make(sizes, **options)
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
    whole, states = prompts.expected()
    assert_close(o, whole, 0.006)
    assert_close(prompts.pool.float(), states.float(), 0.006)


def test_kernels():
    """A launch for the sequences of one token, which takes the whole of a batch of these."""
    packed, alone = (
        make((1, 128, 128)),
        Prompts("cuda", False, T=1, sizes=(1, 128, 128), dtype=BF16),
    )
    names, _ = launched(packed.run)
    assert "recurrent" in names[-1] and len(names) > 1
    names, _ = launched(alone.run)
    assert len(names) == 1 and "recurrent" in names[0]


def test_a_call_that_lacks_memory_moves_no_state(monkeypatch):
    """It may come again with more."""
    monkeypatch.setenv("GLA_EXT_CUDA_PATH", "steps")  # whose workspace is the larger
    prompts = make((4, 128, 128), (1, 1, 1, 0, 1, 1, 2**15))
    size = torch.cuda.memory_allocated() + 60 * 2**20  # o takes 32 of these, the workspace 145
    with gpu_of(size), pytest.raises(torch.OutOfMemoryError):
        prompts.run()
    assert torch.equal(prompts.pool, prompts.before)


@in_nan
@pytest.mark.parametrize("T", [0, 1])
def test_batches_of_one_token_and_none(T):
    prompts = Prompts("cuda", False, T=T, sizes=(2, 64, 64), dtype=BF16)
    o = prompts.run()
    expected, pool = prompts.expected()
    assert torch.equal(o, expected) and torch.equal(prompts.pool, pool)


class Many(Prompts):
    """Sequences in rows of their own, every third of them without one."""

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
        """Each prompt in a call of its own, and each of so many tokens."""
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


def scaled(offsets, T):
    """Offsets of 165 tokens, of T tokens."""
    return (T / 165 * torch.tensor(offsets, dtype=torch.float64)).clamp(-(2**31), 2**31 - 1).long()


@pytest.mark.parametrize("sizes", [(1, 64, 64), (1, 128, 256)], ids=str)
@pytest.mark.parametrize("what", BAD_OFFSETS)
def test_bad_offsets(what, sizes):
    """Neither the tokens nor rows that no sequence has are written, nor what lies beside the pool;
    and the next call is right."""
    lengths = (1300, 1, 700, 1, 1, 500, 90)
    prompts, fresh = (make(sizes, lengths) for _ in range(2))
    tokens = {name: t.clone() for name, t in prompts.tokens.items()}
    T = tokens["q"].shape[1]
    whole = prompts.before.new_full((3 * P, *prompts.before.shape[1:]), torch.nan)
    state = whole[P : 2 * P]
    state.copy_(prompts.before)
    prompts.run(state=state, cu_seqlens=scaled(BAD_OFFSETS[what], T).cuda())
    assert whole[:P].isnan().all() and whole[2 * P :].isnan().all()
    untouched = sorted(set(range(P)) - set(prompts.rows["write_slots"].tolist()))
    assert torch.equal(state[untouched], prompts.before[untouched])
    assert all(torch.equal(t, tokens[name]) for name, t in prompts.tokens.items())
    assert torch.equal(prompts.run(), fresh.run()) and torch.equal(prompts.pool, fresh.pool)


def test_graph_replays_with_other_lengths():
    """Sequences of one token become prompts, and these tokens."""
    cases = [(1300, 1, 700, 1, 1, 500, 90), (1, 90, 1, 2500, 0, 1, 1), (370,) * N]
    static = make((1, 128, 256), cases[0], gate=0.1)
    static.run()  # before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = static.run()
    for lengths in cases:
        offsets = static.indices([sum(lengths[:n]) for n in range(N + 1)], torch.int64)
        static.options["cu_seqlens"].copy_(offsets)
        static.pool.copy_(static.before)
        graph.replay()
        pool = static.before.clone()
        expected = static.run(cu_seqlens=offsets, state=pool)
        assert torch.equal(o, expected) and torch.equal(static.pool, pool)
