"""Steps on a pool with buffers of the newest tokens, against the recurrence in fp64."""

import pytest
import torch
from buffered import BOUNDS, SHORT, Buffered, L, raises
from common import DTYPES, assert_close
from recurrence import SLOTS, VERIFIED, make_recurrence
from views import POOLS, pool_like

from gla_ext import (
    recurrent_gla_commit_,
    recurrent_gla_step_,
)

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_layout = pytest.mark.parametrize("state_v_first", [False, True])
by_state_dtype = pytest.mark.parametrize("state_dtype", SHORT, ids=str)
SIZES = [(1, 1), (7, 33), (64, 64), (128, 256), (130, 70), (256, 96), (300, 40), (512, 64)]


@pytest.mark.usefixtures("nan_in_fresh_memory")
@by_dtype
@by_layout
@pytest.mark.parametrize("T", [1, 2, 4, 5, 11, 16])
def test_a_step(device, T, state_v_first, dtype):
    Buffered(device, T, dtype, state_v_first).check()


@pytest.mark.usefixtures("nan_in_fresh_memory")
@by_dtype
@by_layout
@by_state_dtype
@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("sizes", [(4, 20, 28), (2, 64, 40), (2, 128, 64)], ids=str)
def test_states_in_16_bits(device, sizes, T, state_dtype, state_v_first, dtype):
    if dtype != torch.float64:
        HK = sizes[0]
        Buffered(device, T, dtype, state_v_first, state_dtype, sizes, HK).check()


@pytest.mark.usefixtures("nan_in_fresh_memory")
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@by_layout
@pytest.mark.parametrize("T", [1, 4])
def test_head_sizes(device, T, state_v_first, sizes):
    Buffered(device, T, torch.bfloat16, state_v_first, sizes=(1, *sizes), HK=1).check()


@pytest.mark.usefixtures("nan_in_fresh_memory")
@pytest.mark.parametrize("sizes", [(512, 1024), (1000, 1016), (1024, 40)], ids=str)
@by_layout
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("T", [1, 4])
def test_large_heads(device, T, state_dtype, state_v_first, sizes):
    Buffered(device, T, torch.float32, state_v_first, state_dtype, (1, *sizes), 1).check()


@by_dtype
@by_layout
@pytest.mark.parametrize("HK", [1, 2])
@pytest.mark.parametrize("T", [1, 3])
def test_shared_heads(device, T, HK, state_v_first, dtype):
    Buffered(device, T, dtype, state_v_first, HK=HK).check()


@by_dtype
@by_layout
@pytest.mark.parametrize("gate", [0.05, 10.0, 200.0, "reset"])
@pytest.mark.parametrize("T", [1, 5])
def test_gates(device, T, gate, state_v_first, dtype):
    Buffered(device, T, dtype, state_v_first, gate=gate).check()


@by_layout
@pytest.mark.parametrize("T", [1, 4])
@pytest.mark.parametrize("count", [13, 10])  # the first of them folds drafts
def test_a_reset_at_any_place(device, count, T, state_v_first):
    """What is before it, however large, leaves no trace."""
    for place in range(count + T):
        both = []
        for size in (1e30, 0):
            x = Buffered(device, T, state_v_first=state_v_first, counts=[count] * 7)
            for name in ("state", "buffer_k", "buffer_v", "buffer_g"):
                x.before[name].nan_to_num_()
            x.pools["state"] *= size
            x.pools["buffer_k"][:, : min(place, count)] *= size
            if place < count:
                x.pools["buffer_g"][:, place] = -torch.inf
            else:
                x.tokens["k"][:, : place - count] *= size
                x.tokens["gk"][:, place - count] = -torch.inf
            x.before = {n: t.clone() for n, t in x.pools.items()}
            both.append(x.step()[:, max(place - count, 0) :])
        assert torch.equal(*both) and both[0].isfinite().all(), place


@pytest.mark.parametrize("gating", ["a head's", "a head's, with a last dimension", "none"])
def test_other_gates(device, gating):
    x, y = Buffered(device, 3), Buffered(device, 3)
    if gating == "none":
        x.tokens["gk"], y.tokens["gk"] = None, torch.zeros_like(y.tokens["gk"])
    else:
        gate = x.tokens["gk"][..., :1]
        x.tokens["gk"] = gate if "last" in gating else gate[..., 0]
        y.tokens["gk"] = gate.expand(-1, -1, -1, 20)
    assert torch.equal(x.step(), y.step())
    for name, t in x.pools.items():
        assert torch.equal(t.nan_to_num(), y.pools[name].nan_to_num()), name


