"""The fused path of bf16 on Hopper: sizes, packing, tiers, NaN."""

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
)
from fused import (
    BF16,
    MIXED,
    TOKENS,
    UNEVEN_LENGTHS,
    for_this_gpu,
    mixed_gates,
    packed,
    plan_of,
    v_first_results,
)
from plans import cluster_items, reads_prepared

from gla_ext import batch_invariant, chunk_gla

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("hopper")]

KEYS, VALUES = (8, 64, 72, 120, 128, 136, 192, 256), (8, 64, 72, 136, 256, 512)
BATCHES = {1: 64, 15: 4, 64: 2, 65: 2, 130: 2, 1000: 1}  # of sequences of so many tokens
# In turns, so that every K meets every T, and every V both.
SIZES = [
    (T, K, VALUES[(i + j) % len(VALUES)]) for i, T in enumerate(BATCHES) for j, K in enumerate(KEYS)
]
by_gate = pytest.mark.parametrize("gate", GATES)
in_nan = pytest.mark.usefixtures("nan_in_fresh_memory")


@in_nan
@by_gate
@pytest.mark.parametrize("T, K, V", SIZES)
def test_sizes(T, K, V, gate):
    x = make_inputs(BATCHES[T], T, 3, K, V, BF16, gate, device="cuda")
    assert all(plan_of(x, backward)["path"] == "fused" for backward in (False, True))
    assert_results_close(ours(x), exact_by_chunks(x), x)


@in_nan
@by_gate
@pytest.mark.parametrize(
    "B, T, V, pieces",
    [(23, 130, 256, 2), (45, 200, 136, 3), (30, 65, 512, 3), (80, 64, 256, 4), (80, 130, 256, 4)],
)
def test_clusters_that_go_on_to_other_sequences(B, T, V, pieces, gate):
    """Forward of more heads than an H200 has clusters for at once, and some of them alone."""
    x = make_inputs(B, T, 3, 72, V, BF16, gate, device="cuda")
    assert cluster_items(plan_of(x, False, batch_invariant=True)) == pieces
    with batch_invariant():
        results = ours(x)
        for n in (0, 21, B - 1):
            alone = {name: t[n : n + 1] for name, t in results.items()}
            assert_same_bits(ours(x.select(n)), alone)
    assert_results_close(results, exact_by_chunks(x), x)


