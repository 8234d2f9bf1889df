"""The segments that the fused path's sweeps cut sequences into, and their bits."""

import dataclasses

import pytest
import torch
from common import (
    BAD_OFFSETS,
    assert_graph_replays,
    assert_results_close,
    assert_same_bits,
    count_differences,
    exact_by_chunks,
    make_inputs,
    ours,
)
from fused import (
    BF16,
    MIXED,
    TOKENS,
    for_this_gpu,
    mixed_gates,
    packed,
    plan_of,
    v_first_results,
)
from large import large_inputs
from plans import reads_prepared, sweeps_gradients

from gla_ext import batch_invariant

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("hopper")]

in_nan = pytest.mark.usefixtures("nan_in_fresh_memory")


@in_nan
@pytest.mark.parametrize("gate", [0.01, 0.1, 1.0, 10.0, "reset"])  # e^-2 a segment, ...
@pytest.mark.parametrize(
    "shape",
    [
        *[(1, 6400, 1, 64, 64), (1, 4101, 2, 128, 256)],
        *[(1, 4101, 1, 136, 72), (1, 4101, 1, 192, 64), (1, 4101, 1, 200, 72)],
    ],
    ids=str,
)
def test_segments_of_a_long_sequence(shape, gate):
    x = make_inputs(*shape, BF16, gate, device="cuda")
    assert all(plan_of(x, backward)["segments"] > 2 for backward in (False, True))
    assert_results_close(ours(x), exact_by_chunks(x), x)


@pytest.mark.parametrize("gates", ["weak", *MIXED])
def test_segments_of_many_chunks(gates):
    x = large_inputs(1, 32768, 4, 128, 256, states=True)
    x = x if gates == "weak" else mixed_gates(x, gates)
    plan = plan_of(x)
    assert plan["segments"] > 2 and plan["segment_chunks"] > 8
    assert_results_close(ours(x), exact_by_chunks(x), x)


