"""Gradients of bf16 on Hopper in one sweep, dS on chip: what the plan takes for it, all tiers."""

import dataclasses
import math

import pytest
import torch
from common import (
    GATES,
    assert_results_close,
    assert_same_bits,
    exact_by_chunks,
    make_inputs,
    ours,
    outputs_and_gradients,
)
from fused import BF16, MIXED, for_this_gpu, mixed_gates, plan_of, v_first_results
from plans import cluster_items, has_cluster_summaries, sweeps_gradients

from gla_ext import chunk_gla

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("hopper")]

SIZES = [(16, 4, K, V) for K, V in ((72, 72), (104, 128), (128, 128), (128, 200), (128, 256))]
NARROW_SIZES = [(22, 9, K, V) for K, V in ((64, 64), (8, 64), (40, 16), (64, 8))]
by_gate = pytest.mark.parametrize("gate", GATES)
in_nan = pytest.mark.usefixtures("nan_in_fresh_memory")


def make_swept(B, T, H, K, V, gate=0.1, gate_dtype=BF16, **options):
    """Inputs whose gradients this GPU sweeps for: enough heads for its blocks, where B are enough
    for an H200."""
    B = for_this_gpu(B) if B > 1 else 1
    x = make_inputs(B, T, H, K, V, BF16, gate, gate_dtype, device="cuda", **options)
    assert sweeps_gradients(plan_of(x))
    return x


def make_keeping(*sizes):
    """The same, of which pairs of blocks keep operands."""
    x = make_swept(*sizes)
    assert (
        "states.cluster" in plan_of(x)["kernels"]
        and plan_of(x, for_backward=True)["for_backward_bytes"] > 0
    )
    return x


@in_nan
@by_gate
@pytest.mark.parametrize("B, H, K, V", [*SIZES, *NARROW_SIZES])
@pytest.mark.parametrize("T", [1, 64, 65, 130, 330])
def test_sizes(T, B, H, K, V, gate, keep_nothing):
    x = make_swept(B, T, H, K, V, gate)
    keep_nothing()
    assert_results_close(ours(x), exact_by_chunks(x), x)


@in_nan
@by_gate
@pytest.mark.parametrize("V", [200, 256])
@pytest.mark.parametrize("T", [130, 330])
def test_sizes_of_kept_operands(T, V, gate):
    """Which pairs of blocks make in forward, above in backward."""
    x = make_keeping(16, T, 4, 128, V, gate)
    assert_results_close(ours(x), exact_by_chunks(x), x)


@in_nan
@pytest.mark.parametrize("B, H, K, V", [(16, 4, 128, 256), (22, 9, 64, 64)])
@pytest.mark.parametrize("states", [False, True])
def test_no_tokens(states, B, H, K, V):
    """The states pass through, and so do their gradients."""
    x = make_swept(B, 0, H, K, V, states=states)
    results = ours(x)
    assert all(results[name].numel() == 0 for name in ("o", "dq", "dk", "dv", "dg"))
    if states:
        states = {"final_state": x.initial_state, "dh0": x.dht}
        assert_same_bits({name: results[name] for name in states}, states)
    else:
        assert not results["final_state"].any()


@in_nan
@pytest.mark.parametrize(
    "B, T, H, K, V", [(32, 200, 4, 128, 256), (33, 200, 4, 128, 256), (53, 200, 8, 64, 64)]
)
def test_more_heads_than_fit_at_once(B, T, H, K, V, operands):
    x = make_swept(B, T, H, K, V)
    assert_results_close(ours(x), exact_by_chunks(x), x)


SHORT_SHAPES = [(33, 1, 72, 200, 2), (33, 65, 128, 256, 2)]  # operands: more than the inputs
SHAPES_OF_CLUSTERS = [
    *((33, 64, 128, 256, 2), (49, 190, 72, 200, 3)),
    *((64, 128, 128, 256, 4), (65, 129, 104, 256, 4)),
]
by_kind = pytest.mark.parametrize("kind", [None, "every other chunk", "one head"])


@in_nan
@by_kind
@pytest.mark.parametrize("B, T, K, V, pieces", SHORT_SHAPES + SHAPES_OF_CLUSTERS)
def test_clusters_that_go_on_to_other_heads(B, T, K, V, pieces, kind, keep_nothing):
    """Operands and states of more heads than an H200 has clusters for at once, of few chunks."""
    x = make_swept(B, T, 4, K, V)
    plan = plan_of(x)
    assert ("states.cluster" in plan["kernels"], cluster_items(plan)) == (True, pieces)
    keep_nothing()
    x = x if kind is None else mixed_gates(x, kind)
    assert_results_close(ours(x), exact_by_chunks(x), x)