@by_layout
@pytest.mark.parametrize("layout", POOLS)
def test_pools_that_are_views(device, layout, state_v_first):
    x = Buffered(device, 1, torch.bfloat16, state_v_first, torch.bfloat16, (2, 64, 40), 2)
    whole = {}
    for name, t in x.before.items():
        x.pools[name], whole[name] = pool_like(t, layout)
    x.check()
    for name, t in whole.items():
        assert t.isnan().sum() == t.numel() - (~x.pools[name].isnan()).sum(), name


@by_layout
@pytest.mark.parametrize("layout", ["transposed", "sliced", "misaligned", "expanded"])
def test_strides(device, layout, state_v_first):
    Buffered(device, 3, state_v_first=state_v_first, layout=layout).check()


def test_count_is_clamped(device):
    Buffered(device, 2, counts=(-5, 1, 99, 2**31 - 1, 99, 16, 2**30)).check()
    x = Buffered(device, 2)
    x.rows["count"] = torch.full((7,), 2**62, device=device)
    x.counts = [L] * 7
    for name in ("buffer_k", "buffer_v", "buffer_g"):
        x.pools[name].nan_to_num_()
    x.before = {n: t.clone() for n, t in x.pools.items()}
    x.check()


def test_without_slots_every_row_has_its_own(device):
    x, y = Buffered(device, 2), Buffered(device, 2)
    arguments = {n: t[:6] for n, t in x.pools.items()} | {"count": x.rows["count"][:6]}
    o = x.step(**arguments, slots=None)
    y.rows["slots"] = torch.arange(6, device=device)
    assert torch.equal(o, y.step())


@by_layout
@pytest.mark.parametrize("T", [1, 4])
def test_bits_do_not_depend_on_the_batch(device, T, state_v_first):
    x = Buffered(device, T, torch.bfloat16, state_v_first, sizes=(4, 128, 64))
    o = x.step()
    after = x.pools
    for row, slot in enumerate(SLOTS):
        if not 0 <= slot < 7:
            continue
        x.pools = {n: t[slot : slot + 1].clone() for n, t in x.before.items()}
        alone = {n: t[row : row + 1] for n, t in x.tokens.items()}
        count = x.rows["count"][slot : slot + 1]
        assert torch.equal(x.step(**alone, slots=None, count=count), o[row : row + 1])
        for name, t in x.pools.items():
            assert torch.equal(t[0].nan_to_num(), after[name][slot].nan_to_num()), name


@by_dtype
@by_layout
@pytest.mark.parametrize("sizes", [(4, 20, 28), (2, 128, 64)], ids=str)
def test_a_draft_has_the_bits_of_shorter_ones(device, sizes, state_v_first, dtype):
    HK, counts = sizes[0], [0, 5, 2, 3, 7, 1, 6]
    x, y = (Buffered(device, 9, dtype, state_v_first, None, sizes, HK, counts) for _ in "ab")
    o, count = x.step(), y.rows["count"].clone()
    for start in range(0, 9, 3):
        part = {n: z[:, start : start + 3] for n, z in y.tokens.items()}
        assert torch.equal(y.step(**part, count=count + start), o[:, start : start + 3]), start
    for name, t in x.pools.items():
        assert torch.equal(t.nan_to_num(), y.pools[name].nan_to_num()), name


def counted(count, T, accepted):
    """count after a step of which `accepted` tokens are kept."""
    return torch.where(count + T > L, 0, count) + accepted


@by_dtype
@by_layout
def test_drafts_and_what_is_left(device, state_v_first, dtype):
    """Drafts that are taken back leave no trace, and the buffers hold all that is not folded."""
    x = Buffered(device, 1, dtype, state_v_first, counts=[0] * 7)
    y = make_recurrence(6, 60, 4, 20, 28, dtype=dtype, gating="gk", device=device, seed=3)
    plain, done, outputs = x.before["state"].clone(), 0, []
    stream = {n: getattr(y, n) for n in ("q", "k", "v", "gk")}
    rows = {"slots": x.rows["slots"], "state_v_first": state_v_first}
    count, used = x.rows["count"], [0, 4, 6]
    for drafted, accepted in ((1, 1), (4, 2), (5, 5), (3, 0), (16, 7), (1, 1), (1, 1)) * 2:
        tokens = {n: t[:, done : done + drafted] for n, t in stream.items()}
        outputs.append(x.step(**tokens)[:, :accepted])
        count[used] = counted(count[used], drafted, accepted)
        done += accepted
    stream = {n: t[:, :done] for n, t in stream.items()}
    expected = recurrent_gla_step_(**stream, state=plain, **rows)
    assert_close(torch.cat(outputs, 1), expected, BOUNDS[dtype])
    left = [x.pools[f"buffer_{n}"] for n in "kvg"]
    state = x.pools["state"]
    recurrent_gla_commit_(*left, state=state, accepted=count, state_v_first=state_v_first)
    assert_close(state, plain, VERIFIED[dtype if dtype == torch.float64 else torch.float32])


