"""`chunk_gla` with a cp_context in graphs, under autocast, and beside what wraps a call.

Equal bits (see common.py): own sums.
"""

from unittest import mock

import pytest
import torch
from common import assert_close, make_inputs
from models import make_ids, make_layer, make_model, make_x
from ranks import local, tokens_of
from torch.utils._python_dispatch import TorchDispatchMode

from gla_ext import chunk_gla
from gla_ext.distributed import build_cp_context
from gla_ext.model import GLAForCausalLM
from gla_ext.selftest import relative_error


def cut(group, T, lengths=None, dtype=torch.float64):
    """Seeded operands of a whole text, this rank's leaves of them, and its context."""
    x = make_inputs(1 if lengths else 2, T, 2, 5, 3, dtype, lengths=lengths)
    context = build_cp_context(x.cu_seqlens, group)
    size = context.size
    tokens = tokens_of((T // size,) * size, context.rank)
    leaves = [local(t, tokens).requires_grad_() for t in (x.q, x.k, x.v, x.g)]
    return x, leaves, local(x.do, tokens), context


def run_compiled(group, backend, lengths, sizes, dynamic):
    context = None

    def function(q, k, v, g):
        o, state = chunk_gla(q, k, v, g, output_final_state=True, cp_context=context)
        return 2 * o, state

    compiled = torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for T in sizes:
        _, leaves, do, context = cut(group, T, lengths)
        results = []
        for f in (compiled, function):  # a graph finds nothing that an eager call has kept
            o, state = f(*leaves)
            gradients = torch.autograd.grad((o, state), leaves, (do, torch.ones_like(state)))
            results.append((o, state, *gradients))
        for mine, theirs in zip(*results, strict=True):
            assert_close(mine, theirs, 1e-13)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("lengths", [None, (30, 1, 40)], ids=["rows", "packed"])
def test_a_whole_graph(pool, lengths):
    assert pool(run_compiled, "aot_eager", lengths, (72,), None, ranks=2) == [1, 1]


def test_a_graph_of_symbolic_sizes(pool):
    """Rows that are cut evenly: one graph for every length."""
    assert pool(run_compiled, "aot_eager", None, (72, 70, 40), True, ranks=2) == [1, 1]


@pytest.mark.slow
def test_a_graph_by_inductor(pool):
    assert pool(run_compiled, "inductor", None, (72,), None, ranks=2) == [1, 1]


def run_compiled_module(group, make, lengths):
    """A layer with convolutions, or a model with its loss, as one graph."""
    offsets = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0)
    context = build_cp_context(offsets, group)
    module, x = make()
    x = x.chunk(context.size, 1)[context.rank].contiguous()

    def function(x):
        if isinstance(module, GLAForCausalLM):
            return module(x, labels=x, cp_context=context).loss
        return module(x, cp_context=context)[0].square().sum()

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    results = []
    for f in (compiled, function):  # a graph finds nothing that an eager call has kept
        loss = f(x)
        results.append((loss, *torch.autograd.grad(loss, list(module.parameters()))))
    for mine, theirs in zip(*results, strict=True):
        assert_close(mine, theirs, 1e-12)


def make_layer_and_x():
    return make_layer(use_short_conv=True), make_x(B=1, T=64)


def make_model_and_ids():
    return make_model(torch.float64, use_short_conv=True).train(), make_ids(B=1, T=64)


def test_a_whole_graph_of_a_layer(pool):
    pool(run_compiled_module, make_layer_and_x, (5, 45, 14), ranks=2)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [None, (5, 45, 14)], ids=["rows", "packed"])
def test_a_whole_graph_of_a_model(pool, lengths):
    pool(run_compiled_module, make_model_and_ids, lengths, ranks=2)


def run_checkpointed(group):
    """Twice the same gradients, and as many all-gathers as recomputation asks for."""
    _, leaves, do, context = cut(group, 64)

    def function(*operands):
        return chunk_gla(*operands, cp_context=context)[0]

    expected = torch.autograd.grad(function(*leaves), leaves, do)
    for reentrant in (False, True):
        o = torch.utils.checkpoint.checkpoint(function, *leaves, use_reentrant=reentrant)
        for x in leaves:
            x.grad = None
        o.backward(do)
        for leaf, theirs in zip(leaves, expected, strict=True):
            assert torch.equal(leaf.grad, theirs)


def test_activation_checkpointing(pool):
    pool(run_checkpointed, ranks=2)


class Recorder(TorchDispatchMode):
    """The operators below autograd that were called, in order."""

    def __init__(self):
        super().__init__()
        self.names, self.sent = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket._qualified_op_name.partition("::")[2])
        if self.names[-1] == "all_gather_into_tensor":
            self.sent.append((args[0].numel(), args[0].dtype))
        return function(*args, **(kwargs or {}))


def run_counted(group):
    _, leaves, do, context = cut(group, 64)
    chunk_gla(*leaves, cp_context=context)  # compares the ranks
    with Recorder() as forward:
        o, _ = chunk_gla(*leaves, cp_context=context)
    with Recorder() as backward:
        torch.autograd.grad(o, leaves, do)
    return forward.names, backward.names


