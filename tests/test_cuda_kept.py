"""Operands and segments' states that forward keeps for backward on CUDA's fused path."""

import pytest
import torch
from common import (
    Inputs,
    assert_results_close,
    assert_same_bits,
    exact_by_chunks,
    make_inputs,
    ours,
)
from fused import BF16, MIXED, UNEVEN_LENGTHS, mixed_gates, plan_of
from large import large_inputs

from gla_ext import batch_invariant, chunk_gla

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("hopper")]

in_nan = pytest.mark.usefixtures("nan_in_fresh_memory")
VARIABLE = "GLA_EXT_KEEP_OPERANDS"
FP32 = torch.float32
CASES = {
    "segments": ((1, 2100, 2, 128, 256), BF16, None),
    "segments, few values": ((1, 800, 2, 72, 64), BF16, None),
    "fp32 gates": ((1, 700, 2, 128, 200), FP32, None),
    "many keys": ((2, 300, 3, 256, 136), BF16, None),
    "many keys, fp32 gates": ((1, 150, 2, 200, 72), FP32, None),
    "packed": ((1, 695, 2, 104, 72), BF16, UNEVEN_LENGTHS),
    "packed, many keys": ((1, 695, 2, 136, 72), BF16, UNEVEN_LENGTHS),
}
by_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def draw(case, gate=0.1, **options) -> Inputs:
    shape, gate_dtype, lengths = case
    return make_inputs(*shape, BF16, gate, gate_dtype, lengths=lengths, device="cuda", **options)


def kept_bytes(x: Inputs, **options) -> int:
    forward, backward = (
        plan_of(x, way, kept=True, **options)["kept_bytes"] for way in (False, True)
    )
    assert forward == backward
    return forward


def operators(x: Inputs, kept: int, between=lambda: None) -> tuple[torch.Tensor, ...]:
    op, inputs = torch.ops.gla_ext, (x.q, x.k, x.v, x.g, None, x.initial_state, x.cu_seqlens)
    with torch.no_grad():
        o, _, states, kept = op.chunk_gla_fwd(*inputs, None, False, False, False, False, kept)
        between()
        return o, *op.chunk_gla_bwd(x.do, x.dht, *inputs, states, None, False, False, kept)


@in_nan
@by_case
@pytest.mark.parametrize("gate", [0.1, 2.0, 10.0, "reset", *MIXED])
def test_same_bits_as_made_again(case, gate, monkeypatch):
    x = draw(case, 0.1 if gate in MIXED else gate)
    if gate in MIXED:
        x = mixed_gates(x, gate)
    assert kept_bytes(x) > 0
    kept = ours(x)
    assert_results_close(kept, exact_by_chunks(x), x)
    monkeypatch.setenv(VARIABLE, "0")
    assert_same_bits(ours(x), kept)


@in_nan
@pytest.mark.parametrize("V", [128, 256])
@pytest.mark.parametrize("gate", [0.1, "reset"])
def test_same_bits_of_swept_segments(gate, V, monkeypatch):
    x = draw(((1, 8256, 16, 128, V), BF16, None), gate)
    assert plan_of(x, kept=True)["swept_gradients"] and kept_bytes(x) > 0
    kept = ours(x)
    assert_results_close(kept, exact_by_chunks(x), x)
    monkeypatch.setenv(VARIABLE, "0")
    assert_same_bits(ours(x), kept)


@in_nan
@by_case
@pytest.mark.parametrize("states", [False, True])
def test_same_bits_in_batch_invariant_mode(case, states, monkeypatch):
    x = draw(case, 1.0, states=states)
    with batch_invariant():
        kept = ours(x)
        monkeypatch.setenv(VARIABLE, "0")
        assert_same_bits(ours(x), kept)


@by_case
def test_what_is_saved(case, monkeypatch):
    x = draw(case).map(lambda t: t.requires_grad_())
    inputs = {t.data_ptr() for t in vars(x).values() if t is not None}

    def saved(**without) -> list[int]:
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: sizes.append(t.nbytes) if t.data_ptr() not in inputs and t.numel() else None,
            lambda t: t,
        ):
            chunk_gla(x.q, x.k, x.v, x.g, cu_seqlens=x.cu_seqlens, **without)
        return sizes

    assert saved() == [kept_bytes(x)]
    with torch.no_grad():
        assert saved() == []
    monkeypatch.setenv(VARIABLE, "0")
    assert saved() == []


