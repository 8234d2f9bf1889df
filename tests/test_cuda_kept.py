"""Operands and segments' states that forward keeps for backward on CUDA's fused path."""

import dataclasses

import pytest
import torch
from common import (
    Inputs,
    assert_results_close,
    assert_same_bits,
    exact_by_chunks,
    make_inputs,
    ours,
    outputs_and_gradients,
)
from fused import BF16, MIXED, mixed_gates, operators, plan_of
from large import large_inputs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from gla_ext import batch_invariant, chunk_gla, ops

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("hopper")]

in_nan = pytest.mark.usefixtures("nan_in_fresh_memory")
FP32 = torch.float32
LENGTHS = (0, 1, 1300, 64, 700)  # with a tail of 35 tokens, 2100 in all
CASES = {
    "segments": ((1, 2100, 2, 128, 256), BF16, None),
    "segments, their states not kept": ((1, 800, 2, 104, 80), BF16, None),
    "segments of forward alone": ((3, 1024, 6, 128, 256), BF16, None),
    "fp32 gates": ((1, 700, 2, 128, 200), FP32, None),
    "many keys": ((2, 320, 3, 256, 136), BF16, None),
    "many keys, fp32 gates": ((1, 192, 2, 200, 200), FP32, None),
    "packed": ((1, 2100, 2, 104, 200), BF16, LENGTHS),
    "packed, many keys": ((1, 2100, 2, 256, 136), BF16, LENGTHS),
}
SWEPT = {
    "swept segments": ((1, 16448, 8, 128, 128), BF16, None),
    "swept segments, fp32 gates": ((1, 16448, 8, 128, 256), FP32, None),
    "swept segments in pairs of blocks": ((1, 16448, 8, 104, 256), BF16, None),
}
by_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
by_every_case = pytest.mark.parametrize(
    "case", [*CASES.values(), *SWEPT.values()], ids=[*CASES, *SWEPT]
)


@pytest.fixture
def keep_nothing(monkeypatch):
    """A function that has everything made again from then on."""
    return lambda: monkeypatch.setattr(ops, "_kept_bytes", 0)


def draw(case, gate=0.1, **options) -> Inputs:
    shape, gate_dtype, lengths = case
    x = make_inputs(
        *shape, BF16, 0.1 if gate in MIXED else gate, gate_dtype, lengths=lengths, device="cuda",
        **options,
    )  # fmt: skip
    return mixed_gates(x, gate) if gate in MIXED else x


def kept_bytes(x: Inputs, **options) -> int:
    forward, backward = (
        plan_of(x, way, kept=True, **options)["kept_bytes"] for way in (False, True)
    )
    assert forward == backward
    return forward


class Kept(TorchDispatchMode):
    """The bytes that calls of the operators keep and are given."""

    def __init__(self):
        super().__init__()
        self.forward, self.backward = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        if function is torch.ops.gla_ext.chunk_gla_fwd.default:
            self.forward.append(results[3].numel())
        elif function is torch.ops.gla_ext.chunk_gla_bwd.default:
            self.backward.append(args[13].numel())
        return results


def assert_kept_as_made(x, keep_nothing):
    with Kept() as calls:
        kept = ours(x)
    assert calls.forward == calls.backward == [kept_bytes(x)] != [0]
    assert_results_close(kept, exact_by_chunks(x), x)
    keep_nothing()
    with Kept() as calls:
        made = ours(x)
    assert calls.forward == calls.backward == [0]
    assert_same_bits(made, kept)


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
    assert plan["swept_gradients"] and plan["segments"] > 1
    assert plan["paired_parts"] == (case is SWEPT["swept segments in pairs of blocks"])
    assert_kept_as_made(x, keep_nothing)


@in_nan
@by_case
@pytest.mark.parametrize("states", [False, True])
def test_same_bits_in_batch_invariant_mode(case, states, keep_nothing):
    x = draw(case, 1.0, states=states)
    size = kept_bytes(x, batch_invariant=True)
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
    size, copies = kept_bytes(x), []
    results = operators(x, size, between=lambda kept: copies.extend((kept, kept.clone())))
    assert torch.equal(*copies)
    assert_same_bits(operators(x, size), results)


