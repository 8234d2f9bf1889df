"""What forward keeps for backward on CUDA's fused path, in graphs, checkpoints, saved and freed."""

import dataclasses

import pytest
import torch
from common import (
    Inputs,
    assert_results_close,
    assert_same_bits,
    exact_by_chunks,
    ours,
)
from cuda_tools import backward_in_this_thread, peak_bytes
from fused import BF16, operators
from kept import (
    CASES,
    PAIRED,
    Kept,
    by_case,
    by_every_case,
    draw,
    for_backward_bytes,
    in_nan,
)
from large import large_inputs
from torch.utils.checkpoint import checkpoint

from gla_ext import chunk_gla

MIB = 2**20
pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("hopper")]


@by_every_case
def test_what_is_saved_and_freed(case, keep_nothing):
    x = draw(case).map(lambda t: t.requires_grad_())
    inputs = {t.data_ptr() for t in vars(x).values() if t is not None}
    size = for_backward_bytes(x)

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
    with backward_in_this_thread():
        torch.autograd.grad(o, (x.q, x.k, x.v, x.g), x.do)
    # Torch counts what it leaves of o's block too: less than 512 bytes, from 1 MiB on up to 1 MiB.
    margin = 4096 if o.nbytes <= MIB else MIB
    assert size > 2 * margin
    assert torch.cuda.memory_allocated() - before <= o.nbytes + margin
    keep_nothing()
    assert saved() == []


def made_without_gradients(x):
    with torch.no_grad():
        chunk_gla(x.q.requires_grad_(), x.k, x.v, x.g)


NOTHING = {  # the inputs, the call
    "no_grad": (CASES["segments"], made_without_gradients),
    "no leaf": (CASES["segments"], lambda x: chunk_gla(x.q, x.k, x.v, x.g)),
    # Of many short sequences operands are mostly padding, of few values mostly keys.
    "short sequences": (((1, 1200, 2, 128, 128), BF16, (3,) * 400), ours),
    "few values": (((1, 1200, 2, 136, 8), BF16, (1200,)), ours),
}


@pytest.mark.parametrize("case, call", NOTHING.values(), ids=NOTHING)
def test_nothing_is_kept(case, call):
    x = draw(case)
    with Kept() as calls:
        call(x)
    assert calls.forward == [0]


def test_callers_of_the_operator_do_not_hold_it():
    x = draw(CASES["segments"])
    args = (x.q.requires_grad_(), x.k, x.v, x.g, None, None, None, None, False, False, False)
    size = for_backward_bytes(x)
    for kept in ((), (size,)):
        assert torch.ops.gla_ext.chunk_gla_fwd(*args, *kept)[2].numel() == sum(kept)


@pytest.mark.parametrize("shape", [(2, 2048, 4, 256, 512), (32, 2048, 4, 128, 256)], ids=str)
def test_peak_of_both_ways_is_that_of_making_them_again(shape, keep_nothing):
    x = large_inputs(*shape)
    kept = peak_bytes(lambda: ours(x))
    keep_nothing()
    assert kept <= 1.01 * peak_bytes(lambda: ours(x))


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
    odd, kept = dataclasses.replace(shifted(x), **states), for_backward_bytes(x)
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
        x,
        for_backward_bytes(x),
        between=lambda kept: monkeypatch.setenv("GLA_EXT_CUDA_PATH", "steps"),
    )
    expected = {name: y for name, y in exact_by_chunks(x).items() if name in results}
    assert_results_close(results, expected, x)


@pytest.mark.parametrize("case", [CASES["many keys"], *PAIRED.values()])
def test_other_sizes_are_not_used(case):
    """As an older graph of torch's cache may ask for."""
    x = draw(case, "every other chunk")
    right = for_backward_bytes(x)
    expected = operators(x, 0)
    for size in (8, right - 1, right + 1):
        assert_same_bits(operators(x, size, between=lambda kept: kept.fill_(255)), expected)


def test_wrong_sizes_and_paths_are_errors(monkeypatch):
    x = draw(CASES["many keys"])
    with pytest.raises(ValueError, match="expected for_backward_bytes to be at least -1, got -2"):
        operators(x, -2)
    for name in ("k", "v"):
        y = dataclasses.replace(x, **{name: getattr(x, name)[..., :0]})
        y = dataclasses.replace(y, q=y.k, g=y.k)
        with pytest.raises(ValueError, match="to be at least 1, got 0"):
            chunk_gla(y.q.detach().requires_grad_(), y.k, y.v, y.g)
    monkeypatch.setenv("GLA_EXT_CUDA_PATH", "steps")
    message = "expected for_backward_bytes to be 0 in the step path"
    with pytest.raises(NotImplementedError, match=message):
        operators(x, for_backward_bytes(x))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(dynamic, backend):
    """Kept where the graph knows the sizes; the same bits whether or not."""
    compiled = torch.compile(chunk_gla, fullgraph=True, dynamic=dynamic, backend=backend)
    for case in (CASES["segments"], CASES["many keys"], PAIRED["pairs of blocks"]):
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
            assert sum(sizes) == (0 if dynamic and call is compiled else for_backward_bytes(x))
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