def test_nothing_is_kept_where_no_gradient_is_asked_for():
    x = large_inputs(1, 4096, 4, 128, 256)
    before = torch.cuda.memory_allocated()
    o, _ = chunk_gla(x.q, x.k, x.v, x.g)
    assert torch.cuda.memory_allocated() - before <= o.nbytes + 1024


def test_peak_of_both_ways_is_that_of_making_them_again(monkeypatch):
    x = large_inputs(2, 2048, 4, 256, 512)

    def peak() -> int:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        ours(x)
        return torch.cuda.max_memory_allocated() - before

    kept = peak()
    monkeypatch.setenv(VARIABLE, "0")
    assert kept <= 1.01 * peak()


@by_case
def test_backward_twice(case):
    x = draw(case).map(lambda t: t.requires_grad_())
    o, _ = chunk_gla(x.q, x.k, x.v, x.g, cu_seqlens=x.cu_seqlens)
    leaves = (x.q, x.k, x.v, x.g)
    first = torch.autograd.grad(o, leaves, x.do, retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(o, leaves, x.do), strict=True):
        assert torch.equal(a, b)


@in_nan
@by_case
def test_rows_that_start_anywhere(case):
    """Tracing does not know where they start: they are copied."""
    x = draw(case, 1.0)
    odd = x.map(lambda t: torch.cat([t[..., :1], t], -1)[..., 1:] if t.dtype is BF16 else t)
    kept = kept_bytes(x)
    for a, b in zip(operators(odd, kept), operators(x, kept), strict=True):
        assert torch.equal(a, b)


@by_case
def test_steps_in_backward_leave_it_alone(case, monkeypatch):
    x = draw(case, 1.0)
    o, dq, dk, dv, dg, _, dh0 = operators(
        x, kept_bytes(x), lambda: monkeypatch.setenv("GLA_EXT_CUDA_PATH", "steps")
    )
    results = {"o": o, "dq": dq, "dk": dk, "dv": dv, "dg": dg, "dh0": dh0}
    expected = {name: y for name, y in exact_by_chunks(x).items() if name in results}
    assert_results_close(results, expected, x)


def test_wrong_sizes_are_refused(monkeypatch):
    x = draw(CASES["many keys"])
    right = kept_bytes(x)
    message = f"expected kept_bytes to be 0 or .*, {right}, got {right + 1}"
    with pytest.raises(ValueError, match=message):
        operators(x, right + 1)
    op, inputs = torch.ops.gla_ext, (x.q, x.k, x.v, x.g, None, x.initial_state, None)
    kept = x.q.new_empty(right - 1, dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"kept to be what .*, {right} bytes, got {right - 1}"):
        op.chunk_gla_bwd(x.do, x.dht, *inputs, x.q.new_empty(0), None, False, False, kept)
    monkeypatch.setenv("GLA_EXT_CUDA_PATH", "steps")
    with pytest.raises(ValueError, match=f"expected kept_bytes to be 0 or .*, 0, got {right}"):
        operators(x, right)
    monkeypatch.setenv(VARIABLE, "never")
    leaf = x.q.requires_grad_()
    with pytest.raises(ValueError, match=f"{VARIABLE}: expected 0 or 1, got never"):
        chunk_gla(leaf, x.k, x.v, x.g)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(dynamic, backend):
    """Kept where the graph knows the sizes; the same bits whether or not."""
    torch._dynamo.reset()
    compiled = torch.compile(chunk_gla, fullgraph=True, dynamic=dynamic, backend=backend)
    for case in (CASES["segments"], CASES["many keys"]):
        x = draw(case)
        leaves = [t.requires_grad_() for t in (x.q, x.k, x.v, x.g)]
        results = []
        for call in (chunk_gla, compiled):
            sizes = []
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t, sizes=sizes: (sizes.append(t.nbytes) if t.dtype is torch.uint8 else 0, t),
                lambda packed: packed[1],
            ):
                o, _ = call(*leaves)
            results.append((o, *torch.autograd.grad(o, leaves, x.do)))
            expected = 0 if dynamic and call is compiled else kept_bytes(x)
            assert sum(sizes) == expected
        for eager, graph in zip(*results, strict=True):
            assert torch.equal(graph, eager)
