"""Gradients of K and V above 128 by pairs of neighbouring chunks, which have one S and one dS."""

import pytest
import torch
from common import (
    GATES,
    assert_results_close,
    assert_same_bits,
    exact_by_chunks,
    make_inputs,
    ours,
)
from fused import BF16, MIXED, TOKENS, mixed_gates, packed, plan_of, v_first_results

from gla_ext import batch_invariant

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.usefixtures("hopper", "nan_in_fresh_memory"),
]

# Sequences that start at slots of either parity, of one chunk to five; a tail behind them.
LENGTHS = (64, 1, 65, 0, 128, 129, 300, 64, 3)


def check(x):
    assert "gradients.chunk_pair" in plan_of(x)["kernels"]
    results = ours(x)
    assert_results_close(results, exact_by_chunks(x), x)
    return results


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("gate_dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "T, K, V",
    [
        (65, 256, 136),
        (128, 136, 512),
        (192, 200, 192),
        (193, 256, 256),
        (257, 144, 200),
        (384, 192, 264),
    ],
)
def test_pairs_and_chunks_alone(T, K, V, gate_dtype, gate):
    """One to three pairs, and behind them a chunk without another; of three tiles of values to
    eight."""
    check(make_inputs(3, T, 2, K, V, BF16, gate, gate_dtype, device="cuda"))


@pytest.mark.parametrize("K, V", [(256, 136), (136, 200)])
@pytest.mark.parametrize("kind", [*MIXED, "resets alone", "first chunks", "first chunks and one"])
def test_either_chunk_out_of_tier_1(K, V, kind):
    """Every other chunk is the second of its pair; the last of the five is alone."""
    x = make_inputs(2, 310, 2, K, V, BF16, 0.1, device="cuda")
    if kind.startswith("first chunks"):
        for start in range(0, 310, 128):
            x.g[:, start : start + 64] *= 100
        if kind.endswith("one"):
            x.g[:, 64:128] *= 100
    else:
        x = mixed_gates(x, kind)
    check(x)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("K, V", [(256, 200), (136, 136)])
def test_packed_sequences(K, V, gate):
    end = sum(LENGTHS)
    x = packed(end + 10, LENGTHS, 2, K, V, gate=gate)
    results = check(x)
    assert not any(results[name][:, end:].any() for name in TOKENS)


def test_pairs_of_two_segments():
    """Segments of an odd number of chunks: pairs lie in two of them."""
    processors = torch.cuda.get_device_properties().multi_processor_count
    T = 320 * (processors // 8) - 10  # five chunks for each of an eighth of the multiprocessors
    x = make_inputs(1, T, 1, 256, 136, BF16, 0.1, device="cuda")
    assert plan_of(x)["segments"] > 1 and plan_of(x)["segment_chunks"] == 5
    check(mixed_gates(x, "every other chunk"))


def test_v_first_states():
    x = make_inputs(2, 200, 4, 256, 136, BF16, 0.1, device="cuda")
    assert_same_bits(v_first_results(x), check(x))


def test_rows_of_an_odd_number_of_chunks_are_apart():
    """A row's pairs are its own, and every run has the same bits."""
    x = make_inputs(5, 190, 2, 256, 136, BF16, 0.1, device="cuda")
    results = check(x)
    assert_same_bits(ours(x), results)
    for n in (0, 3):
        assert_same_bits(ours(x.select(n)), {name: t[n : n + 1] for name, t in results.items()})


@pytest.mark.parametrize("operand", ["q", "k", "v", "g", "do"])
@pytest.mark.parametrize("token", [10, 70])
@pytest.mark.parametrize("K", [136, 256])
def test_nan_in_either_chunk_stays_in_its_row(K, operand, token):
    x = make_inputs(2, 128, 2, K, 136, BF16, 0.1, device="cuda")
    assert "gradients.chunk_pair" in plan_of(x)["kernels"]
    expected = ours(x)
    getattr(x, operand)[1, token, 0] = torch.nan
    results = ours(x)
    assert_same_bits(
        {name: t[:1] for name, t in results.items()},
        {name: t[:1] for name, t in expected.items()},
    )
    gradients = ("dq", "dk", "dv", "dg")
    assert any(results[name][1, :, 0].isnan().any() for name in gradients)
    assert not any(results[name][1, :, 1].isnan().any() for name in gradients)


def test_not_in_batch_invariant_mode():
    x = make_inputs(2, 200, 2, 256, 136, BF16, 0.1, device="cuda")
    assert "gradients.chunk_pair" not in plan_of(x, batch_invariant=True)["kernels"]
    check(x)
    with batch_invariant():
        assert_results_close(ours(x), exact_by_chunks(x), x)