def half_of_the_gpu(T, H, K, V, blocks, **options):
    """Heads that leave two places of forward's sweep for each of their `blocks`."""
    return make_inputs(for_this_gpu(66) // (H * blocks), T, H, K, V, BF16, device="cuda", **options)


def check_the_second_sums_the_first(T, H, K, V, blocks, gates, gate_dtype):
    gate = 0.1 if gates in MIXED else gates
    x = half_of_the_gpu(T, H, K, V, blocks, gate=gate, gate_dtype=gate_dtype)
    x = mixed_gates(x, gates) if gates in MIXED else x
    assert plan_of(x, False)["replays"]
    assert_results_close(v_first_results(x), exact_by_chunks(x), x)


@in_nan
@pytest.mark.parametrize("gate_dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("gates", [0.1, 1.0, "reset", *MIXED])
@pytest.mark.parametrize(
    "T, H, K, V, blocks",
    [
        *[(330, 3, 72, 40, 1), (1000, 2, 128, 256, 2), (1025, 3, 200, 136, 2)],
        *[(700, 3, 256, 64, 1), (390, 2, 160, 200, 2), (520, 2, 64, 128, 1), (1000, 3, 8, 200, 2)],
    ],
)
def test_segments_that_sum_the_one_before(T, H, K, V, blocks, gates, gate_dtype):
    check_the_second_sums_the_first(T, H, K, V, blocks, gates, gate_dtype)


@in_nan
@pytest.mark.parametrize("gates", [0.1, "reset", *MIXED])
@pytest.mark.parametrize("K, V", [(64, 64), (40, 8)])
def test_segments_of_small_heads_that_sum_the_one_before(K, V, gates):
    """With bf16 gates they have a kernel of their own, which does not."""
    check_the_second_sums_the_first(900, 3, K, V, 1, gates, torch.float32)


@pytest.mark.parametrize(
    "K, V, blocks, gate_dtype",
    [
        *[(128, 256, 2, torch.float32), (256, 128, 1, torch.float32)],
        (136, 128, 1, BF16),
        *[(64, 128, 1, torch.float32), (64, 128, 1, BF16), (40, 8, 1, torch.float32)],
    ],
)
def test_sums_of_the_segment_before_are_those_of_a_sweep_over_all(K, V, blocks, gate_dtype):
    """So that with gates so weak that a state remembers everything o has the same bits."""
    x = half_of_the_gpu(1000, 2, K, V, blocks, gate=1e-3, gate_dtype=gate_dtype)
    assert plan_of(x, False)["replays"]
    assert reads_prepared(plan_of(x, False, batch_invariant=True)) == (K > 64)
    results = ours(x)
    with batch_invariant():
        whole = ours(x)
    assert_same_bits(*({n: r[n] for n in ("o", "final_state")} for r in (results, whole)))


@pytest.mark.parametrize(
    "H, K, V, lengths",
    [
        # Of two segments in eight parts, whose gradients are swept.
        (8, 128, 256, (2500, *[1000] * 14)),
        (32, 64, 64, (3000, *[300] * 60)),
        (2, 200, 72, (6000, *[300] * 100)),
        (2, 160, 72, (6000, *[300] * 100)),
        (16, 128, 256, (1, 2500, 64, 0, 1755, 300, 2200, 700)),
        (4, 64, 128, (1, 2500, 64, 0, 1755, 300, 2200, 700)),
        (64, 64, 64, (1, 2500, 64, 0, 1755, 300, 2200, 700)),
        (4, 200, 72, (1, 2500, 64, 0, 1755, 300, 2200, 700)),
        (4, 136, 72, (1, 2500, 64, 0, 1755, 300, 2200, 700)),
        (1, 128, 72, (*[70, 1, 0, 129] * 600, 2000)),  # more than are put in order at a time
    ],
)
def test_packed_sequences_in_another_order(H, K, V, lengths):
    """Each has the same bits, and the right ones."""
    T = sum(lengths) + 100
    x = packed(T, lengths, H, K, V)
    assert plan_of(x)["segments"] > 0
    results, order = ours(x), torch.randperm(len(lengths)).tolist()
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    tokens = [torch.arange(starts[n], starts[n] + lengths[n]) for n in order]
    tokens = torch.cat([*tokens, torch.arange(sum(lengths), T)]).cuda()
    sequences = torch.tensor(order, device="cuda")

    def moved(tensors):
        of_states = ("initial_state", "dht", "final_state", "dh0")
        return {
            name: t[sequences] if name in of_states else t[:, tokens]
            for name, t in tensors.items()
            if name != "cu_seqlens"
        }

    ends = torch.tensor([0, *(lengths[n] for n in order)], device="cuda").cumsum(0)
    there = {name: t for name, t in vars(x).items() if t is not None}
    other = dataclasses.replace(x, **moved(there), cu_seqlens=ends.to(x.cu_seqlens.dtype))
    assert_same_bits(ours(other), moved(results))
    assert_results_close(results, exact_by_chunks(x), x)


@pytest.mark.parametrize("K, V", [(64, 64), (128, 256), (192, 136), (256, 64)])
def test_batch_invariant_sequences_are_not_cut(K, V):
    """Alone, where it would be cut, a sequence has the bits it has in a batch."""
    x = make_inputs(3, 1001, 2, K, V, BF16, 0.5, device="cuda")
    alone = x.select(1)
    assert plan_of(alone)["segments"] > 0
    with batch_invariant():
        in_batch = {name: y[1:2] for name, y in ours(x).items()}
        assert_same_bits(ours(alone), in_batch)


@in_nan
@pytest.mark.parametrize("gate", [0.1, 1.0, "reset"])
@pytest.mark.parametrize("K, V", [(64, 64), (128, 136)])
def test_one_long_among_many_short(K, V, gate):
    lengths = (5, 0, 4000, *[20] * 12, 64, 0)
    x = packed(sum(lengths) + 7, lengths, 2, K, V, gate=gate)
    assert plan_of(x)["segments"] > len(lengths)
    results = ours(x)
    assert_results_close(results, exact_by_chunks(x), x)
    assert not any(results[name][:, sum(lengths) :].any() for name in TOKENS)


@pytest.mark.parametrize("what", BAD_OFFSETS)
def test_bad_offsets_with_segments(what):
    good = packed(8 * 165, tuple(8 * n for n in (5, 0, 64, 1, 0, 70, 16)), 2, 64, 72)
    assert plan_of(good)["segments"] > 0
    expected, kept = ours(good), good.map(torch.clone)
    offsets = 8 * torch.tensor(BAD_OFFSETS[what], device="cuda")
    results = ours(dataclasses.replace(good, cu_seqlens=offsets))
    torch.cuda.synchronize()
    assert all(results[name].shape == expected[name].shape for name in expected)
    assert_same_bits(vars(good), vars(kept))
    assert_same_bits(ours(good), expected)


def test_graph_replays_with_other_segments():
    T, sizes = 1200, (2, 128, 72)
    first = (1000, 0, 30, 70, 1)
    others = [(0, 0, 3, 1190, 0), (200, 300, 100, 400, 200), (1, 64, 65, 0, 128)]
    static = packed(T, first, *sizes)
    cases = [packed(T, lengths, *sizes, seed=i) for i, lengths in enumerate([first, *others])]
    assert plan_of(static)["segments"] > 0
    assert_graph_replays(ours, static, [*cases, cases[1]])


def test_graph_replays_with_other_parts():
    """One segment is followed, then none, many, and a few: eight parts of it, or fewer."""
    sizes, T = (for_this_gpu(8), 72, 72), 16600
    few = (3000,) * 5 + (0,) * 10
    cases = [(2500, *[1000] * 14), (1000,) * 15, (8000, 1, 8000, *[0] * 12), few]
    drawn = [packed(T, lengths, *sizes, seed=i) for i, lengths in enumerate(cases)]
    assert sweeps_gradients(plan_of(drawn[0]))
    assert_graph_replays(ours, drawn[0], [*drawn, drawn[1]])


@pytest.mark.parametrize(
    "shape, lengths, gates",
    [
        ((32, 2048, 4, 128, 256), None, None),
        ((8, 2048, 4, 256, 512), None, None),
        ((8, 2048, 4, 160, 320), None, None),
        ((8, 2048, 4, 136, 128), None, None),
        ((1, 32768, 4, 192, 384), None, "every other chunk"),
        ((32, 1024, 16, 64, 64), None, None),
        ((1, 32768, 4, 128, 256), None, None),
        ((8, 2048, 4, 128, 256), None, None),  # the second segment sums the first
        ((1, 32768, 4, 128, 256), None, "every other chunk"),  # A of these comes beside the scan
        ((1, 65536, 1, 64, 64), None, None),
        ((1, 32768, 4, 128, 128), (20_000, 0, 3, *[100] * 100, 2000), None),
    ],
    ids=str,
)
def test_two_hundred_times(shape, lengths, gates):
    x = large_inputs(*shape, gate=0.3, states=True, lengths=lengths)
    x = x if gates is None else mixed_gates(x, gates)
    expected = ours(x)
    assert all(t.isfinite().all() for t in expected.values())
    differences = sum(count_differences(ours(x), expected) for _ in range(200))
    assert differences.item() == 0


@pytest.mark.parametrize("K, V", [(128, 256), (192, 384)])
def test_segments_give_the_same_bits_where_they_remember_each_other(K, V):
    """Gates so weak that a segment's decay is not 0: it is a sum, taken in one order only."""
    x = large_inputs(1, 32768, 4, K, V, gate=1e-3, states=True)
    assert plan_of(x)["segments"] >= 3
    expected = ours(x)
    differences = sum(count_differences(ours(x), expected) for _ in range(50))
    assert differences.item() == 0