@in_nan
@by_gate
@pytest.mark.parametrize("gate_dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("K, V", [(72, 64), (128, 264), (256, 64), (136, 512)])
def test_sweeps_over_operands_in_memory(K, V, gate_dtype, gate):
    """Whole sequences; those of the tests below are cut."""
    x = make_inputs(2, 330, 2, K, V, BF16, gate, gate_dtype, device="cuda")
    with batch_invariant():
        results = ours(x)
    assert reads_prepared(plan_of(x, batch_invariant=True))
    assert_results_close(results, exact_by_chunks(x), x)


@in_nan
@pytest.mark.parametrize("kind", [*MIXED, "resets alone"])
@pytest.mark.parametrize("K, V", [(72, 64), (200, 8)])
@pytest.mark.parametrize(
    "B, T, lengths", [(11, 330, None), (1, 2900, (330,) * 8 + (5,) * 40)], ids=["batch", "packed"]
)
def test_blocks_that_make_operands_of_several_chunks(B, T, lengths, K, V, kind):
    """More chunks than an H200 has blocks for at once; packed, also slots that no sequence uses."""
    x = mixed_gates(make_inputs(B, T, 6, K, V, BF16, 0.1, lengths=lengths, device="cuda"), kind)
    assert reads_prepared(plan_of(x))
    assert_results_close(ours(x), exact_by_chunks(x), x)


@in_nan
@by_gate
@pytest.mark.parametrize("K, V", [(64, 72), (128, 256), (136, 64), (256, 64)])
@pytest.mark.parametrize("invariant", [False, True], ids=["segments", "whole"])
def test_packed(invariant, K, V, gate):
    x = packed(695, UNEVEN_LENGTHS, 2, K, V, gate=gate)
    assert (plan_of(x, batch_invariant=invariant)["segments"] > 0) == (not invariant)
    with batch_invariant(invariant):
        results = ours(x)
    assert_results_close(results, exact_by_chunks(x), x)
    end = sum(UNEVEN_LENGTHS)
    assert not any(results[name][:, end:].any() for name in TOKENS)


FEW_KEYS = [(8, 8), (64, 64), (40, 136), (64, 512)]


@in_nan
@by_gate
@pytest.mark.parametrize("invariant", [False, True], ids=["segments", "whole"])
@pytest.mark.parametrize("lengths", [None, UNEVEN_LENGTHS], ids=["batch", "packed"])
@pytest.mark.parametrize("K, V", FEW_KEYS)
def test_fp32_gates_of_few_keys(K, V, lengths, invariant, gate):
    x = make_inputs(1, 695, 2, K, V, BF16, gate, torch.float32, lengths=lengths, device="cuda")
    for backward in (False, True):
        plan = plan_of(x, backward, batch_invariant=invariant)
        assert (plan["path"], plan["segments"] > 0) == ("fused", not invariant)
    with batch_invariant(invariant):
        results = ours(x)
    assert_results_close(results, exact_by_chunks(x), x)


@in_nan
@pytest.mark.parametrize("kind", [*MIXED, "resets alone"])
@pytest.mark.parametrize("K, V", FEW_KEYS)
def test_fp32_gates_of_few_keys_in_and_out_of_tier_1(K, V, kind):
    x = make_inputs(70, 200, 3, K, V, BF16, 0.1, torch.float32, device="cuda")
    x = mixed_gates(x, kind)
    assert_results_close(ours(x), exact_by_chunks(x), x)


@pytest.mark.parametrize("sequences", ["one", "half of the GPU"])
@pytest.mark.parametrize("K, V", [(8, 8), (64, 64), (40, 136)])
def test_low_bits_of_fp32_gates_count(K, V, sequences):
    """Rounded to bf16, such gates would leave 1 / 512 more in the state; ones leave no other error
    than that of keys' rounding, which is not always up.
    """
    gate, T = -(1 + 2**-9) / 32, 500
    B = 1 if sequences == "one" else for_this_gpu(66) // (2 * -(-V // 128))
    ones = torch.ones(B, T, 2, K, dtype=BF16, device="cuda")
    v = torch.ones(B, T, 2, V, dtype=BF16, device="cuda")
    h0 = torch.zeros(B, 2, K, V, device="cuda", requires_grad=True)
    o, state = chunk_gla(ones, ones, v, ones.float() * gate, 1.0, h0, output_final_state=True)
    expected = math.expm1(T * gate) / math.expm1(gate)
    assert (state / expected - 1).abs().max() < 2**-11
    assert (o[:, -1].float() / (K * expected) - 1).abs().max() < 2**-8
    (dh0,) = torch.autograd.grad(o, h0, torch.ones_like(o))
    assert (dh0 / (math.exp(gate) * expected) - 1).abs().max() < 2**-11


@pytest.mark.parametrize("K, V", [(64, 64), (128, 256), (192, 64), (256, 64)])
def test_no_tokens(K, V):
    x = make_inputs(2, 0, 3, K, V, BF16, device="cuda")
    results = ours(x)
    assert torch.equal(results["final_state"], x.initial_state)
    assert torch.equal(results["dh0"], x.dht)


def test_one_token_of_an_odd_stride():
    """The stride of a dimension of size 1 is never taken, so it need not be aligned."""
    x = make_inputs(4, 1, 3, 64, 72, BF16, device="cuda")

    def odd(t):
        B, T, H, D = t.shape
        return t.as_strided((B, T, H, D), (H * D, H * D + 1, D, 1)) if t.ndim == 4 else t

    tokens = {name: odd(getattr(x, name)) for name in ("q", "k", "v", "g", "do")}
    assert_same_bits(ours(dataclasses.replace(x, **tokens)), ours(x))


@pytest.mark.parametrize("lengths", [None, UNEVEN_LENGTHS], ids=["batch", "packed"])
@pytest.mark.parametrize("K", [64, 128, 136])
def test_v_first_states(K, lengths):
    x = make_inputs(1, 695, 2, K, 72, BF16, 0.1, lengths=lengths, device="cuda")
    assert plan_of(x)["segments"] > 0
    assert_same_bits(v_first_results(x), ours(x))


@pytest.mark.parametrize("K", [64, 128, 256])
def test_expanded_upstream_gradient(K):
    x = make_inputs(2, 130, 3, K, 72, BF16, states=False, device="cuda")
    for do in (x.do.new_ones(()), x.do[:1], x.do[:, :1], x.do[:, :, :1]):
        x = dataclasses.replace(x, do=do.expand(2, 130, 3, 72))
        assert_results_close(ours(x), exact_by_chunks(x), x)


@in_nan
@pytest.mark.parametrize("K, V", [(64, 64), (128, 136), (160, 64), (200, 64)])
@pytest.mark.parametrize("kind", [*MIXED, "resets alone"])
def test_chunks_in_and_out_of_tier_1(kind, K, V):
    x = mixed_gates(make_inputs(2, 330, 2, K, V, BF16, 0.1, device="cuda"), kind)
    assert_results_close(ours(x), exact_by_chunks(x), x)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("lengths", [(70, 150, 3), (300, 700, 3)], ids=["whole", "segments"])
@pytest.mark.parametrize("gate", [0.1, 10.0, "reset"])
@pytest.mark.parametrize("operand", ["q", "k", "v", "g", "do"])
@pytest.mark.parametrize("offset", [10, 64, 149])
@pytest.mark.parametrize("gate_dtype", [BF16, torch.float32], ids=str)
def test_nan_is_never_silent_and_stays_in_its_sequence(gate_dtype, offset, operand, gate, lengths):
    start, end = lengths[0], lengths[0] + lengths[1]
    token = start + offset
    x = packed(sum(lengths), lengths, 2, 64, 72, gate=gate, gate_dtype=gate_dtype)
    clean = ours(x)
    getattr(x, operand)[0, token, 0] = torch.nan
    results = ours(x)

    for name, value in results.items():
        if name in ("final_state", "dh0"):
            assert torch.equal(value[::2], clean[name][::2]), name
            assert torch.equal(value[:, 1], clean[name][:, 1]), name
        else:
            assert torch.equal(value[0, :start], clean[name][0, :start]), name
            assert torch.equal(value[0, end:], clean[name][0, end:]), name
            assert torch.equal(value[0, :, 1], clean[name][0, :, 1]), name

    chunk_start = start + offset // 64 * 64
    if operand == "do":  # reaches the gradients of its token and those before it
        for name in ("o", "final_state"):
            assert torch.equal(results[name], clean[name]), name
        for name in ("dq", "dv"):
            assert results[name][0, token, 0].isnan().all(), name
        assert results["dv"][0, start : token + 1, 0].isnan().all()
        assert results["dh0"][1, 0].isnan().all()
        behind = slice(min(chunk_start + 64, end), end)
        for name in ("dq", "dk", "dv", "dg"):
            assert torch.equal(results[name][0, behind], clean[name][0, behind]), name
        return
    seen = slice(token, token + 1) if operand == "q" else slice(token, end)
    assert results["o"][0, seen, 0].isnan().all()
    assert results["final_state"][1, 0].isnan().all() or operand == "q"
    if operand != "g":
        assert results["d" + ("k" if operand == "q" else "q")][0, token, 0].isnan().all()
    before = slice(start, chunk_start)
    assert torch.equal(results["o"][0, before], clean["o"][0, before])


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("K", [64, 128, 256])
def test_nan_after_the_last_offset_is_ignored(K):
    x = packed(695, UNEVEN_LENGTHS, 2, K, 72)
    clean = ours(x)
    for name in ("q", "k", "v", "g", "do"):
        getattr(x, name)[:, sum(UNEVEN_LENGTHS) :] = torch.nan
    assert_same_bits(ours(x), clean)