@in_nan
@pytest.mark.parametrize("case", [CASES["segments"], CASES["many keys"], *SWEPT.values()])
def test_beside_saved_states(case):
    x = draw(case, "every other chunk")
    kept = kept_bytes(x, save_states=True)
    assert kept > 0
    results = operators(x, kept, save_states=True)
    assert_same_bits(operators(x, 0, save_states=True), results)
    expected = exact_by_chunks(x)
    assert_results_close(results, {name: expected[name] for name in results}, x)


@in_nan
@pytest.mark.parametrize("case", [CASES["segments"], *SWEPT.values()])
def test_shared_heads(case, keep_nothing):
    x = draw(case)
    parts = {name: getattr(x, name)[:, :, ::2].contiguous() for name in ("k", "v", "g")}

    def run():
        def function(q, k, v, g, initial_state):
            return chunk_gla(q, k, v, g, initial_state=initial_state, output_final_state=True)

        with Kept() as calls:
            return outputs_and_gradients(function, dataclasses.replace(x, **parts)), calls.forward

    kept, sizes = run()
    assert sizes == [kept_bytes(x)]
    keep_nothing()
    assert_same_bits(run()[0], kept)


@by_every_case
def test_what_is_saved_and_freed(case, keep_nothing):
    x = draw(case).map(lambda t: t.requires_grad_())
    inputs = {t.data_ptr() for t in vars(x).values() if t is not None}
    size = kept_bytes(x)

    def saved() -> list[int]:
        sizes = []

        def pack(t):
            if t.data_ptr() not in inputs and t.numel():
                sizes.append(t.nbytes)
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            chunk_gla(x.q, x.k, x.v, x.g, cu_seqlens=x.cu_seqlens)
        return sizes

    assert saved() == [size]
    before = torch.cuda.memory_allocated()
    o, _ = chunk_gla(x.q, x.k, x.v, x.g, cu_seqlens=x.cu_seqlens)
    assert torch.cuda.memory_allocated() - before >= size
    torch.autograd.grad(o, (x.q, x.k, x.v, x.g), x.do)
    assert torch.cuda.memory_allocated() - before <= o.nbytes + 4096
    keep_nothing()
    assert saved() == []


@pytest.mark.parametrize("who", ["no_grad", "no leaf"])
def test_nothing_is_kept_where_no_gradient_is_to_come(who):
    x = draw(CASES["segments"])
    leaf = x.q.requires_grad_(who == "no_grad")
    with Kept() as calls, torch.set_grad_enabled(who != "no_grad"):
        chunk_gla(leaf, x.k, x.v, x.g)
    assert calls.forward == [0]


def test_callers_of_the_operator_do_not_hold_it():
    x = draw(CASES["segments"])
    args = (x.q.requires_grad_(), x.k, x.v, x.g, None, None, None, None, False, False, False, False)
    assert torch.ops.gla_ext.chunk_gla_fwd(*args)[3].numel() == 0
    assert torch.ops.gla_ext.chunk_gla_fwd(*args, kept_bytes(x))[3].numel() == kept_bytes(x)


def test_never_more_than_the_inputs():
    """Of many short sequences operands are mostly padding, of few values mostly keys."""
    for K, V, lengths in ((128, 128, (3,) * 400), (136, 8, (1200,))):
        x = make_inputs(1, 1200, 2, K, V, BF16, lengths=lengths, device="cuda")
        with Kept() as calls:
            ours(x)
        assert calls.forward == [0]


def test_peak_of_both_ways_is_that_of_making_them_again(keep_nothing):
    x = large_inputs(2, 2048, 4, 256, 512)

    def peak() -> int:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        ours(x)
        return torch.cuda.max_memory_allocated() - before

    kept = peak()
    keep_nothing()
    assert kept <= 1.01 * peak()


@by_every_case
def test_backward_twice(case):
    x = draw(case).map(lambda t: t.requires_grad_())
    o, _ = chunk_gla(x.q, x.k, x.v, x.g, cu_seqlens=x.cu_seqlens)
    leaves = (x.q, x.k, x.v, x.g)
    first = torch.autograd.grad(o, leaves, x.do, retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(o, leaves, x.do), strict=True):
        assert torch.equal(a, b)


