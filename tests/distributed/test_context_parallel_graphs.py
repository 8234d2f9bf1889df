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
from gla_ext.selftest import relative_error


def cut(group, T, lengths=None, dtype=torch.float64):
    """Seeded operands of a whole text, this rank's leaves of them, and its context."""
    x = make_inputs(1 if lengths else 2, T, 2, 5, 3, dtype, lengths=lengths)
    context = build_cp_context(x.cu_seqlens, group)
    size = context.size
    tokens = tokens_of((T // size,) * size, context.rank)
    leaves = [local(t, tokens).requires_grad_() for t in (x.q, x.k, x.v, x.g)]
    return x, leaves, local(x.do, tokens), context


def operator(group, lengths, T):
    _, leaves, do, context = cut(group, T, lengths)

    def loss(q, k, v, g, do, cp_context):
        o, state = chunk_gla(q, k, v, g, output_final_state=True, cp_context=cp_context)
        return (2 * o * do).sum() + state.sum()

    return loss, (*leaves, do, context), leaves


def layer(group, lengths, T):
    """A layer with convolutions."""
    module = make_layer(use_short_conv=True)
    x, context = part_of(group, make_x(B=1, T=T), lengths)

    def loss(x, cp_context):
        return module(x, cp_context=cp_context)[0].square().sum()

    return loss, (x, context), list(module.parameters())


def model(group, lengths, T):
    """A model with its loss."""
    module = make_model(torch.float64, use_short_conv=True).train()
    x, context = part_of(group, make_ids(B=1, T=T), lengths)

    def loss(x, cp_context):
        return module(x, labels=x, cp_context=cp_context).loss

    return loss, (x, context), list(module.parameters())


def part_of(group, x, lengths):
    offsets = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0)
    context = build_cp_context(offsets, group)
    return x.chunk(context.size, 1)[context.rank].contiguous(), context


MAKE = {"operator": operator, "layer": layer, "model": model}


def run_compiled(group, name, lengths, sizes, backend, dynamic):
    """The number of graphs for texts of these sizes, whose loss and gradients are eager mode's."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = None
    for T in sizes:
        loss, inputs, leaves = MAKE[name](group, lengths, T)
        compiled = compiled or torch.compile(loss, fullgraph=True, backend=backend, dynamic=dynamic)
        results = []
        for f in (compiled, loss):  # a graph finds nothing that an eager call has kept
            value = f(*inputs)
            results.append((value, *torch.autograd.grad(value, leaves)))
        for mine, theirs in zip(*results, strict=True):
            assert_close(mine, theirs, 1e-12)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


EAGER = ("aot_eager", None)
slow = pytest.mark.slow
GRAPHS = {
    "rows": ("operator", None, (72,), *EAGER),
    "a layer": ("layer", (5, 45, 14), (64,), *EAGER),
    # Of rows that are cut evenly one for every length.
    "symbolic sizes": ("operator", None, (72, 70, 40), "aot_eager", True),
}
SLOW_GRAPHS = {
    "packed": ("operator", (30, 1, 40), (72,), *EAGER),
    "Inductor": ("operator", None, (72,), "inductor", None),
    "a model": ("model", None, (64,), *EAGER),
    "a model, packed": ("model", (5, 45, 14), (64,), *EAGER),
}


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=name) for name, case in GRAPHS.items()),
        *(pytest.param(case, id=name, marks=slow) for name, case in SLOW_GRAPHS.items()),
    ],
)
def test_a_whole_graph(pool, case):
    assert pool(run_compiled, *case, ranks=2) == [1, 1]


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


def run_recorded(group, lengths, gv, dtype):
    """What is called and sent by a rank in either direction."""
    _, leaves, do, context = cut(group, 64, lengths, dtype)
    gv = -leaves[2].detach().abs() if gv else None
    chunk_gla(*leaves, gv=gv, cp_context=context)  # compares the ranks
    with Recorder() as forward:
        o, _ = chunk_gla(*leaves, gv=gv, cp_context=context)
    with Recorder() as backward:
        torch.autograd.grad(o, leaves, do)
    return forward.names, backward.names, forward.sent + backward.sent


@pytest.mark.parametrize(
    ("lengths", "gv", "dtype"),
    [
        (None, False, torch.float64),
        (None, True, torch.bfloat16),
        ((30, 1, 33), True, torch.float64),
        ((30, 1, 33), False, torch.bfloat16),
    ],
)
def test_operators_and_what_is_sent(pool, lengths, gv, dtype):
    """One all-gather a direction: states and decays, whatever the number of tokens."""
    first, last = pool(run_recorded, lengths, gv, dtype, ranks=2)
    H, K, V, rows = 2, 5, 3, 1 if lengths else 2
    wide = torch.promote_types(dtype, torch.float32)
    forward = rows * H * (K * V + K + (V if gv else 0)), wide
    for *_, sent in (first, last):
        assert sent == [forward, (rows * H * K * V, wide)]
    if lengths or gv:
        return
    gather = ["all_gather_into_tensor", "wait_tensor"]
    forward = ["chunk_gla_summary", *gather, "chunk_gla_fold", "chunk_gla_apply"]
    for found, *_ in (first, last):
        assert [name for name in found if not name.startswith("new_empty")] == forward
        assert len(found) <= len(forward) + 2
    backward = ["chunk_gla_summary_bwd", "view", *gather, "chunk_gla_fold", "chunk_gla_apply_bwd"]
    assert first[1] == backward
    assert last[1] == [name for name in backward if name != "chunk_gla_fold"]  # nothing follows


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


@pytest.mark.parametrize("run", [run_checkpointed, run_autocast, run_without_gradients])
def test_what_wraps_a_call(pool, run):
    pool(run, ranks=2)


def run_dtype(group, dtype):
    x, leaves, do, context = cut(group, 160, dtype=dtype)
    o, _ = chunk_gla(*leaves, cp_context=context)
    results = [o, *torch.autograd.grad(o, leaves, do)]
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
