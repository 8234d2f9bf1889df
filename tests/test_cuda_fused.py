"""The fused path of bf16 on Hopper, and the segments that its sweeps cut sequences into."""

import dataclasses

import pytest
import torch
from common import (
    BAD_OFFSETS,
    GATES,
    Inputs,
    assert_results_close,
    assert_same_bits,
    copy_into,
    count_differences,
    exact_by_chunks,
    make_inputs,
    ours,
)
from large import large_inputs

from gla_ext import _C, batch_invariant, chunk_gla

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("hopper")]

BF16 = torch.bfloat16
KEYS, VALUES = (8, 64, 72, 120, 128, 136, 256), (8, 64, 72, 136, 256, 512)
BATCHES = {1: 64, 15: 4, 64: 2, 65: 2, 130: 2, 1000: 1}  # of sequences of so many tokens
# In turns, so that every K meets every T, and every V both.
SIZES = [
    (T, K, VALUES[(i + j) % len(VALUES)]) for i, T in enumerate(BATCHES) for j, K in enumerate(KEYS)
]
UNEVEN_LENGTHS = (0, 1, 130, 64, 0, 65, 15, 400, 0)  # with a tail of 20 tokens, 695 in all
TOKENS = ("o", "dq", "dk", "dv", "dg")
by_gate = pytest.mark.parametrize("gate", GATES)
in_nan = pytest.mark.usefixtures("nan_in_fresh_memory")


@pytest.fixture(scope="module")
def hopper():
    if torch.cuda.get_device_capability() != (9, 0) or "9.0a" not in _C.build_info()["cuda_archs"]:
        pytest.skip("needs a GPU of compute capability 9.0 and a build for 9.0a")


def plan_of(x: Inputs, backward: bool = True, **options) -> dict[str, object]:
    """The plan of a call with such inputs on this GPU."""
    return _C.plan(
        *x.q.shape,
        x.v.shape[-1],
        N=None if x.cu_seqlens is None else len(x.cu_seqlens) - 1,
        dtype="bfloat16",
        gate_dtype=str(x.g.dtype).removeprefix("torch."),
        backward=backward,
        processors=torch.cuda.get_device_properties().multi_processor_count,
        device="cuda",
        **options,
    )


def packed(T: int, lengths, *sizes, gate: float | str = 0.1, **options) -> Inputs:
    return make_inputs(1, T, *sizes, BF16, gate, lengths=lengths, device="cuda", **options)


@in_nan
@by_gate
@pytest.mark.parametrize("T, K, V", SIZES)
def test_sizes(T, K, V, gate):
    x = make_inputs(BATCHES[T], T, 3, K, V, BF16, gate, device="cuda")
    assert all(plan_of(x, backward)["path"] == "fused" for backward in (False, True))
    assert_results_close(ours(x), exact_by_chunks(x), x)


