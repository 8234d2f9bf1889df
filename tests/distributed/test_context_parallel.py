"""`chunk_gla` with a cp_context: the results of one process's tokens, whatever the cut.

Equal bits (see common.py): own sums.
"""

import random

import pytest
import torch
from common import assert_close, make_inputs
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import NAMES, local, tokens_of

import gla_ext
from gla_ext import chunk_gla
from gla_ext.distributed import build_cp_context


def make(B, T, lengths=None, gate=1.0, heads=(2, 2), gv=False, seed=0):
    """The operands of a whole text, fp64, with states and upstream gradients."""
    x = make_inputs(B, T, heads[0], 5, 3, torch.float64, gate, lengths=lengths, seed=seed)
    y = make_inputs(B, T, heads[1], 5, 3, torch.float64, gate, seed=seed + 1)
    values = {"q": x.q, "k": y.k, "v": y.v, "g": y.g, "gv": None}
    if gv:
        z = make_inputs(B, T, heads[1], 3, 3, torch.float64, gate, seed=seed + 2)
        values["gv"] = z.g
    return values | {"do": x.do, "h0": x.initial_state, "dht": x.dht, "cu_seqlens": x.cu_seqlens}


def whole(x, state_v_first=False):
    """One process's results."""
    leaves = {n: x[n].detach().requires_grad_() for n in (*NAMES, "h0") if x[n] is not None}
    operands = [leaves.get(n) for n in NAMES]
    o, state = chunk_gla(
        *operands[:4], initial_state=leaves["h0"], output_final_state=True,
        cu_seqlens=x["cu_seqlens"], gv=operands[4], state_v_first=state_v_first,
    )  # fmt: skip
    gradients = torch.autograd.grad((o, state), list(leaves.values()), (x["do"], x["dht"]))
    return {"o": o.detach(), "state": state.detach()} | dict(zip(leaves, gradients, strict=True))


def run_rank(group, x, lengths, uneven, options=None):
    """A rank's results, and the numbers of its own sequences."""
    options = options or {}
    context = build_cp_context(x["cu_seqlens"], group, lengths=lengths if uneven else None)
    tokens = tokens_of(lengths, context.rank)
    cut = context.cut(lengths[context.rank], torch.device("cpu"))
    rows = list(range(x["h0"].shape[0])) if x["cu_seqlens"] is None else list(cut.sequences)
    leaves = {n: local(x[n], tokens).requires_grad_() for n in NAMES if x[n] is not None}
    leaves["h0"] = x["h0"][rows]
    if cut.before:  # begins elsewhere, and is not looked at
        leaves["h0"][: None if x["cu_seqlens"] is None else 1] = torch.nan
    leaves["h0"].requires_grad_()
    operands = [leaves.get(n) for n in NAMES]
    upstream = (local(x["do"], tokens), x["dht"][rows])
    o, state = chunk_gla(
        *operands[:4], initial_state=leaves["h0"], output_final_state=True, gv=operands[4],
        cp_context=context, **options,
    )  # fmt: skip
    gradients = torch.autograd.grad((o, state), list(leaves.values()), upstream)
    results = {"o": o.detach(), "state": state.detach()} | dict(zip(leaves, gradients, strict=True))
    begin, end = rows_that_begin_and_end(cut, len(rows), x["cu_seqlens"] is None)
    assert not results["h0"][~begin].any() and not results["state"][~end].any()
    return results, tokens, rows


def rows_that_begin_and_end(cut, N, by_rows):
    """Of the rows of states those whose sequence begins on this rank, and those whose ends."""
    begin, end = (torch.ones(N, dtype=torch.bool) for _ in range(2))
    if by_rows:
        begin[:], end[:] = cut.count > 0 == cut.before, cut.count > 0 == cut.after
    elif cut.count:
        begin[0], end[-1] = cut.before == 0, cut.after == 0
    return begin, end


def assert_equals_one_process(ranks, x, state_v_first=False):
    expected = whole(x, state_v_first)
    states = {name: torch.zeros_like(expected[name]) for name in ("state", "h0")}
    for results, tokens, rows in ranks:
        for name in ("o", *NAMES):
            if expected.get(name) is not None:
                assert_close(results[name], local(expected[name], tokens), 1e-12, 1e-14, name)
        for name, total in states.items():
            total.index_add_(0, torch.tensor(rows, dtype=torch.int64), results[name])
    for name, total in states.items():
        assert_close(total, expected[name], 1e-12, 1e-14, name)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_rows_cut_evenly(pool, ranks):
    for n in (34, 33, 1):
        x = make(2, n * ranks, heads=(4, 2), gv=ranks > 2)
        found = pool(run_rank, x, (n,) * ranks, False, ranks=ranks)
        assert_equals_one_process(found, x)


def test_packed_sequences_that_cross_ranks_and_a_tail(pool):
    x = make(1, 4 * 33, lengths=(5, 0, 70, 1, 0, 40), gate="reset")
    found = pool(run_rank, x, (33,) * 4, False)
    assert_equals_one_process(found, x)


def test_states_with_v_first(pool):
    x = make(2, 40)
    x |= {name: x[name].mT.contiguous() for name in ("h0", "dht")}
    found = pool(run_rank, x, (20, 20), False, {"state_v_first": True}, ranks=2)
    assert_equals_one_process(found, x, state_v_first=True)


def run_one_gate_a_head(group, name, x, gate):
    """A rank's outputs and the gradient of its gate; of a constant one, its own tokens' part."""
    context = build_cp_context(None, group)

    def part(t):
        return t.chunk(context.size, 1)[context.rank]

    leaf = (gate if gate.ndim == 1 else part(gate)).requires_grad_()
    o, state = getattr(gla_ext, name)(
        *(part(x[n]) for n in "qkv"), **{gate_name(gate): leaf}, initial_state=x["h0"],
        output_final_state=True, cp_context=context,
    )  # fmt: skip
    (dg,) = torch.autograd.grad((o, state), leaf, (part(x["do"]), x["dht"]))
    return o.detach(), dg