def test_fewer_roundings_of_short_states(device):
    """With gates near 0 a bf16 state loses small sums; it is rounded for 16 tokens at once."""
    y = make_recurrence(1, 1024, 1, 16, 16, gate=1e-4, gating="gk", device=device)
    x = Buffered(device, 1, sizes=(1, 16, 16), HK=1, counts=[0] * 7)
    state = torch.zeros(1, 1, 16, 16, device=device, dtype=torch.bfloat16)
    short, exact, count = state.clone(), state.double().cpu(), x.rows["count"][:1]
    buffers = {n: t[:1] for n, t in x.pools.items() if n != "state"}
    for t in range(1024):
        q, k, v, gk = (getattr(y, n)[:, t : t + 1] for n in ("q", "k", "v", "gk"))
        o = x.step(q=q, k=k, v=v, gk=gk, **buffers, state=state, count=count, slots=None)
        count.copy_(counted(count, 1, 1))
        rounded = recurrent_gla_step_(q, k, v, gk, state=short)
        truth = recurrent_gla_step_(*(z.double().cpu() for z in (q, k, v, gk)), state=exact)
    errors = [(z.cpu() - truth).norm() / truth.norm() for z in (o, rounded)]
    assert errors[0] < 0.4 * errors[1], errors


@pytest.mark.cuda
@by_layout
@pytest.mark.parametrize("T", [1, 3])
def test_a_graph_replays_across_folds(T, state_v_first):
    x = Buffered("cuda", T, torch.bfloat16, state_v_first, sizes=(4, 128, 64))
    x.step()
    graph, count = torch.cuda.CUDAGraph(), x.rows["count"]
    with torch.cuda.graph(graph):
        o = x.step()
    for t, start in x.pools.items():
        start.copy_(x.before[t].nan_to_num_())
    for _ in range(3 * L):
        before = {n: t.clone() for n, t in x.pools.items()}
        graph.replay()
        after = {n: t.clone() for n, t in x.pools.items()}
        again = x.step(**before)
        assert torch.equal(again, o)
        assert all(torch.equal(before[n], t) for n, t in after.items())
        count.copy_(counted(count, T, T))


SANITIZED = {  # H, K, V; the heads of k
    "aligned": ((2, 128, 64), 1),
    "odd": ((1, 33, 65), 1),
    "wide": ((1, 512, 32), 1),
    "widest": ((1, 1000, 1016), 1),
}


@pytest.mark.cuda
@pytest.mark.sanitizer
@by_state_dtype
@by_layout
@pytest.mark.parametrize("T", [1, 5])
@pytest.mark.parametrize("what", SANITIZED)
def test_for_the_sanitizer(what, T, state_v_first, state_dtype):
    sizes, HK = SANITIZED[what]
    Buffered("cuda", T, torch.bfloat16, state_v_first, state_dtype, sizes, HK).check()


@pytest.mark.cuda
@pytest.mark.sanitizer
def test_what_fits_every_gpu(monkeypatch):
    """Up to 512 keys do, more are refused where they do not; an emulated GPU pretends to be one."""
    monkeypatch.setenv("GLA_EMULATOR_SHARED", "99")
    of_block = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    if torch.cuda.get_device_name() != "emulated GPU" and of_block >= 140 << 10:
        pytest.skip("this GPU has more")
    for state_v_first in (False, True):
        Buffered("cuda", 1, torch.bfloat16, state_v_first, sizes=(1, 512, 16), HK=1).check()
        x = Buffered("cuda", 1, torch.bfloat16, state_v_first, sizes=(1, 513, 16), HK=1)
        with raises(NotImplementedError, "K to be at most 512 on a GPU of less than 140 KiB of "
                    "shared memory a block, got 513"):  # fmt: skip
            x.step()
