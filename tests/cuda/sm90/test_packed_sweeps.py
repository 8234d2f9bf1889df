"""Gradients of packed sequences on Hopper in one sweep over segments, dS on chip."""

import dataclasses

import pytest
import torch
from common import (
    BAD_OFFSETS,
    GATES,
    assert_graph_replays,
    assert_results_close,
    assert_same_bits,
    count_differences,
    exact_by_chunks,
    ours,
)
from fused import BF16, MIXED, TOKENS, for_this_gpu, mixed_gates, plan_of, v_first_results
from large import large_inputs
from plans import sweeps_gradients

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("hopper")]

# With a tail of 100 tokens 8,500 in all, some in several segments of 32 chunks or a few more.
LENGTHS = (0, 1, 4300, 64, 0, 65, 2200, 15, 1755, 0)
TOKENS_IN_ALL = 8500
SIZES = [(16, 128, 128), (16, 72, 200), (16, 128, 256), (64, 64, 64), (64, 40, 16)]  # H, K, V
OF_STATES = ("initial_state", "dht", "final_state", "dh0")
in_nan = pytest.mark.usefixtures("nan_in_fresh_memory")
by_sizes = pytest.mark.parametrize("H, K, V", SIZES)


def make_swept(H, K, V, lengths=LENGTHS, gate=0.1, gate_dtype=BF16):
    """Inputs whose gradients this GPU sweeps for: enough heads, where H are for an H200."""
    size = 1.0 if gate == "reset" else gate
    x = large_inputs(1, TOKENS_IN_ALL, for_this_gpu(H), K, V, BF16, size, True, lengths)
    g = x.g
    if gate == "reset":
        generator = torch.Generator("cuda").manual_seed(1)
        g = g.masked_fill(torch.rand(g.shape, generator=generator, device="cuda") < 0.3, -torch.inf)
    x = dataclasses.replace(x, g=g.to(gate_dtype))
    plan = plan_of(x)
    assert sweeps_gradients(plan) and plan["segments"] > 0
    if lengths is LENGTHS:
        assert sum(length > 64 * plan["segment_chunks"] for length in lengths) == 2
    return x


def assert_heads_close(results, x):
    """Of some heads alone: the reference of all takes gigabytes."""
    heads = [0, 1, x.q.shape[2] - 1]

    def some(name, t):
        return t[:, heads] if name in OF_STATES else t[:, :, heads]

    of_x = {n: some(n, t) for n, t in vars(x).items() if t is not None and n != "cu_seqlens"}
    part = dataclasses.replace(x, **of_x)
    expected = exact_by_chunks(part)
    assert_results_close(
        {name: some(name, t) for name, t in results.items()},
        {name: expected[name] for name in results},
        part,
    )


@in_nan
@by_sizes
@pytest.mark.parametrize("gate", GATES)
def test_sizes(gate, H, K, V, operands):
    x = make_swept(H, K, V, gate=gate)
    results = ours(x)
    assert_heads_close(results, x)
    assert not any(results[name][:, sum(LENGTHS) :].any() for name in TOKENS)


@in_nan
@pytest.mark.parametrize("kind", [*MIXED, "resets alone"])
@pytest.mark.parametrize("H, K, V", [(16, 104, 128), (16, 128, 256), (64, 64, 64)])
def test_chunks_in_and_out_of_tier_1(kind, H, K, V):
    x = mixed_gates(make_swept(H, K, V), kind)
    assert_heads_close(v_first_results(x), x)


@in_nan
@pytest.mark.parametrize("gate", [0.1, 2.0, "reset"])
@pytest.mark.parametrize("V", [72, 256])
def test_fp32_gates(V, gate, operands):
    x = make_swept(16, 128, V, gate=gate, gate_dtype=torch.float32)
    assert_heads_close(ours(x), x)


@in_nan
@by_sizes
@pytest.mark.parametrize("absent", [("initial_state",), ("dht",), ("initial_state", "dht")])
def test_without_states(absent, H, K, V):
    x = dataclasses.replace(make_swept(H, K, V), **dict.fromkeys(absent))
    assert_heads_close(ours(x), x)