def test_a_direction_is_a_handful_of_operators(pool):
    gather = ["all_gather_into_tensor", "wait_tensor"]
    first, last = pool(run_counted, ranks=2)
    forward = ["chunk_gla_summary", *gather, "chunk_gla_fold", "chunk_gla_apply"]
    for found, _ in (first, last):
        assert [name for name in found if not name.startswith("new_empty")] == forward
        assert len(found) <= len(forward) + 2
    backward = ["chunk_gla_summary_bwd", "view", *gather, "chunk_gla_fold", "chunk_gla_apply_bwd"]
    assert first[1] == backward
    assert last[1] == [name for name in backward if name != "chunk_gla_fold"]  # nothing follows


def run_sent(group, lengths, gv, dtype):
    """The numbers that a rank sends, forward and backward, and their dtype."""
    _, leaves, do, context = cut(group, 64, lengths, dtype)
    gv = -leaves[2].detach().abs() if gv else None
    chunk_gla(*leaves, gv=gv, cp_context=context)  # compares the ranks
    with Recorder() as recorder:
        o, _ = chunk_gla(*leaves, gv=gv, cp_context=context)
        torch.autograd.grad(o, leaves, do)
    return recorder.sent


@pytest.mark.parametrize("lengths", [None, (30, 1, 33)], ids=["rows", "packed"])
@pytest.mark.parametrize("gv", [False, True], ids=["", "gv"])
def test_what_is_sent(pool, lengths, gv):
    """One all-gather a direction: states and decays, whatever the number of tokens."""
    H, K, V = 2, 5, 3
    rows = 1 if lengths else 2
    for dtype, wide in ((torch.float64,) * 2, (torch.bfloat16, torch.float32)):
        forward = rows * H * (K * V + K + (V if gv else 0)), wide
        expected = [forward, (rows * H * K * V, wide)]
        assert pool(run_sent, lengths, gv, dtype, ranks=2) == [expected] * 2


def run_comparisons(group):
    """How often ranks are compared: for shapes and options, not for calls."""
    _, leaves, _, context = cut(group, 64)
    counts, gather = [], torch.distributed.all_gather_object

    def counted(*args, **kwargs):
        counts[-1] += 1
        return gather(*args, **kwargs)

    layer = make_layer(torch.float64, use_short_conv=True)
    x = torch.randn(2, 16, 24, dtype=torch.float64)

    def operator(**options):
        chunk_gla(*leaves, cp_context=context, **options)

    def shorter():
        chunk_gla(*(t[:, :16] for t in leaves), cp_context=context)

    def later():
        for _ in range(3):
            layer(x, cp_context=context)

    calls = [operator, operator, lambda: operator(scale=2.0), operator, shorter, later, later]
    with mock.patch.object(torch.distributed, "all_gather_object", counted):
        for call in calls:
            counts.append(0)
            call()
    return counts


def test_ranks_are_compared_once(pool):
    assert pool(run_comparisons, ranks=2) == [[1, 0, 1, 0, 1, 2, 0]] * 2


def run_autocast(group):
    _, leaves, do, context = cut(group, 64, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        o, _ = chunk_gla(*leaves, cp_context=context)
    q, k, v = (x.bfloat16() for x in leaves[:3])
    expected, _ = chunk_gla(q, k, v, leaves[3], cp_context=context)
    assert o.dtype == torch.bfloat16 and torch.equal(o, expected)
    gradients = torch.autograd.grad(o, leaves, do.bfloat16())
    assert [x.dtype for x in gradients] == [torch.float32] * 4


def test_autocast(pool):
    pool(run_autocast, ranks=2)


def run_without_gradients(group):
    x, leaves, _, context = cut(group, 64)
    whole, _ = chunk_gla(x.q, x.k, x.v, x.g)
    mine = whole.chunk(context.size, 1)[context.rank]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            o, state = chunk_gla(*(t.detach() for t in leaves), cp_context=context)
        assert state is None
        assert_close(o, mine, 1e-13)
    # A second derivative is refused, as without a context.
    o, _ = chunk_gla(*leaves, cp_context=context)
    (dq,) = torch.autograd.grad(o.sum(), leaves[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match="chunk_gla: double backward is not supported"):
        dq.sum().backward()


def test_without_gradients_and_with_too_many(pool):
    pool(run_without_gradients, ranks=2)


def run_dtype(group, dtype):
    x, leaves, do, context = cut(group, 160, dtype=dtype)
    results = [
        (o := chunk_gla(*leaves, cp_context=context)[0]),
        *torch.autograd.grad(o, leaves, do),
    ]
    whole = [t.requires_grad_() for t in (x.q, x.k, x.v, x.g)]
    exact = [t.detach().double().requires_grad_() for t in whole]

    def in_one_piece(leaves, do):
        o, _ = chunk_gla(*leaves)
        every = (o, *torch.autograd.grad(o, leaves, do))
        return [t.chunk(context.size, 1)[context.rank] for t in every]

    expected = zip(in_one_piece(whole, x.do), in_one_piece(exact, x.do.double()), strict=True)
    for mine, (theirs, true) in zip(results, expected, strict=True):
        assert mine.dtype == theirs.dtype
        # No further from fp64 than twice what one piece is, whose rounding the processor decides.
        assert_close(mine, true, max(2 * relative_error(theirs, true), 1e-13))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_every_dtype(pool, dtype):
    pool(run_dtype, dtype, ranks=4)
