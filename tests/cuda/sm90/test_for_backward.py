"""Operands and segments' states that forward keeps for backward on CUDA's fused path."""

import dataclasses

import pytest
import torch
from common import (
    assert_results_close,
    assert_same_bits,
    exact_by_chunks,
    ours,
    outputs_and_gradients,
)
from fused import MIXED, for_this_gpu, operators, plan_of
from kept import (
    CASES,
    FP32,
    PAIRED,
    SWEPT,
    UNPAIRED,
    Kept,
    by_case,
    by_every_case,
    draw,
    for_backward_bytes,
    in_nan,
)
from plans import (
    cluster_items,
    has_cluster_summaries,
    prepared_bytes,
    reads_prepared,
    sweeps_gradients,
)

from gla_ext import batch_invariant, chunk_gla

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("hopper")]


def kept_and_made(x, keep_nothing):
    """Results where operands are kept, which are right, and where they are made again."""
    with Kept() as calls:
        kept = ours(x)
    assert calls.forward == calls.backward == [for_backward_bytes(x)] != [0]
    assert_results_close(kept, exact_by_chunks(x), x)
    keep_nothing()
    with Kept() as calls:
        made = ours(x)
    assert calls.forward == calls.backward == [0]
    return kept, made


def assert_kept_as_made(x, keep_nothing):
    kept, made = kept_and_made(x, keep_nothing)
    assert_same_bits(made, kept)


@pytest.mark.parametrize("case", PAIRED.values(), ids=PAIRED)
def test_operands_of_pairs_of_blocks(case):
    """Forward leaves them on its way, backward makes them with its states."""
    x = draw(case)
    forward, backward, kept = plan_of(x, False), plan_of(x), plan_of(x, for_backward=True)
    several = case is PAIRED["pairs of blocks, one after the other"]
    assert (cluster_items(forward) > 1) == several
    assert not reads_prepared(forward) and cluster_items(forward) == cluster_items(backward)
    assert "states.cluster" in backward["kernels"] and "states.cluster" not in kept["kernels"]
    assert reads_prepared(kept) and sweeps_gradients(kept)


@in_nan
@by_case
@pytest.mark.parametrize("gate", [0.1, 2.0, 10.0, "reset", *MIXED])
def test_same_bits_as_made_again(case, gate, keep_nothing):
    assert_kept_as_made(draw(case, gate), keep_nothing)


@in_nan
@pytest.mark.parametrize("case", SWEPT.values(), ids=SWEPT)
@pytest.mark.parametrize("gate", [0.1, "reset", "every other chunk"])
def test_same_bits_of_swept_segments(case, gate, keep_nothing):
    x = draw(case, gate)
    plan = plan_of(x)
    assert sweeps_gradients(plan) and plan["segments"] > 1
    assert has_cluster_summaries(plan) == (case is SWEPT["swept segments in pairs of blocks"])
    assert_kept_as_made(x, keep_nothing)


@in_nan
@pytest.mark.parametrize("case", UNPAIRED.values(), ids=UNPAIRED)
@pytest.mark.parametrize("gate", [0.1, 2.0, 10.0, "reset", *MIXED])
def test_operands_of_single_blocks(case, gate, keep_nothing):
    """Forward's own, from sums of gates that backward would round otherwise: as accurate."""
    x = draw(case, gate)
    kept_plan = plan_of(x, for_backward=True)
    assert not reads_prepared(plan_of(x, False)) and "states.cluster" not in plan_of(x)["kernels"]
    assert sweeps_gradients(kept_plan) and kept_plan["for_backward_bytes"] > 0
    kept, made = kept_and_made(x, keep_nothing)
    assert_results_close(made, exact_by_chunks(x), x)
    forward = ("o", "final_state")
    assert_same_bits({name: made[name] for name in forward}, {name: kept[name] for name in forward})


@in_nan
@pytest.mark.parametrize("case", UNPAIRED.values(), ids=UNPAIRED)
@pytest.mark.parametrize("gate", [0.1, "every other chunk"])
def test_single_blocks_keep_what_pairs_do(case, gate):
    """Whatever the values: the same operands of the same q, k and g."""
    (B, T, H, K, _), *rest = case
    x, wide = draw(case, gate), draw(((for_this_gpu(B), T, H, K, 256), *rest))
    assert "states.cluster" in plan_of(wide)["kernels"]
    found = []
    for y in (x, dataclasses.replace(wide, q=x.q, k=x.k, g=x.g)):
        operators(y, for_backward_bytes(y), between=lambda kept: found.append(kept.cpu()))
    # Bytes of a chunk and head, at whose end some are not written.
    operands, padding = prepared_bytes(1, K), 112
    count = x.q.shape[0] * -(-T // 64) * H
    single, pairs = (
        kept[: count * operands].view(count, operands)[:, : operands - padding] for kept in found
    )
    assert torch.equal(single, pairs)


@in_nan
@by_case
@pytest.mark.parametrize("states", [False, True])
def test_same_bits_in_batch_invariant_mode(case, states, keep_nothing):
    x = draw(case, 1.0, states=states)
    size = for_backward_bytes(x, batch_invariant=True)
    assert (size > 0) == (x.q.shape[-1] > 128 or x.g.dtype is FP32)
    with batch_invariant():
        with Kept() as calls:
            kept = ours(x)
        assert calls.forward == [size]
        keep_nothing()
        assert_same_bits(ours(x), kept)


@by_every_case
def test_backward_leaves_it_alone(case):
    x = draw(case, "every other chunk")
    size, copies = for_backward_bytes(x), []
    results = operators(x, size, between=lambda kept: copies.extend((kept, kept.clone())))
    assert torch.equal(*copies)
    assert_same_bits(operators(x, size), results)


@in_nan
@pytest.mark.parametrize("case", [CASES["segments"], *SWEPT.values(), *PAIRED.values()])
def test_shared_heads(case, keep_nothing):
    x = draw(case)
    parts = {name: getattr(x, name)[:, :, ::2].contiguous() for name in ("k", "v", "g")}

    def run():
        def function(q, k, v, g, initial_state):
            return chunk_gla(q, k, v, g, initial_state=initial_state, output_final_state=True)

        with Kept() as calls:
            return outputs_and_gradients(function, dataclasses.replace(x, **parts)), calls.forward

    kept, sizes = run()
    assert sizes == [for_backward_bytes(x)]
    keep_nothing()
    assert_same_bits(run()[0], kept)
