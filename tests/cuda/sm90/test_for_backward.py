"""Operands and segments' states that forward keeps for backward on CUDA's fused path."""

import dataclasses

import pytest
import torch
from common import assert_results_close, assert_same_bits, exact_by_chunks, ours
from fused import MIXED, for_this_gpu, operators, plan_of
from kept import (
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

from gla_ext import batch_invariant

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("hopper")]


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


def assert_plan_of(case, x):
    """What the cases are there for."""
    plan, kept = plan_of(x), plan_of(x, for_backward=True)
    if case in SWEPT.values():
        assert sweeps_gradients(plan) and plan["segments"] > 1
        assert has_cluster_summaries(plan) == (case is SWEPT["swept segments in pairs of blocks"])
    elif case in UNPAIRED.values():
        assert not reads_prepared(plan_of(x, False)) and "states.cluster" not in plan["kernels"]
        assert sweeps_gradients(kept)


@in_nan
@by_every_case
@pytest.mark.parametrize("gate", [0.1, 2.0, 10.0, "reset", *MIXED])
def test_same_bits_as_made_again(case, gate, keep_nothing):
    """With single blocks, operands of forward and backward differ in their last bits, because the
    two round sums of gates differently. Both are as accurate.
    """
    x = draw(case, gate)
    assert_plan_of(case, x)
    size, results = for_backward_bytes(x), []
    assert size > 0
    for expected in (size, 0):
        with Kept() as calls:
            results.append(ours(x))
        assert calls.forward == calls.backward == [expected]
        keep_nothing()
    kept, made = results
    names = ("o", "final_state") if case in UNPAIRED.values() else made
    assert_same_bits({name: made[name] for name in names}, kept)
    truth = exact_by_chunks(x)
    for found in results:
        assert_results_close(found, truth, x)


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


@by_case
def test_nothing_is_kept_in_batch_invariant_mode(case):
    x = draw(case, 1.0)
    assert for_backward_bytes(x, batch_invariant=True) == 0
    with batch_invariant(), Kept() as calls:
        ours(x)
    assert calls.forward == calls.backward == [0]


@by_every_case
def test_backward_leaves_it_alone(case):
    x = draw(case, "every other chunk")
    size, copies = for_backward_bytes(x), []
    results = operators(x, size, between=lambda kept: copies.extend((kept, kept.clone())))
    assert torch.equal(*copies)
    assert_same_bits(operators(x, size), results)
