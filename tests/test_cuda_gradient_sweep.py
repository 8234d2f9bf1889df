"""Gradients of bf16 on Hopper in one sweep, dS on chip: what the plan takes for it, all tiers."""

import dataclasses

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
from fused import BF16, MIXED, mixed_gates, plan_of

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("hopper")]

SIZES = [(72, 72), (104, 128), (128, 128), (128, 200), (128, 256)]
by_gate = pytest.mark.parametrize("gate", GATES)
in_nan = pytest.mark.usefixtures("nan_in_fresh_memory")


def make_swept(B, T, H, K, V, gate=0.1, gate_dtype=BF16, **options):
    """Inputs whose gradients this GPU sweeps for: enough heads for its clusters."""
    x = make_inputs(B, T, H, K, V, BF16, gate, gate_dtype, device="cuda", **options)
    assert plan_of(x)["swept_gradients"]
    return x


@in_nan
@by_gate
@pytest.mark.parametrize("K, V", SIZES)
@pytest.mark.parametrize("T", [1, 64, 65, 130, 330])
def test_sizes(T, K, V, gate):
    x = make_swept(16, T, 4, K, V, gate)
    assert_results_close(ours(x), exact_by_chunks(x), x)


@in_nan
@pytest.mark.parametrize("B", [32, 33])
def test_more_heads_than_clusters(B):
    x = make_swept(B, 200, 4, 128, 256)
    assert_results_close(ours(x), exact_by_chunks(x), x)


@in_nan
@by_gate
@pytest.mark.parametrize("K, V", [(72, 72), (128, 256)])
def test_fp32_gates(K, V, gate):
    x = make_swept(16, 150, 4, K, V, gate, torch.float32)
    assert_results_close(ours(x), exact_by_chunks(x), x)


@in_nan
@by_gate
def test_segments(gate):
    """One sequence, whose parts meet in the states between them."""
    x = make_swept(1, 8200, 16, 128, 256, gate)
    assert plan_of(x)["segments"] > 1
    assert_results_close(ours(x), exact_by_chunks(x), x)


@in_nan
@pytest.mark.parametrize("K, V", [(104, 128), (128, 256)])
@pytest.mark.parametrize("kind", [*MIXED, "resets alone"])
def test_chunks_in_and_out_of_tier_1(kind, K, V):
    x = mixed_gates(make_swept(16, 330, 4, K, V), kind)
    assert_results_close(ours(x), exact_by_chunks(x), x)


@in_nan
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("states", [False, True])
def test_states(states, v_first):
    x = make_swept(16, 130, 4, 128, 200, states=states)
    expected = exact_by_chunks(x)
    if states and v_first:
        turned = {name: getattr(x, name).mT.contiguous() for name in ("initial_state", "dht")}
        results = ours(dataclasses.replace(x, **turned), state_v_first=True)
        for name in ("final_state", "dh0"):
            results[name] = results[name].mT
    else:
        results = ours(x)
    assert_results_close(results, expected, x)


@in_nan
@pytest.mark.parametrize("kind", [None, "one channel"])
def test_saved_states(kind):
    x = make_swept(16, 200, 4, 128, 256, states=False)
    if kind is not None:
        x = mixed_gates(x, kind)
    op, inputs = torch.ops.gla_ext, (x.q, x.k, x.v, x.g, None, None, None)
    states = op.chunk_gla_fwd(*inputs, None, False, False, True, False)[2]
    gradients = op.chunk_gla_bwd(x.do, None, *inputs, states, None, False, False)
    results = dict(zip(("dq", "dk", "dv", "dg"), gradients, strict=False))
    expected = exact_by_chunks(x)
    assert_results_close(results, {name: expected[name] for name in results}, x)


@pytest.mark.parametrize("gate", [0.1, "reset"])
def test_same_bits_in_every_run(gate):
    """Of 40 runs: roles of a block that do not wait for one another would show."""
    x = make_swept(33, 700, 4, 128, 256, gate)
    first = ours(x)
    for _ in range(40):
        assert_same_bits(ours(x), first)


@pytest.mark.parametrize("operand", ["q", "k", "v", "g", "do"])
def test_nan_is_never_silent_and_stays_in_its_sequence(operand):
    x = make_swept(16, 200, 4, 128, 256)
    poisoned = getattr(x, operand).clone()
    poisoned[3, 70, 1, 5] = torch.nan
    results, clean = ours(dataclasses.replace(x, **{operand: poisoned})), ours(x)
    others = [n for n in range(16) if n != 3]
    for name, t in results.items():
        assert_same_bits({name: t[others]}, {name: clean[name][others]})
    assert any(results[name][3, :, 1].isnan().any() for name in ("dq", "dk", "dv", "dg"))
