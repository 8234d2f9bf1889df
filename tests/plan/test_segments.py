"""Plans on CUDA that cut sequences into segments: of the fused path, then of the steps."""

import random

import pytest
from plans import (
    BATCH,
    TIERS,
    by_pass,
    cluster_items,
    cuda_plan,
    full_plan,
    has_cluster_summaries,
    prepared_bytes,
    reads_prepared,
    steps_plan,
    sweeps_gradients,
)


def sweep_blocks(plan, B, H, K, V, gate_dtype, backward) -> int:
    """Multiprocessors that the sweeps over the segments fill: a block of 128 values and, two in
    backward, 128 keys or all of 129 to 192; where K and V are at most 64, with a half, but for
    forward with fp32 gates. Those that make gradients take two blocks, or where K and V are at most
    64 one."""
    narrow = max(K, V) <= 64 and (backward or gate_dtype == "bfloat16")
    sweeps = H * -(-V // 128) * (2 * (1 + (K > 192)) if backward else 1)
    if sweeps_gradients(plan):
        sweeps = (1 if narrow else 2) * H
    return B * plan["segments"] * sweeps / (2 if narrow else 1)


@by_pass
@pytest.mark.parametrize("gate_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("processors", [78, 132])
@pytest.mark.parametrize("T", [32768, 131072, 131072 - 63])
@pytest.mark.parametrize(
    "B, H, K, V",
    [
        *[(1, 4, 128, 256), (1, 1, 64, 64), (1, 8, 64, 64), (2, 4, 128, 128)],
        *[(1, 4, 136, 320), (1, 4, 192, 384), (1, 2, 200, 384)],
    ],
)
def test_cuda_segments_of_long_sequences(B, H, K, V, T, processors, gate_dtype, backward):
    """As many blocks as processors or a few less, and every chunk is in a segment."""
    shape = {"B": B, "H": H, "K": K, "V": V}
    call = {"T": T, "processors": processors, "gate_dtype": gate_dtype, "backward": backward}
    plan = cuda_plan(**shape, **call)
    blocks = sweep_blocks(plan, **shape, gate_dtype=gate_dtype, backward=backward)
    assert blocks <= processors
    assert blocks >= 0.7 * processors or plan["segment_chunks"] == 4  # the shortest
    chunks, segments, each = -(-T // 64), plan["segments"], plan["segment_chunks"]
    assert (segments - 1) * each < chunks <= segments * each


# Heads that leave two places of a sweep's block for each.
TWO_PLACES = {"B": 8, "T": 2048}


@pytest.mark.parametrize(
    "change, prefixed",
    [
        ({}, True),
        ({"T": 64 * 5}, True),
        ({"T": 64 * 4}, False),  # one segment
        ({"K": 72, "V": 200}, True),
        ({"gate_dtype": "float32"}, True),
        ({"gate_dtype": "float32", "T": 8192}, True),
        ({"H": 8, "V": 128, "T": 8192}, True),
        ({"T": 65536}, True),
        ({"H": 2, "K": 256, "V": 512, "T": 4096}, True),
        ({"H": 2, "K": 256, "V": 512, "T": 4160}, False),  # own parts pay
        ({"H": 2, "K": 136, "V": 512, "T": 4096}, True),
        ({"H": 2, "K": 136, "V": 512, "T": 4160}, False),
        ({"B": 5}, True),  # three places
        ({"B": 5, "T": 2112}, False),
        ({"B": 4}, False),  # four
        ({"B": 9}, False),  # one
        ({"K": 64}, True),
        ({"K": 64, "B": 5}, True),
        ({"K": 64, "B": 5, "T": 2112}, False),
        ({"K": 8, "V": 72, "B": 16}, True),
        ({"K": 64, "V": 128, "H": 8, "gate_dtype": "float32"}, True),
        ({"B": 16, "K": 64, "V": 64}, False),  # has a kernel of its own
        ({"B": 16, "K": 64, "V": 64, "gate_dtype": "float32"}, True),  # but for bf16 gates alone
        ({"batch_invariant": True}, False),
        ({"B": 1, "T": 16384, "N": 8}, False),
    ],
    ids=str,
)
def test_cuda_segments_that_sum_the_one_before(change, prefixed):
    """Two, the second the shorter, without own parts, a scan and what these take."""
    shape = TWO_PLACES | change
    plan = full_plan(**shape, backward=False)
    assert plan["replays"] == prefixed
    assert not full_plan(**shape, backward=True)["replays"]
    if prefixed:
        chunks = -(-shape["T"] // 64)
        assert plan["segments"] == 2
        few_fp32 = (BATCH | shape)["K"] <= 64 and shape.get("gate_dtype") == "float32"
        share = 12 if few_fp32 else 11
        assert chunks > plan["segment_chunks"] == -(-chunks * share // 16) > chunks // 2
        whole = full_plan(**shape | {"gate_dtype": "float32"}, backward=False, batch_invariant=True)
        assert reads_prepared(plan) == reads_prepared(whole) == ((BATCH | shape)["K"] > 64)
        assert len(plan["kernels"]) == len(whole["kernels"]) == 2
        assert plan["workspace_bytes"] == whole["workspace_bytes"]


@pytest.mark.parametrize(
    "B, H, K, V, places, cut",
    [
        (8, 4, 64, 256, 2, (True, False)),
        (5, 4, 64, 256, 3, (True, False)),
        (8, 16, 64, 64, 2, (False, False)),
        (5, 16, 64, 64, 3, (False, False)),
        (4, 16, 64, 64, 4, (True, False)),
        (4, 4, 128, 192, 4, (True, False)),
        (2, 4, 128, 192, 8, (True, True)),
    ],
)
def test_cuda_segments_where_places_are_few(B, H, K, V, places, cut):
    """Two places a sweep's block do not pay for own parts and a scan, but where gradients are swept
    and segments long, and where forward needs neither; of small heads three do not either."""
    blocks = B * H * (1 if max(K, V) <= 64 else -(-V // 128))
    assert (2 if max(K, V) <= 64 else 1) * 132 // blocks == places
    shape = {"B": B, "T": 2048, "H": H, "K": K, "V": V}
    plans = [full_plan(**shape, backward=backward) for backward in (False, True)]
    assert tuple(plan["segments"] > 0 for plan in plans) == cut


@by_pass
def test_cuda_segments_cost_launches_and_a_state_each(backward):
    shape = {"B": 1, "T": 32768, "V": 192, "backward": backward}
    cut, whole = full_plan(**shape), full_plan(**shape, batch_invariant=True)
    assert len(cut["kernels"]) == len(whole["kernels"]) + 2
    states = 4 * cut["segments"] * 128 * 192 * 4 * (1 + backward)
    decays = 4 * cut["segments"] * 128 * 4
    operands = 0 if backward else prepared_bytes(4 * 512, 128)  # backward has them anyway
    assert cut["workspace_bytes"] == whole["workspace_bytes"] + states + decays + operands
    assert cut["state_bytes"] == whole["state_bytes"]


@by_pass
@pytest.mark.parametrize(
    "change", [{}, {"B": 4096}, {"B": 64, "H": 1}, {"B": 1, "T": 256}, {"processors": 8}], ids=str
)
def test_cuda_no_segments(change, backward):
    """Batches that fill the GPU, and sequences that are too short."""
    plan = full_plan(backward=backward, **change)
    assert (plan["segments"], plan["segment_chunks"]) == (0, 0)


@by_pass
@pytest.mark.parametrize("N", [1, 8, 200])
def test_cuda_segments_of_packed_sequences(N, backward):
    """Their lengths are not known: one may be all of the row, and as many segments must do."""
    T = 65536
    plan = full_plan(B=1, T=T, N=N, backward=backward)
    segments, each = plan["segments"], plan["segment_chunks"]
    assert each > 0
    for longest in (T, T - 64 * N, T // N):
        lengths = [longest, *[(T - longest) // max(N - 1, 1)] * (N - 1)]
        lengths.append(T - sum(lengths))  # the tail
        assert min(lengths) >= 0
        assert sum(max(-(-length // (64 * each)), 1) for length in lengths) <= segments


@by_pass
@pytest.mark.parametrize(
    "H, K, V", [(4, 128, 256), (1, 128, 128), (16, 64, 64), (2, 192, 384), (2, 256, 512)]
)
@pytest.mark.parametrize("T, N", [(300, 2), (2048, 3), (8500, 9), (65536, 33), (131072, 700)])
def test_cuda_states_of_own_parts_have_room(T, N, H, K, V, backward):
    """Whatever the lengths, of which the device makes its choice."""
    plan = full_plan(B=1, T=T, N=N, H=H, K=K, V=V, backward=backward)
    each, generator = plan["segment_chunks"], random.Random(T)
    assert each > 0
    some_have_parts = False
    for _ in range(300):
        # With the tokens behind them; few are long, many short, and some empty.
        long = generator.choice([0, 0.01, 0.1, 1])
        weights = [generator.random() ** 8 + 1e-9 for _ in range(N + 1)]
        weights = [w * (1000 if generator.random() < long else 1) for w in weights]
        lengths = [int(T * weight / sum(weights)) for weight in weights]
        lengths[generator.randrange(N + 1)] += T - sum(lengths)
        chunks = [-(-length // 64) for length in lengths]
        segments = [max(1, -(-c // each)) for c in chunks]
        assert sum(segments) <= plan["segments"]
        followed, parts = sum(segments) - (N + 1), 1
        while (
            parts < 8
            and each % (2 * parts) == 0
            and each >= 8 * parts
            and 2 * parts * followed <= plan["summaries_at_once"]
        ):
            parts *= 2
        states = sum(-(-c * parts // each) for c in chunks if c > each)
        assert states <= plan["segment_states"]
        some_have_parts |= followed > 0
    assert some_have_parts


@by_pass
@pytest.mark.parametrize("K", [64, 128, 256])
def test_short_packed_sequences_take_no_room_for_states(K, backward):
    """A segment that another follows is full of tokens, whatever else the tokens are cut into."""
    plans = [full_plan(B=1, T=65536, N=N, K=K, backward=backward) for N in (2, 40_000)]
    for plan, N in zip(plans, (2, 40_000), strict=True):
        followed = 65536 // (64 * plan["segment_chunks"])
        assert plan["segments"] == followed + N + 1
        assert 2 * followed <= plan["segment_states"] <= 16 * followed
    assert plans[0]["segment_states"] == plans[1]["segment_states"]


def test_packed_tokens_that_hardly_fill_a_segment_are_not_cut():
    """No sequence can have several segments then, so none has a summary."""
    for T in (4 * 64 + 1, 4 * 64, 3 * 64 + 1):
        plan = full_plan(B=1, T=T, N=3)
        assert (plan["segments"] > 0) == (T > 4 * 64), T


@pytest.mark.parametrize(
    "change, gates, pieces",
    [
        ({}, True, 1),
        ({"N": 512}, True, 4),  # most of them short
        ({"K": 72, "V": 200}, True, 1),
        ({"V": 128}, True, 0),
        ({"V": 192}, False, 0),  # gradients are not swept
        ({"T": 31000}, False, 0),
        ({"K": 136}, False, 0),
        ({"gate_dtype": "float32"}, False, 0),
    ],
    ids=str,
)
def test_cuda_packed_sequences_gate_in_forward(change, gates, pieces):
    """Forward makes summaries only for sequences of several segments. If operands are kept, they
    come from the chip. If backward cuts alike, the states that enter segments are kept too.
    """
    shape = {"B": 1, "T": 65536, "N": 32} | change
    forward, kept, backward = (
        full_plan(**shape, backward=b, for_backward=k)
        for b, k in ((False, False), (False, True), (True, True))
    )
    assert ("states.cluster.packed_summaries" in forward["kernels"], reads_prepared(forward)) == (
        gates,
        not gates,
    )
    assert cluster_items(forward) == cluster_items(kept) == pieces
    assert "states.cluster.packed_summaries" not in backward["kernels"] and reads_prepared(backward)
    assert kept["for_backward_bytes"] == backward["for_backward_bytes"]
    if gates:
        assert sweeps_gradients(backward)
        assert len(forward["kernels"]) == len(kept["kernels"]) == 6
        assert forward["segments"] > 0
        chunks, sizes = 65536 // 64 + shape["N"] + 1, BATCH | change
        operands = prepared_bytes(4 * chunks, sizes["K"]) + TIERS * 4 * chunks
        alike = forward["segments"] == backward["segments"]
        state = 4 * sizes["K"] * sizes["V"] * 4 * alike
        states = 2 * (65536 // 64 // forward["segment_chunks"])
        assert 0 <= kept["for_backward_bytes"] - operands - states * state < 1024


@pytest.mark.parametrize(
    "change, paired",
    [
        ({}, True),
        ({"K": 72, "V": 200}, True),
        ({"H": 16, "T": 8192}, True),
        ({"T": 32768 - 16 * 64}, False),  # segments too short for gradients in a sweep
        ({"V": 128}, False),
        ({"V": 512}, False),
        ({"K": 256}, False),
        ({"gate_dtype": "float32"}, False),
        ({"N": 1}, False),
        ({"batch_invariant": True}, False),
        ({"B": 32, "T": 2048}, False),
    ],
    ids=str,
)
def test_cuda_operands_and_segments_in_one_pass(change, paired):
    shape = {"B": 1, "T": 32768} | change
    forward, backward, kept = (
        full_plan(**shape, backward=b, for_backward=k)
        for b, k in ((False, False), (True, False), (True, True))
    )
    assert has_cluster_summaries(forward) == has_cluster_summaries(backward) == paired
    assert not has_cluster_summaries(kept)
    if paired:
        assert (len(forward["kernels"]), len(backward["kernels"]), len(kept["kernels"])) == (
            3,
            6,
            5,
        )
        assert forward["segments"] == backward["segments"] > 0
        assert cluster_items(forward) == 1


@pytest.mark.parametrize("B, K, segments", [(8, 128, 2), (8, 256, 2), (1, 128, 8), (32, 128, 0)])
def test_calls_on_a_pool_replay_nothing(B, K, segments):
    """The second segment would write the row that the first may be still to read."""
    plan = full_plan(B=B, K=K, on_pool=True)
    assert (plan["segments"], plan["replays"]) == (segments, False)
    kernels = any("scan" in name for name in plan["kernels"])
    assert kernels == (segments > 0)
    heads = full_plan(B=B, K=K, on_pool=True, head_gated=True)
    assert heads["kernels"] == full_plan(B=B, K=K, head_gated=True)["kernels"]


@by_pass
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("processors", [78, 132])
@pytest.mark.parametrize(
    "B, T, H, K, V", [(1, 32768, 4, 128, 256), (1, 2048, 4, 128, 256), (3, 8191, 2, 36, 100)]
)
def test_cuda_segments_of_the_steps(B, T, H, K, V, processors, dtype, backward):
    """At most two blocks a multiprocessor, and every chunk is in a segment."""
    call = {"T": T, "processors": processors, "dtype": dtype, "backward": backward}
    plan = steps_plan(B=B, H=H, K=K, V=V, **call)
    wide = dtype == "bfloat16" and V % 8 == 0
    sweeps = 2 if backward and dtype == "bfloat16" else 1
    blocks = B * H * -(-K // 64) * -(-V // (128 if wide else 64)) * sweeps
    chunks, segments, each = -(-T // 64), plan["segments"], plan["segment_chunks"]
    assert segments > 1 and segments * blocks <= 2 * processors
    assert (segments - 1) * each < chunks <= segments * each and 2 * each + 4 < chunks
    assert plan["kernels"][plan["kernels"].index("segment_scan") - 1].endswith(".summaries")
    whole = steps_plan(B=B, H=H, K=K, V=V, **call, batch_invariant=True)
    buffers = [K * V, K, *[K * V] * backward]  # a segment's: states, decays, gradients of states
    places = [-(-B * segments * H * each * 4 // 256) * 256 for each in buffers]
    assert plan["workspace_bytes"] == whole["workspace_bytes"] + sum(places)


@by_pass
@pytest.mark.parametrize(
    "change",
    [
        *[{"batch_invariant": True}, {"value_gated": True}, {"N": 2}],
        *[{"T": 64 * 12}, {"B": 32, "T": 2048}],  # too short, enough to fill a GPU
    ],
    ids=str,
)
def test_cuda_sequences_that_the_steps_sweep_whole(change, backward):
    shape = {"B": 1, "T": 32768, "H": 4, "K": 128, "V": 256} | change
    plan = steps_plan(**shape, backward=backward)
    assert plan["segments"] == 0 and "segment_scan" not in plan["kernels"]
