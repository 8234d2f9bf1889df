"""`chunk_gla_` on Hopper: the fused kernels read and write the pool, and make checkpoints."""

import pytest
import torch
from common import assert_close
from cuda_tools import launched, peak_bytes
from fused import BF16
from pool_inputs import N, P, Prompts

from gla_ext import batch_invariant

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("hopper")]

KINDS = {  # H, K, V; gate dtype
    "small": ((2, 64, 64), BF16),
    "fused": ((1, 64, 136), BF16),
    "fused fp32 gates": ((1, 64, 64), torch.float32),
    "fused 128": ((1, 128, 64), BF16),
    "cluster": ((1, 128, 256), BF16),
    "prepared 128": ((1, 128, 72), torch.float32),
    "prepared 192": ((1, 192, 64), BF16),
    "prepared 256": ((1, 256, 136), BF16),
}
HEAD_GATED = ((2, 64, 64), (1, 64, 128), (1, 128, 256), (1, 192, 64), (1, 256, 128))
LONG = (700, 1, 0, 1300, 64, 2500, 65)
by_kind = pytest.mark.parametrize("sizes, gate_dtype", KINDS.values(), ids=KINDS)
by_packing = pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
by_layout = pytest.mark.parametrize("v_first", [False, True])
in_nan = pytest.mark.usefixtures("nan_in_fresh_memory")


def assert_same(prompts, o):
    """With every bit, as the kernels' arithmetic is that of `chunk_gla`."""
    expected, pool = prompts.expected()
    assert torch.equal(o, expected)
    assert torch.equal(prompts.pool, pool)


def assert_near(prompts, o):
    expected, pool = prompts.expected()
    assert_close(o, expected, 0.006)
    assert_close(prompts.pool, pool, 0.006)


def assert_checkpoints(prompts, asks, made, rtol=None):
    for n, count, row in made:
        found, expected = asks["checkpoints"][row], prompts.prefix(n, count)
        if rtol is None:
            assert torch.equal(found, expected), (n, count)
        else:
            assert_close(found.float(), expected, rtol)
    others = set(range(len(asks["checkpoints"]))) - {row for *_, row in made}
    assert asks["checkpoints"][list(others)].isnan().all()


@in_nan
@by_kind
@by_packing
@by_layout
@pytest.mark.parametrize("gate", [0.1, "reset"])
def test_pool(gate, v_first, packed, sizes, gate_dtype):
    options = {"v_first": v_first, "gate_dtype": gate_dtype, "dtype": BF16, "gate": gate}
    prompts = Prompts("cuda", packed, sizes=sizes, **options)
    assert_same(prompts, prompts.run())


@in_nan
@by_packing
@pytest.mark.parametrize("sizes", HEAD_GATED, ids=str)
def test_one_gate_a_head(sizes, packed):
    prompts = Prompts("cuda", packed, sizes=sizes, dtype=BF16, gate_dtype=torch.float32)
    prompts.tokens["g"] = prompts.tokens["g"][..., 0]
    asks, made = prompts.checkpoints()
    with batch_invariant():
        assert_same(prompts, prompts.run(**asks))
        assert_checkpoints(prompts, asks, made)


@in_nan
@by_kind
@by_packing
@pytest.mark.parametrize("gate", [0.1, "reset"])
def test_checkpoints(gate, packed, sizes, gate_dtype):
    options = {"gate_dtype": gate_dtype, "dtype": BF16, "gate": gate}
    prompts = Prompts("cuda", packed, sizes=sizes, **options)
    asks, made = prompts.checkpoints()
    with batch_invariant():
        assert_same(prompts, prompts.run(**asks))
        assert_checkpoints(prompts, asks, made)


@in_nan
@by_kind
@by_packing
def test_segments(packed, sizes, gate_dtype):
    """Sequences that are cut, in place and from one row to another."""
    options = {"lengths": LONG, "gate_dtype": gate_dtype, "dtype": BF16, "gate": 0.01}
    prompts = Prompts("cuda", packed, T=1500, sizes=sizes, **options)
    asks, made = prompts.checkpoints(128)
    o = prompts.run(**asks)
    assert_near(prompts, o)
    assert_checkpoints(prompts, asks, made, 0.006)
    in_place = Prompts("cuda", packed, T=1500, sizes=sizes, **options)
    in_place.rows["write_slots"] = None
    assert torch.equal(in_place.run(), o)