def gate_name(gate):
    return "g_gamma" if gate.ndim == 1 else "g"


@pytest.mark.parametrize(
    "name, gate",
    [
        ("chunk_gla", lambda g: g[..., 0]),
        ("chunk_gla", lambda g: g[..., :1]),
        ("chunk_simple_gla", lambda g: g[..., 0]),
        ("chunk_simple_gla", lambda g: g[0, 0, :, 0]),
    ],
    ids=["chunk_gla", "last of one", "chunk_simple_gla", "g_gamma"],
)
def test_one_gate_a_head(pool, name, gate):
    x = make(2, 40, heads=(4, 2))
    gate = gate(x["g"]).clone().requires_grad_()
    o, state = getattr(gla_ext, name)(
        *(x[n] for n in "qkv"), **{gate_name(gate): gate}, initial_state=x["h0"],
        output_final_state=True,
    )  # fmt: skip
    (dg,) = torch.autograd.grad((o, state), gate, (x["do"], x["dht"]))
    found = pool(run_one_gate_a_head, name, x, gate.detach(), ranks=2)
    assert_close(torch.cat([part for part, _ in found], 1), o, 1e-12)
    parts = [part for _, part in found]
    assert_close(sum(parts) if gate.ndim == 1 else torch.cat(parts, 1), dg, 1e-12)


def test_uneven_rows_and_ranks_without_tokens(pool):
    x = make(2, 50)
    for lengths in ((0, 7, 0, 43), (1, 0, 40, 9)):
        assert_equals_one_process(pool(run_rank, x, lengths, True), x)


def draw_text(data, B, T, sequences=None):
    """Gates of any kind, shared heads or not, states in either layout."""
    gate = data.draw(st.sampled_from([0.1, 1.0, 10.0, "reset"]))
    gates = data.draw(st.sampled_from(["g", "gv", "both", "none"]))
    heads = data.draw(st.sampled_from([(2, 2), (4, 2), (3, 1)]))
    x = make(B, T, lengths=sequences, gate=gate, heads=heads, gv=gates in ("gv", "both"), seed=T)
    if gates in ("gv", "none"):
        x["g"] = None
    v_first = data.draw(st.booleans())
    if v_first:
        x |= {name: x[name].mT.contiguous() for name in ("h0", "dht")}
    return x, v_first


def draw_lengths(data):
    ranks = data.draw(st.integers(1, 4))
    lengths = tuple(data.draw(st.lists(st.integers(0, 40), min_size=ranks, max_size=ranks)))
    return lengths if sum(lengths) else (2, *lengths[1:])


def assert_any_cut(pool, x, lengths, v_first):
    options = {"state_v_first": v_first}
    found = pool(run_rank, x, lengths, True, options, ranks=len(lengths))
    assert_equals_one_process(found, x, v_first)


def run_states_everywhere(group, x):
    """As docs/distributed.md has it."""
    context = build_cp_context(x["cu_seqlens"], group)
    q, k, v, g = (x[name].chunk(context.size, 1)[context.rank] for name in "qkvg")
    _, state = chunk_gla(q, k, v, g, output_final_state=True, cp_context=context)
    rows = context.cut(q.shape[1], q.device).sequences
    if x["cu_seqlens"] is not None:
        every = state.new_zeros(len(x["cu_seqlens"]) - 1, *state.shape[1:])
        state = every.index_add_(0, torch.tensor(rows), state)
    torch.distributed.all_reduce(state, group=group)
    return state


@pytest.mark.parametrize("lengths", [None, (20, 0, 41, 3)], ids=str)
def test_final_states_everywhere(pool, lengths):
    x = make(1 if lengths else 3, 64, lengths=lengths)
    _, expected = chunk_gla(
        *(x[n] for n in "qkvg"), output_final_state=True, cu_seqlens=x["cu_seqlens"]
    )
    for state in pool(run_states_everywhere, x):
        assert_close(state, expected, 1e-12)


def run_batch_invariant(group, x):
    context = build_cp_context(None, group)
    with gla_ext.batch_invariant():
        o, _ = chunk_gla(
            *(x[n].chunk(context.size, 1)[context.rank] for n in "qkvg"), cp_context=context
        )
    return o


def test_bits_of_whole_chunks_on_two_ranks(pool):
    """As docs/distributed.md says of batch_invariant."""
    x = make(2, 256)
    with gla_ext.batch_invariant():
        o, _ = chunk_gla(*(x[n] for n in "qkvg"))
    assert torch.equal(torch.cat(pool(run_batch_invariant, x, ranks=2), 1), o)


@given(data=st.data())
@settings(max_examples=30)
def test_any_cut_of_packed_sequences(pool, data):
    lengths = draw_lengths(data)
    T, rng = sum(lengths), random.Random(data.draw(st.integers(0, 10**6)))
    cuts = sorted(rng.randint(0, T) for _ in range(rng.randint(1, 6)))
    sequences = tuple(b - a for a, b in zip([0, *cuts], cuts, strict=False))
    x, v_first = draw_text(data, 1, T, sequences)
    assert_any_cut(pool, x, lengths, v_first)


@given(data=st.data())
@settings(max_examples=30)
def test_any_cut_of_rows(pool, data):
    lengths = draw_lengths(data)
    x, v_first = draw_text(data, data.draw(st.integers(1, 3)), sum(lengths))
    assert_any_cut(pool, x, lengths, v_first)
