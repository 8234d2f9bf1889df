"""A sequence has the same bits in any order, batch and number of segments that promises them."""

import dataclasses

import pytest
import torch
from common import assert_results_close, assert_same_bits, exact_by_chunks, ours
from fused import BF16, draw, facts_of, half_of_the_gpu, plan_of
from plans import reads_prepared

from gla_ext import batch_invariant

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("hopper")]

FP32 = torch.float32
LENGTHS = (1, 2500, 64, 0, 1755, 300, 2200, 700)


@pytest.mark.parametrize(
    "K, V, gate_dtype",
    [
        *[(128, 256, FP32), (256, 128, FP32), (136, 128, BF16)],
        *[(64, 128, FP32), (64, 128, BF16), (40, 8, FP32)],
    ],
)
def test_sums_of_the_segment_before_are_those_of_a_sweep_over_all(K, V, gate_dtype):
    """Gates are so weak that the state remembers every token. o still has the same bits."""
    x = draw(half_of_the_gpu(2, V), 1000, 2, K, V, 1e-3, gate_dtype)
    assert "a segment sums the one before" in facts_of(x)
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
        (16, 128, 256, LENGTHS),
        (4, 64, 128, LENGTHS),
        (64, 64, 64, LENGTHS),
        (4, 200, 72, LENGTHS),
        (4, 136, 72, LENGTHS),
        (1, 128, 72, (*[70, 1, 0, 129] * 600, 2000)),  # more than are put in order at a time
    ],
)
def test_packed_sequences_in_another_order(H, K, V, lengths):
    """Each has the same bits, and the right ones."""
    T = sum(lengths) + 100
    x = draw(1, T, H, K, V, lengths=lengths)
    assert "backward in segments" in facts_of(x)
    results, order = ours(x), torch.randperm(len(lengths)).tolist()
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    tokens = [torch.arange(starts[n], starts[n] + lengths[n]) for n in order]
    tokens = torch.cat([*tokens, torch.arange(sum(lengths), T)]).cuda()
    sequences = torch.tensor(order, device="cuda")

    def moved(name, t):
        of_states = ("initial_state", "dht", "final_state", "dh0")
        return t[sequences] if name in of_states else t[:, tokens]

    ends = torch.tensor([0, *(lengths[n] for n in order)], device="cuda").cumsum(0)
    there = {name: moved(name, t) for name, t in vars(x).items() if name != "cu_seqlens"}
    other = dataclasses.replace(x, **there, cu_seqlens=ends.to(x.cu_seqlens.dtype))
    assert_same_bits(ours(other), {name: moved(name, t) for name, t in results.items()})
    assert_results_close(results, exact_by_chunks(x), x)


@pytest.mark.parametrize("gate", [0.5, "reset"])
@pytest.mark.parametrize(
    "sizes",
    [
        # Alone they would be cut.
        *[(3, 1001, 2, K, V) for K, V in ((64, 64), (128, 256), (192, 136), (256, 64))],
        # More heads than an H200 has clusters for at once: one goes on to other sequences.
        *[(B, T, 3, 72, V) for B, T, V in ((23, 130, 256), (45, 200, 136), (30, 65, 512))],
        *[(80, T, 3, 72, 256) for T in (64, 130)],
    ],
    ids=str,
)
def test_batch_invariant_sequences_alone(sizes, gate):
    x = draw(*sizes, gate)
    if sizes[1] > 1000:
        assert "backward in segments" in facts_of(x.select(1))
    with batch_invariant():
        in_batch = ours(x)
        for n in (0, 1, len(x.q) - 1):
            assert_same_bits(
                ours(x.select(n)), {name: t[n : n + 1] for name, t in in_batch.items()}
            )


def test_rows_of_an_odd_number_of_chunks_are_apart():
    """A row's pairs are its own, and every run has the same bits."""
    x = draw(5, 190, 2, 256, 136)
    assert "gradients.chunk_pair" in facts_of(x)
    results = ours(x)
    assert_same_bits(ours(x), results)
    for n in (0, 3):
        assert_same_bits(ours(x.select(n)), {name: t[n : n + 1] for name, t in results.items()})