def shifted(x: Inputs) -> Inputs:
    """Rows that start at no multiple of 16 bytes."""
    return x.map(lambda t: torch.cat([t[..., :1], t], -1)[..., 1:] if t.dim() == 4 else t)


@in_nan
@by_case
def test_rows_that_start_anywhere(case):
    """In eager mode they take the steps, with a gradient to come or without; a graph does not know
    where they start, and they are copied.
    """
    x = draw(case, 1.0)
    states = {name: getattr(x, name) for name in ("initial_state", "dht")}
    odd, kept = dataclasses.replace(shifted(x), **states), kept_bytes(x)
    assert_same_bits(operators(odd, kept), operators(x, kept))
    with Kept() as calls:
        results = ours(odd)
    assert calls.forward == [0]
    with torch.no_grad():
        o, _ = chunk_gla(
            odd.q, odd.k, odd.v, odd.g, initial_state=x.initial_state, cu_seqlens=x.cu_seqlens
        )
    assert torch.equal(o, results["o"])


@by_case
def test_steps_in_backward_leave_it_alone(case, monkeypatch):
    x = draw(case, 1.0)
    results = operators(
        x, kept_bytes(x), between=lambda kept: monkeypatch.setenv("GLA_EXT_CUDA_PATH", "steps")
    )
    expected = {name: y for name, y in exact_by_chunks(x).items() if name in results}
    assert_results_close(results, expected, x)


def test_other_sizes_are_not_used(monkeypatch):
    """As an older graph of torch's cache may ask for."""
    x = draw(CASES["many keys"], "every other chunk")
    right = kept_bytes(x)
    expected = operators(x, 0)
    for size in (8, right - 1, right + 1):
        assert_same_bits(operators(x, size, between=lambda kept: kept.fill_(255)), expected)
    with pytest.raises(ValueError, match="expected kept_bytes to be at least -1, got -2"):
        operators(x, -2)
    monkeypatch.setenv("GLA_EXT_CUDA_PATH", "steps")
    with pytest.raises(NotImplementedError, match="expected kept_bytes to be 0 in the step path"):
        operators(x, right)


@pytest.mark.parametrize("K, V", [(0, 256), (128, 0)])
def test_wrong_sizes_are_errors_still(K, V):
    q, k = (torch.zeros(1, 2048, 4, K, dtype=BF16, device="cuda") for _ in range(2))
    v = torch.zeros(1, 2048, 4, V, dtype=BF16, device="cuda")
    with pytest.raises(ValueError, match="to be at least 1, got 0"):
        chunk_gla(q.requires_grad_(), k, v, k)


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

            def pack(t, sizes=sizes):
                if t.dtype is torch.uint8:
                    sizes.append(t.nbytes)
                return t

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                o, _ = call(*leaves)
            results.append((o, *torch.autograd.grad(o, leaves, x.do)))
            assert sum(sizes) == (0 if dynamic and call is compiled else kept_bytes(x))
        for eager, graph in zip(*results, strict=True):
            assert torch.equal(graph, eager)


@pytest.mark.parametrize("how", ["reentrant", "checkpoint", "save_on_cpu"])
def test_checkpointed_and_offloaded(how):
    x = draw(CASES["segments"])
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v, x.g)]

    def function(*tensors):
        return chunk_gla(*tensors)[0]

    def run(call):
        o = call(*leaves)
        o.backward(x.do)
        gradients = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return o, *gradients

    plain = run(function)
    if how == "save_on_cpu":
        with torch.autograd.graph.save_on_cpu():
            other = run(function)
    else:
        reentrant = how == "reentrant"
        other = run(lambda *t: checkpoint(function, *t, use_reentrant=reentrant))
    for a, b in zip(plain, other, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("case", [CASES["segments"], SWEPT["swept segments in pairs of blocks"]])
def test_replayed_in_a_graph(case):
    x = draw(case, "every other chunk")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        ours(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ours(x)
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(captured, ours(x))