@by_packing
@pytest.mark.parametrize("sizes", HEAD_GATED, ids=str)
def test_segments_with_one_gate_a_head(sizes, packed):
    options = {"lengths": LONG, "dtype": BF16, "gate": 0.01}
    prompts = Prompts("cuda", packed, T=1500, sizes=sizes, **options)
    prompts.tokens["g"] = prompts.tokens["g"][..., 0]
    asks, made = prompts.checkpoints(128)
    assert_near(prompts, prompts.run(**asks))
    assert_checkpoints(prompts, asks, made, 0.006)


@by_kind
@by_packing
@pytest.mark.parametrize("storage", [BF16, torch.float16], ids=str)
def test_short_states(storage, packed, sizes, gate_dtype):
    options = {"gate_dtype": gate_dtype, "dtype": BF16, "gate": 0.1}
    for v_first in (False, True):
        prompts = Prompts("cuda", packed, sizes=sizes, storage=storage, v_first=v_first, **options)
        assert_same(prompts, prompts.run())
    prompts = Prompts("cuda", packed, T=1500, lengths=LONG, storage=storage, sizes=sizes, **options)
    asks, made = prompts.checkpoints(128)
    assert_near(prompts, prompts.run(**asks))
    assert_checkpoints(prompts, asks, made, 0.006)


@by_packing
@by_layout
def test_a_misaligned_pool(v_first, packed):
    prompts = Prompts(
        "cuda", packed, T=1500, lengths=LONG, sizes=(1, 128, 256), v_first=v_first, dtype=BF16
    )
    whole = prompts.before.new_full((prompts.before.numel() + 1,), torch.nan)
    prompts.pool = whole[1:].view(prompts.before.shape)
    prompts.pool.copy_(prompts.before)
    assert_near(prompts, prompts.run())
    assert whole.isnan().sum() == 1


@by_packing
def test_kernels_and_memory(packed):
    """The kernels alone: no gather, no copy of the pool, whatever rows the sequences have."""
    prompts = Prompts("cuda", packed, T=1500, lengths=LONG, sizes=(4, 128, 256), dtype=BF16)
    pool = prompts.pool.new_zeros(4096, *prompts.pool.shape[1:])
    names, _ = launched(lambda: prompts.run(state=pool))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        prompts.run(state=pool)
        torch.cuda.synchronize()
    on_gpu = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    all_of_them = [name for name in on_gpu if not name.startswith("Memset")]
    assert len(names) > 0 and len(all_of_them) == len(names)
    assert peak_bytes(lambda: prompts.run(state=pool)) < pool.nbytes / 8


def test_graph_replays_with_other_rows():
    def make():
        return Prompts("cuda", True, lengths=LONG, sizes=(1, 128, 256), dtype=BF16, gate=0.1)

    static, fresh = make(), make()
    rolled = {name: t.roll(1) for name, t in static.rows.items()}
    asks, _ = static.checkpoints(128)
    static.run(**asks)  # before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = static.run(**asks)
    static.pool.copy_(static.before)
    for name, t in rolled.items():
        static.rows[name].copy_(t)
    graph.replay()
    fresh.rows = rolled
    assert torch.equal(fresh.run(), o)
    assert torch.equal(fresh.pool, static.pool)


def test_bad_offsets_and_rows_stay_inside():
    """Whatever stands in the index tensors, nothing else is written."""
    prompts = Prompts("cuda", True, sizes=(1, 128, 256), dtype=BF16)
    whole = prompts.before.new_full((3 * P, *prompts.before.shape[1:]), torch.nan)
    state = whole[P : 2 * P]
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        low, high = -(2**31), 2**31 - 1
        asks, _ = prompts.checkpoints()
        several = {name: torch.randint(low, high, (N,), generator=generator) for name in "ab"}
        offsets = torch.randint(low, high, (N + 1,), generator=generator)
        slots, write_slots = (x.cuda() % 40 - 20 for x in several.values())
        state.zero_()
        changes = {"slots": slots, "write_slots": write_slots, "cu_seqlens": offsets.cuda()}
        changes |= {"checkpoint_every": 64, "checkpoint_slots": asks["checkpoint_slots"]}
        prompts.run(**changes, state=state, checkpoint_cu_starts=offsets.flip(0).cuda())
    assert whole[:P].isnan().all() and whole[2 * P :].isnan().all()


def test_sequences_of_one_token():
    """Sequences of one token in a packed call: what one after the other gives."""
    prompts = Prompts("cuda", True, lengths=(1,) * N, sizes=(4, 128, 256), dtype=BF16)
    assert_near(prompts, prompts.run())