@by_sizes
@pytest.mark.parametrize(
    "lengths",
    [
        *((8500,), (8499,), (0, 8500, 0), (500,) * 17),
        *((64,) * 100, (64, 0) * 50, (0,) * 9, (8400, *[1] * 50)),
    ],
    ids=lambda lengths: f"{len(lengths)}, {sum(lengths)}",
)
@in_nan
def test_lengths(lengths, H, K, V):
    """One sequence, a tail of all tokens, many short sequences."""
    x = make_swept(H, K, V, lengths)
    results = ours(x)
    assert_heads_close(results, x)
    assert not any(results[name][:, sum(lengths) :].any() for name in TOKENS)


@by_sizes
def test_nan_after_the_last_offset_is_ignored(H, K, V, operands):
    x = make_swept(H, K, V)
    clean = ours(x)
    for name in ("q", "k", "v", "g", "do"):
        getattr(x, name)[:, sum(LENGTHS) :] = torch.nan
    assert_same_bits(ours(x), clean)


@pytest.mark.parametrize("H, K, V", [(16, 128, 256), (16, 128, 128), (64, 64, 64)])
@pytest.mark.parametrize("operand", ["q", "k", "v", "g", "do"])
def test_nan_is_never_silent_and_stays_in_its_sequence(operand, H, K, V, operands):
    x = make_swept(H, K, V)
    start, end = x.cu_seqlens[2:4].tolist()
    clean = ours(x)
    getattr(x, operand)[0, start + 2500, 1, 5] = torch.nan  # of the second segment
    results = ours(x)
    for name, t in results.items():
        if name in ("final_state", "dh0"):
            others = [n for n in range(len(LENGTHS)) if n != 2]
            assert_same_bits({name: t[others]}, {name: clean[name][others]})
        else:
            assert_same_bits({name: t[:, :start]}, {name: clean[name][:, :start]})
            assert_same_bits({name: t[:, end:]}, {name: clean[name][:, end:]})
    assert any(results[name][0, start:end, 1].isnan().any() for name in ("dq", "dk", "dv", "dg"))


@pytest.mark.parametrize("H, K, V", [(16, 128, 256), (64, 64, 64)])
@pytest.mark.parametrize("what", BAD_OFFSETS)
def test_bad_offsets(what, H, K, V):
    good = make_swept(H, K, V, (2000, 0, 3000, 500, 0, 2500, 500))
    expected, kept = ours(good), good.map(torch.clone)
    offsets = (8500 / 165 * torch.tensor(BAD_OFFSETS[what], device="cuda").double()).long()
    results = ours(dataclasses.replace(good, cu_seqlens=offsets))
    torch.cuda.synchronize()
    assert all(results[name].shape == expected[name].shape for name in expected)
    assert_same_bits(vars(good), vars(kept))
    assert_same_bits(ours(good), expected)


@pytest.mark.parametrize("H, K, V", [(16, 128, 256), (64, 64, 64)])
def test_graph_replays_with_other_lengths(H, K, V):
    first = (4300, 0, 2200, 1000, 900)
    others = [(0, 0, 3, 8490, 0), (1700,) * 5, (1, 64, 65, 0, 128)]
    static = make_swept(H, K, V, first)
    cases = [make_swept(H, K, V, lengths) for lengths in [first, *others]]
    cases = [case.map(lambda t, i=i: t.roll(i, 1)) for i, case in enumerate(cases)]
    assert_graph_replays(ours, static, [*cases, cases[1]])


@pytest.mark.parametrize("H, K, V", [(4, 128, 256), (8, 128, 128), (16, 64, 64)])
@pytest.mark.parametrize("gate", [0.3, "every other chunk"])
def test_a_hundred_times(gate, H, K, V):
    lengths = (20_000, 0, 3, *[100] * 100, 15_000, 12_345)
    weak = gate in MIXED
    x = large_inputs(1, 65536, H, K, V, BF16, 0.05 if weak else gate, states=True, lengths=lengths)
    x = mixed_gates(x, gate) if weak else x
    assert sweeps_gradients(plan_of(x))
    expected = ours(x)
    assert all(t.isfinite().all() for t in expected.values())
    differences = sum(count_differences(ours(x), expected) for _ in range(100))
    assert differences.item() == 0