@in_nan
@by_kind
@pytest.mark.parametrize("B, T, K, V, pieces", SHAPES_OF_CLUSTERS)
def test_clusters_that_keep_operands_of_other_heads(B, T, K, V, pieces, kind):
    """The same operands, from forward."""
    x = make_keeping(B, T, 4, K, V)
    assert cluster_items(plan_of(x, backward=False)) == pieces
    x = x if kind is None else mixed_gates(x, kind)
    assert_results_close(ours(x), exact_by_chunks(x), x)


def with_sums(x, multiple, least):
    """Gates whose sums over a chunk lie beside odd multiples of so many log2 units."""
    g, chunks, unit = x.g.clone(), x.g.shape[1] // 64, multiple * math.log(2)
    y = g[:, : 64 * chunks].double().unflatten(1, (chunks, 64))
    y *= least * unit / -y[:, :, :60].sum(2, keepdim=True).amax()
    y = y.to(BF16).double()
    sums = -y[:, :, :60].sum(2) / unit
    rest = y[:, :, :60].sum(2) + unit * (2 * torch.ceil((sums + 1) / 2) - 1)
    for i in range(60, 64):  # cut off, so that what is left has the same sign
        part = -(rest.float().view(torch.int32) & -65536).view(torch.float32)
        y[:, :, i] = part
        rest = rest + part
    g[:, : 64 * chunks] = y.flatten(1, 2).to(BF16)
    return dataclasses.replace(x, g=g)


by_sums = pytest.mark.parametrize("multiple, least", [(1.0, 3.0), (1.0, 20.0), (112.0, 0.1)])


@in_nan
@pytest.mark.parametrize("B, H, K, V", [(16, 4, 128, 256), (22, 9, 64, 64)])
@by_sums
def test_references_that_rounding_decides(multiple, least, B, H, K, V, operands):
    """Half of the sums lies beside the middle of two integers, or sums lie at the end of tier 1's
    range: whoever sums the gates must come to the same reference."""
    x = with_sums(make_swept(B, 330, H, K, V), multiple, least)
    assert_results_close(ours(x), exact_by_chunks(x), x)


@in_nan
@by_gate
@pytest.mark.parametrize("K, V", [(72, 72), (128, 256)])
def test_fp32_gates(K, V, gate):
    x = make_swept(16, 150, 4, K, V, gate, torch.float32)
    assert_results_close(ours(x), exact_by_chunks(x), x)