@in_nan
@by_gate
@pytest.mark.parametrize("gate_dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("K, V", [(72, 64), (128, 264), (256, 64), (136, 512)])
def test_sweeps_over_operands_in_memory(K, V, gate_dtype, gate):
    """Whole sequences; those of the tests below are cut."""
    x = make_inputs(2, 330, 2, K, V, BF16, gate, gate_dtype, device="cuda")
    with batch_invariant():
        results = ours(x)
    assert plan_of(x, batch_invariant=True)["linear"]
    assert_results_close(results, exact_by_chunks(x), x)


@in_nan
@by_gate
@pytest.mark.parametrize("K, V", [(64, 72), (128, 256), (256, 64)])
@pytest.mark.parametrize("invariant", [False, True], ids=["segments", "whole"])
def test_packed(invariant, K, V, gate):
    x = packed(695, UNEVEN_LENGTHS, 2, K, V, gate=gate)
    assert (plan_of(x, batch_invariant=invariant)["segments"] > 0) == (not invariant)
    with batch_invariant(invariant):
        results = ours(x)
    assert_results_close(results, exact_by_chunks(x), x)
    end = sum(UNEVEN_LENGTHS)
    assert not any(results[name][:, end:].any() for name in TOKENS)


@pytest.mark.parametrize("K, V", [(64, 64), (128, 256), (256, 64)])
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
    states = {name: getattr(x, name).mT.contiguous() for name in ("initial_state", "dht")}
    results, expected = ours(dataclasses.replace(x, **states), state_v_first=True), ours(x)
    for name in ("final_state", "dh0"):
        expected[name] = expected[name].mT
    assert_same_bits(results, expected)


@pytest.mark.parametrize("K", [64, 128, 256])
def test_expanded_upstream_gradient(K):
    x = make_inputs(2, 130, 3, K, 72, BF16, states=False, device="cuda")
    for do in (x.do.new_ones(()), x.do[:1], x.do[:, :1], x.do[:, :, :1]):
        x = dataclasses.replace(x, do=do.expand(2, 130, 3, 72))
        assert_results_close(ours(x), exact_by_chunks(x), x)


def mixed_gates(x: Inputs, kind: str) -> Inputs:
    """Gates that put chunks, or channels of them, in and out of tier 1's range."""
    g = x.g.clone()
    if kind == "every other chunk":
        for start in range(64, x.q.shape[1], 128):
            g[:, start : start + 64] *= 100
    elif kind == "one channel":
        g[..., 5] *= 200
    elif kind == "one head":
        g[:, :, 1] *= 100
    elif kind == "the last token":
        g[:, -1] = -torch.inf
    elif kind == "every first token":
        g[:, ::64] = -80.0
    else:
        g[:] = -torch.inf
    return dataclasses.replace(x, g=g)


MIXED = ["every other chunk", "one channel", "one head", "the last token", "every first token"]


@in_nan
@pytest.mark.parametrize("K, V", [(64, 64), (128, 136), (200, 64)])
@pytest.mark.parametrize("kind", [*MIXED, "resets alone"])
def test_chunks_in_and_out_of_tier_1(kind, K, V):
    x = mixed_gates(make_inputs(2, 330, 2, K, V, BF16, 0.1, device="cuda"), kind)
    assert_results_close(ours(x), exact_by_chunks(x), x)


# Segments


@in_nan
@pytest.mark.parametrize("gate", [0.1, 1.0, 10.0, "reset"])
@pytest.mark.parametrize("shape", [(1, 6400, 1, 64, 64), (1, 4101, 2, 128, 256)], ids=str)
def test_segments_of_a_long_sequence(shape, gate):
    x = make_inputs(*shape, BF16, gate, device="cuda")
    assert all(plan_of(x, backward)["segments"] > 2 for backward in (False, True))
    assert_results_close(ours(x), exact_by_chunks(x), x)


def test_segments_of_many_chunks():
    x = large_inputs(1, 32768, 4, 128, 256, states=True)
    plan = plan_of(x)
    assert plan["segments"] > 2 and plan["segment_chunks"] > 8
    assert_results_close(ours(x), exact_by_chunks(x), x)


@pytest.mark.parametrize("K, V", [(64, 64), (128, 256), (256, 64)])
def test_batch_invariant_sequences_are_not_cut(K, V):
    """Alone, where it would be cut, a sequence has the bits it has in a batch."""
    x = make_inputs(3, 1001, 2, K, V, BF16, 0.5, device="cuda")
    alone = x.select(1)
    assert plan_of(alone)["segments"] > 0
    with batch_invariant():
        in_batch = {name: y[1:2] for name, y in ours(x).items()}
        assert_same_bits(ours(alone), in_batch)


@in_nan
@pytest.mark.parametrize("gate", [0.1, 1.0, "reset"])
@pytest.mark.parametrize("K, V", [(64, 64), (128, 136)])
def test_one_long_among_many_short(K, V, gate):
    lengths = (5, 0, 4000, *[20] * 12, 64, 0)
    x = packed(sum(lengths) + 7, lengths, 2, K, V, gate=gate)
    assert plan_of(x)["segments"] > len(lengths)
    results = ours(x)
    assert_results_close(results, exact_by_chunks(x), x)
    assert not any(results[name][:, sum(lengths) :].any() for name in TOKENS)


@pytest.mark.parametrize("what", BAD_OFFSETS)
def test_bad_offsets_with_segments(what):
    good = packed(8 * 165, tuple(8 * n for n in (5, 0, 64, 1, 0, 70, 16)), 2, 64, 72)
    assert plan_of(good)["segments"] > 0
    expected, kept = ours(good), good.map(torch.clone)
    offsets = 8 * torch.tensor(BAD_OFFSETS[what], device="cuda")
    results = ours(dataclasses.replace(good, cu_seqlens=offsets))
    torch.cuda.synchronize()
    assert all(results[name].shape == expected[name].shape for name in expected)
    assert_same_bits(vars(good), vars(kept))
    assert_same_bits(ours(good), expected)


def test_graph_replays_with_other_segments():
    T, sizes = 1200, (2, 128, 72)
    first = (1000, 0, 30, 70, 1)
    others = [(0, 0, 3, 1190, 0), (200, 300, 100, 400, 200), (1, 64, 65, 0, 128)]
    static = packed(T, first, *sizes)
    cases = [packed(T, lengths, *sizes, seed=i) for i, lengths in enumerate([first, *others])]
    assert plan_of(static)["segments"] > 0
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        ours(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = ours(static)
    for case in [*cases, cases[1]]:
        copy_into(static, case)
        for x in results.values():
            x.fill_(torch.nan)
        graph.replay()
        assert_same_bits(results, ours(case))


@pytest.mark.parametrize(
    "shape, lengths",
    [
        ((32, 2048, 4, 128, 256), None),
        ((8, 2048, 4, 256, 512), None),
        ((32, 1024, 16, 64, 64), None),
        ((1, 32768, 4, 128, 256), None),
        ((1, 65536, 1, 64, 64), None),
        ((1, 32768, 4, 128, 128), (20_000, 0, 3, *[100] * 100, 2000)),
    ],
    ids=str,
)
def test_two_hundred_times(shape, lengths):
    x = large_inputs(*shape, gate=0.3, states=True, lengths=lengths)
    expected = ours(x)
    assert all(t.isfinite().all() for t in expected.values())
    differences = sum(count_differences(ours(x), expected) for _ in range(200))
    assert differences.item() == 0


def test_segments_give_the_same_bits_where_they_remember_each_other():
    """Gates so weak that a segment's decay is not 0: it is a sum, taken in one order only."""
    x = large_inputs(1, 32768, 4, 128, 256, gate=1e-3, states=True)
    assert plan_of(x)["segments"] >= 3
    expected = ours(x)
    differences = sum(count_differences(ours(x), expected) for _ in range(50))
    assert differences.item() == 0


# NaN


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("lengths", [(70, 150, 3), (300, 700, 3)], ids=["whole", "segments"])
@pytest.mark.parametrize("gate", [0.1, 10.0, "reset"])
@pytest.mark.parametrize("operand", ["q", "k", "v", "g", "do"])
@pytest.mark.parametrize("offset", [10, 64, 149])
def test_nan_is_never_silent_and_stays_in_its_sequence(offset, operand, gate, lengths):
    start, end = lengths[0], lengths[0] + lengths[1]
    token = start + offset
    x = packed(sum(lengths), lengths, 2, 64, 72, gate=gate)
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


# The path that is forced, and what the paths take


def operators(x: Inputs, save_states: bool) -> dict[str, torch.Tensor]:
    """Forward and backward operators, which alone can save states."""
    op, inputs = torch.ops.gla_ext, (x.q, x.k, x.v, x.g, None, x.initial_state, x.cu_seqlens)
    with torch.no_grad():
        o, final_state, states = op.chunk_gla_fwd(*inputs, None, True, False, save_states, False)
        dq, dk, dv, dg, _, dh0 = op.chunk_gla_bwd(x.do, x.dht, *inputs, states, None, False, False)
    return {
        "o": o,
        "final_state": final_state,
        "dq": dq,
        "dk": dk,
        "dv": dv,
        "dg": dg,
        "dh0": dh0,
    }


@in_nan
@pytest.mark.parametrize("gate_dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("save_states", [False, True], ids=["made", "saved"])
@pytest.mark.parametrize("lengths", [None, UNEVEN_LENGTHS], ids=["batch", "packed"])
@pytest.mark.parametrize("K", [64, 128, 256])
@pytest.mark.parametrize("gate", [0.1, "reset"])
def test_fp32_gates_and_saved_states(gate, K, lengths, save_states, gate_dtype):
    x = make_inputs(*(1, 695, 2, K, 72, BF16, gate, gate_dtype), lengths=lengths, device="cuda")
    sweeps = not save_states and (gate_dtype == BF16 or K > 64)
    forward, backward = (plan_of(x, way, save_states=save_states) for way in (False, True))
    assert forward["path"] == ("fused" if sweeps else "steps")
    assert backward["path"] == ("steps" if save_states and K > 64 else "fused")
    assert (backward["segments"] > 0) == sweeps
    assert_results_close(operators(x, save_states), exact_by_chunks(x), x)


def test_forcing_a_path(monkeypatch):
    x = make_inputs(1, 130, 2, 64, 72, BF16, 0.5, device="cuda")
    planned = ours(x)
    monkeypatch.setenv("GLA_EXT_CUDA_PATH", "")
    assert_same_bits(ours(x), planned)
    monkeypatch.setenv("GLA_EXT_CUDA_PATH", "fused")
    assert_same_bits(ours(x), planned)
    monkeypatch.setenv("GLA_EXT_CUDA_PATH", "steps")
    steps = ours(x)
    assert any(not torch.equal(steps[name], planned[name]) for name in planned)
    assert_results_close(steps, exact_by_chunks(x), x)


def test_an_unknown_path(monkeypatch):
    x = make_inputs(1, 20, 1, 8, 8, BF16, device="cuda")
    monkeypatch.setenv("GLA_EXT_CUDA_PATH", "fast")
    with pytest.raises(ValueError, match="GLA_EXT_CUDA_PATH: expected fused or steps, got fast"):
        chunk_gla(x.q, x.k, x.v, x.g)


REFUSED = {  # K, V, dtype, gate_dtype, layout
    "q, k and v in torch.bfloat16": (64, 64, torch.float32, None, "contiguous"),
    "K and V to be multiples of 8": (64, 60, BF16, None, "contiguous"),
    "rows that start at multiples of 16 bytes": (64, 64, BF16, None, "misaligned"),
    "K to be at most 256": (264, 64, BF16, None, "contiguous"),
    "g in torch.bfloat16, or K to be more than 64": (64, 64, BF16, torch.float32, "contiguous"),
}


@pytest.mark.parametrize("missing", REFUSED)
def test_what_the_fused_forward_does_not_take(missing, monkeypatch):
    K, V, dtype, gate_dtype, layout = REFUSED[missing]
    x = make_inputs(*(1, 20, 2, K, V, dtype, 1.0, gate_dtype), layout=layout, device="cuda")
    monkeypatch.setenv("GLA_EXT_CUDA_PATH", "fused")
    message = f"chunk_gla: GLA_EXT_CUDA_PATH=fused expected {missing}, got a call that only the st"
    with pytest.raises(NotImplementedError, match=message):
        chunk_gla(x.q, x.k, x.v, x.g)


def test_the_fused_forward_saves_no_states(monkeypatch):
    x = make_inputs(1, 20, 2, 64, 64, BF16, device="cuda")
    monkeypatch.setenv("GLA_EXT_CUDA_PATH", "fused")
    with pytest.raises(NotImplementedError, match="=fused expected no states to be saved, got"):
        operators(x, save_states=True)


@pytest.mark.parametrize(
    "K, gate_dtype, missing",
    [
        (264, BF16, "K to be at most 256"),
        (64, torch.float16, "g in torch.bfloat16 or torch.float32"),
    ],
)
def test_what_the_fused_backward_does_not_take(K, gate_dtype, missing, monkeypatch):
    x = make_inputs(1, 20, 2, K, 64, BF16, gate_dtype=gate_dtype, device="cuda")
    monkeypatch.setenv("GLA_EXT_CUDA_PATH", "fused")
    arguments = (x.do, None, x.q, x.k, x.v, x.g, *[None] * 3, x.q.new_empty(0), None, False, False)
    message = f"chunk_gla_bwd: GLA_EXT_CUDA_PATH=fused expected {missing}, got a call that only"
    with pytest.raises(NotImplementedError, match=message):
        torch.ops.gla_ext.chunk_gla_bwd(*arguments)
