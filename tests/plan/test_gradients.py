"""Which kernels make the gradients in plans of the fused path: sweeps, pairs of chunks."""

import pytest
from plans import (
    cluster_items,
    full_plan,
    has_cluster_summaries,
    reads_prepared,
    state_bytes,
    sweeps_gradients,
)


@pytest.mark.parametrize(
    "change, swept",
    [
        ({}, True),  # 128 heads, 66 clusters at once
        ({"B": 16}, True),
        ({"B": 17}, False),  # two rounds, nearly the half of them idle
        ({"B": 24}, False),
        ({"B": 25}, True),
        ({"B": 8}, False),
        ({"B": 16, "T": 1}, True),
        ({"K": 64}, False),
        ({"K": 64, "V": 64, "B": 49}, False),  # 264 blocks at once
        ({"K": 64, "V": 64, "B": 50}, True),
        ({"K": 64, "V": 64, "B": 66}, True),
        ({"K": 64, "V": 64, "B": 67}, False),
        ({"K": 8, "V": 8, "B": 66}, True),
        ({"K": 64, "V": 72, "B": 66}, False),
        ({"K": 64, "V": 64, "B": 66, "gate_dtype": "float32"}, False),
        ({"K": 64, "V": 64, "B": 66, "batch_invariant": True}, False),
        ({"K": 64, "V": 64, "B": 1, "T": 66 * 2048, "N": 66}, True),
        ({"K": 64, "V": 64, "B": 1, "T": 66 * 2048, "N": 66, "batch_invariant": True}, False),
        ({"K": 64, "V": 64, "B": 1, "T": 61 * 2048, "N": 66}, False),  # in segments of 31 chunks
        ({"K": 64, "V": 64, "B": 1, "T": 2048 * 66}, True),  # in 66 segments of 32 chunks
        ({"K": 64, "V": 64, "B": 1, "T": 2048 * 61}, False),
        ({"K": 72}, True),
        ({"K": 136}, False),
        ({"V": 128}, True),
        ({"V": 72}, True),
        ({"V": 64}, False),
        ({"V": 192}, False),  # three slices of 64
        ({"V": 264}, False),
        ({"gate_dtype": "float32"}, True),
        ({"batch_invariant": True}, False),
        ({"B": 1, "T": 32 * 2048, "N": 32}, True),  # packed: of any length, in segments
        ({"B": 1, "T": 32 * 2048, "N": 10_000}, True),
        ({"B": 1, "T": 31000, "N": 32}, False),  # of 30 chunks
        ({"B": 1, "T": 32 * 2048, "N": 32, "V": 192}, False),
        ({"B": 1, "T": 32 * 2048, "N": 32, "batch_invariant": True}, False),
        ({"B": 1, "T": 2048}, False),
        ({"B": 1, "T": 32768}, True),  # in segments of 32 chunks
        ({"B": 1, "T": 32767 - 64 * 16}, False),
        ({"B": 1, "T": 131072}, True),
        ({"B": 8, "T": 8192}, False),
        ({"capability": "8.0"}, False),
        ({"processors": 1}, True),
        ({"B": 0}, False),
    ],
    ids=str,
)
def test_cuda_gradients_in_a_sweep(change, swept):
    """Where clusters of two blocks, or single ones of narrow heads, have enough to do; forward has
    nothing to sweep for."""
    assert sweeps_gradients(full_plan(**change, backward=True)) == swept
    assert not sweeps_gradients(full_plan(**change))


@pytest.mark.parametrize(
    "change, paired",
    [
        ({}, True),
        ({"B": 16, "T": 1}, True),
        ({"B": 17}, False),  # gradients are not swept
        ({"K": 72, "V": 200}, True),
        ({"V": 128}, False),
        ({"gate_dtype": "float32"}, False),
        ({"batch_invariant": True}, False),
        ({"B": 1, "T": 32768}, False),  # segments: their own parts are made in that pass
        ({"B": 1, "T": 32 * 2048, "N": 32}, False),
    ],
    ids=str,
)
def test_cuda_operands_and_states_in_one_pass(change, paired):
    plan = full_plan(**change, backward=True)
    assert ("states.cluster" in plan["kernels"]) == paired
    assert (cluster_items(plan) > 0) == (paired or has_cluster_summaries(plan))
    assert "states.cluster" not in full_plan(**change)["kernels"]
    if paired:
        assert (len(plan["kernels"]), reads_prepared(plan)) == (3, True)


@pytest.mark.parametrize(
    "change, paired",
    [
        ({}, True),
        ({"K": 136, "V": 136, "gate_dtype": "float32"}, True),
        ({"V": 128}, False),
        ({"K": 128, "V": 512}, False),
        ({"T": 64}, False),  # one chunk
        ({"T": 65}, True),
        ({"B": 1, "T": 32 * 2048, "N": 32}, True),
        ({"B": 1, "T": 32768}, True),  # in segments
        ({"for_backward": True}, True),
        ({"batch_invariant": True}, False),
    ],
    ids=str,
)
def test_cuda_gradients_by_pairs_of_chunks(change, paired):
    plan = full_plan(**{"K": 256, **change}, backward=True)
    assert ("gradients.chunk_pair" in plan["kernels"]) == paired
    assert "gradients.chunk_pair" not in full_plan(**{"K": 256, **change})["kernels"]


@pytest.mark.parametrize("T, places", [(128, 1), (129, 2), (2048, 16), (2049, 17)])
def test_cuda_pairs_of_chunks_have_one_state_each_way(T, places):
    plan = full_plan(K=256, T=T, backward=True)
    assert plan["state_bytes"] == 2 * 32 * places * 4 * state_bytes(256, 256)
    # Of packed sequences neighbours may both be alone.
    packed = full_plan(K=256, B=1, T=T, N=3, backward=True)
    assert "gradients.chunk_pair" in packed["kernels"]
    assert packed["state_bytes"] == 2 * (T // 64 + 3) * 4 * state_bytes(256, 256)