@in_nan
@pytest.mark.parametrize("gate_dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("gate", [0.1, 2.0, "reset"])
@pytest.mark.parametrize("V", [128, 256])
def test_segments(V, gate, gate_dtype):
    """One sequence, whose parts meet in the states between them."""
    x = make_swept(1, 8200, 16, 128, V, gate, gate_dtype)
    assert plan_of(x)["segments"] > 1
    assert_results_close(ours(x), exact_by_chunks(x), x)


@in_nan
@pytest.mark.parametrize("K, V", [(128, 256), (72, 200)])
@pytest.mark.parametrize("kind", [None, *MIXED, "resets alone", 112.0])
def test_operands_and_segments_in_one_pass(kind, K, V):
    x = make_swept(1, 8200, 16, K, V)
    for backward in (False, True):
        assert has_cluster_summaries(plan_of(x, backward))
    if kind == 112.0:
        x = with_sums(x, kind, 0.1)
    elif kind is not None:
        x = mixed_gates(x, kind)
    assert_results_close(v_first_results(x), exact_by_chunks(x), x)


@in_nan
@by_gate
def test_narrow_segments(gate):
    x = make_swept(1, 8200, for_this_gpu(64), 64, 64, gate)
    assert plan_of(x)["segments"] > 1
    assert_results_close(ours(x), exact_by_chunks(x), x)


@in_nan
@pytest.mark.parametrize("K, V", [(64, 64), (40, 24)])
@pytest.mark.parametrize("kind", [*MIXED, "resets alone"])
def test_narrow_segments_in_and_out_of_tier_1(kind, K, V):
    x = mixed_gates(make_swept(1, 8200, for_this_gpu(64), K, V), kind)
    assert plan_of(x)["segments"] > 1
    assert_results_close(v_first_results(x), exact_by_chunks(x), x)


@in_nan
@pytest.mark.parametrize("K, V", [(64, 64), (40, 24)])
@pytest.mark.parametrize("kind", [*MIXED, "resets alone"])
def test_narrow_chunks_in_and_out_of_tier_1(kind, K, V):
    x = mixed_gates(make_swept(22, 330, 9, K, V), kind)
    assert_results_close(ours(x), exact_by_chunks(x), x)


@in_nan
@pytest.mark.parametrize("gate_dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("K, V", [(104, 128), (128, 256)])
@pytest.mark.parametrize("kind", [*MIXED, "resets alone"])
def test_chunks_in_and_out_of_tier_1(kind, K, V, gate_dtype, operands):
    x = mixed_gates(make_swept(16, 330, 4, K, V, gate_dtype=gate_dtype), kind)
    assert_results_close(ours(x), exact_by_chunks(x), x)


@in_nan
@pytest.mark.parametrize("B, H, K, V", [(16, 4, 128, 200), (22, 9, 56, 48)])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("states", [False, True])
def test_states(states, v_first, B, H, K, V, operands):
    x = make_swept(B, 130, H, K, V, states=states)
    results = v_first_results(x) if states and v_first else ours(x)
    assert_results_close(results, exact_by_chunks(x), x)


@in_nan
@pytest.mark.parametrize("B, H, K, V", [(16, 4, 128, 200), (22, 9, 56, 48)])
@pytest.mark.parametrize("absent", ["initial_state", "dht"])
def test_one_state_without_the_other(absent, B, H, K, V, operands):
    x = dataclasses.replace(make_swept(B, 130, H, K, V), **{absent: None})
    assert_results_close(ours(x), exact_by_chunks(x), x)


@pytest.mark.parametrize("gate", [0.1, 1.0])
@pytest.mark.parametrize("B, H, K, V", [(16, 4, 128, 256), (22, 9, 64, 64)])
def test_gates_of_the_first_token_have_no_gradient(B, H, K, V, gate, operands):
    """Without states there is nothing that they decay: dg of it is what sums, which must cancel,
    leave over of terms as large as those of other tokens."""
    x = make_swept(B, 330, H, K, V, gate, states=False)
    dg = ours(x)["dg"].float()
    assert dg[:, 0].abs().max() <= 2e-2 * dg[:, 1:].abs().max()
    assert dg[:, 0].square().mean() <= 1e-5 * dg[:, 1:].square().mean()


@in_nan
@pytest.mark.parametrize("B, K, V", [(16, 128, 256), (50, 64, 64)])
@pytest.mark.parametrize("HK", [1, 2])
def test_shared_heads(HK, B, K, V, operands):
    """The same bits as repeats of k, v and gates, whose gradients are then sums."""
    x = make_swept(B, 130, 4, K, V)

    def run(repeat):
        def function(q, k, v, g, initial_state):
            if repeat:
                k, v, g = (t.repeat_interleave(4 // HK, 2) for t in (k, v, g))
            return chunk_gla(q, k, v, g, initial_state=initial_state, output_final_state=True)

        parts = {name: getattr(x, name)[:, :, :HK].contiguous() for name in ("k", "v", "g")}
        return outputs_and_gradients(function, dataclasses.replace(x, **parts))

    assert_same_bits(run(False), run(True))


@in_nan
@pytest.mark.parametrize("B, K, V", [(16, 128, 256), (50, 64, 64)])
def test_strides(B, K, V, operands):
    """Halves of wider tensors, and an upstream gradient that is one row for all."""
    x = make_swept(B, 130, 4, K, V)

    def sliced(t):
        return torch.cat([t, t.new_full(t.shape, torch.nan)], -1)[..., : t.shape[-1]]

    tokens = {name: sliced(getattr(x, name)) for name in ("q", "k", "v", "g")}
    x = dataclasses.replace(x, **tokens, do=x.do[:1, :1].expand(x.do.shape))
    assert_results_close(ours(x), exact_by_chunks(x), x)


@pytest.mark.parametrize("gate", [0.1, "reset"])
@pytest.mark.parametrize("B, H, K, V", [(33, 4, 128, 128), (33, 4, 128, 256), (53, 8, 64, 64)])
def test_same_bits_in_every_run(B, H, K, V, gate, operands):
    """Of 40 runs: roles of a block that do not wait for one another would show, or hang."""
    x = make_swept(B, 700, H, K, V, gate)
    first = ours(x)
    assert_results_close(first, exact_by_chunks(x), x)
    for _ in range(40):
        assert_same_bits(ours(x), first)


@pytest.mark.parametrize("B, K, V", [(16, 128, 256), (50, 64, 64)])
@pytest.mark.parametrize("operand", ["q", "k", "v", "g", "do"])
def test_nan_is_never_silent_and_stays_in_its_sequence(operand, B, K, V, operands):
    x = make_swept(B, 200, 4, K, V)
    sequence = len(x.q) // 2
    poisoned = getattr(x, operand).clone()
    poisoned[sequence, 70, 1, 5] = torch.nan
    results, clean = ours(dataclasses.replace(x, **{operand: poisoned})), ours(x)
    others = [n for n in range(len(x.q)) if n != sequence]
    for name, t in results.items():
        assert_same_bits({name: t[others]}, {name: clean[name][others]})
    assert any(results[name][sequence, :, 1].isnan().any() for name in ("dq", "dk", "dv", "dg"))
