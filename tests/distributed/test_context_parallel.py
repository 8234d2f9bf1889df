"""`chunk_gla` with a cp_context: the results of one process's tokens, whatever the cut.

Equal bits (see common.py): own sums.
"""

import pytest
import torch
from common import make_inputs
from cuts import FLAS, Cut, assert_same_on_ranks, draw_cut
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import NAMES

import gla_ext
from gla_ext import chunk_gla
from gla_ext.distributed import build_cp_context


def make(cut, gate=1.0, heads=(2, 2), gates="g", v_first=False):
    """The operands of a whole text, fp64, with states and upstream gradients."""
    T = sum(cut.lengths)

    def inputs(H, K, seed):
        lengths = cut.sequences
        return make_inputs(cut.B, T, H, K, 3, torch.float64, gate, lengths=lengths, seed=T + seed)

    x, y = inputs(heads[0], 5, 0), inputs(heads[1], 5, 1)
    g = {"g": y.g, "both": y.g, "a head": y.g[..., 0], "last of one": y.g[..., :1]}.get(gates)
    gv = inputs(heads[1], 3, 2).g if gates in ("gv", "both") else None
    h0, dht = (t.mT.contiguous() if v_first else t for t in (x.initial_state, x.dht))
    return {"q": x.q, "k": y.k, "v": y.v, "g": g, "gv": gv, "do": x.do, "h0": h0, "dht": dht}


def results(part, x, options):
    """Outputs, states and gradients; what does not begin or end on a rank has none there."""
    leaves = {n: part.own(x[n]).requires_grad_() for n in NAMES if x[n] is not None}
    h0 = x["h0"][part.rows]
    h0[~part.begin] = torch.nan  # is not looked at
    leaves["h0"] = h0.requires_grad_()
    o, state = chunk_gla(
        *(leaves.get(n) for n in "qkvg"), gv=leaves.get("gv"), initial_state=h0,
        output_final_state=True, **part.options, **options,
    )  # fmt: skip
    upstream = part.own(x["do"]), x["dht"][part.rows]
    gradients = torch.autograd.grad((o, state), list(leaves.values()), upstream)
    gradients = dict(zip(leaves, gradients, strict=True))
    rows = {"state": state, "h0": gradients.pop("h0")}
    assert not rows["h0"][~part.begin].any() and not state[~part.end].any()
    return gradients | {"o": o}, rows, {}


@given(data=st.data())
@settings(max_examples=40)
def test_any_cut(pool, data):
    cut, v_first = draw_cut(data), data.draw(st.booleans())
    gate = data.draw(st.sampled_from([0.1, 1.0, 10.0, "reset"]))
    gates = data.draw(st.sampled_from(["g", "gv", "both", "none", "a head", "last of one"]))
    heads = data.draw(st.sampled_from([(2, 2), (4, 2), (3, 1)]))
    x = make(cut, gate, heads, gates, v_first)
    assert_same_on_ranks(pool, results, cut, x, {"state_v_first": v_first}, tail=True)


@pytest.mark.parametrize("gates", ["g", "gv"])
def test_rows_and_ranks_without_tokens(pool, gates):
    cut = Cut((0, 7, 0, 43), B=2)
    assert_same_on_ranks(pool, results, cut, make(cut, gates=gates), {})


@pytest.mark.parametrize("beside", [False, True], ids=["", "beside its cu_seqlens"])
def test_flas_own_context(pool, beside):
    function = results_beside_offsets if beside else results
    assert_same_on_ranks(pool, function, FLAS, make(FLAS), {})


def results_beside_offsets(part, x, options):
    """FLA's calls pass both."""
    context = part.options.get("cp_context")
    options = {} if context is None else {"cu_seqlens": context.cu_seqlens}
    return results(part, x, options)


def simple(part, x, gate):
    """`chunk_simple_gla`: its outputs, state and the gradient of its gate."""
    name = "g_gamma" if gate.ndim == 1 else "g"
    leaf = (gate.clone() if gate.ndim == 1 else part.own(gate)).requires_grad_()
    o, state = gla_ext.chunk_simple_gla(
        *(part.own(x[n]) for n in "qkv"), **{name: leaf}, initial_state=x["h0"],
        output_final_state=True, **part.options,
    )  # fmt: skip
    (dg,) = torch.autograd.grad((o, state), leaf, (part.own(x["do"]), x["dht"]))
    of_tokens, whole = ({}, {"dg": part.sum(dg)}) if gate.ndim == 1 else ({"dg": dg}, {})
    return of_tokens | {"o": o}, {"state": state}, whole


@pytest.mark.parametrize("constant", [False, True], ids=["g", "g_gamma"])
def test_one_gate_a_head(pool, constant):
    cut = Cut((20, 20), B=2, even=True)
    x = make(cut, heads=(4, 2), gates="a head")
    gate = x["g"][0, 0].clone() if constant else x["g"]
    assert_same_on_ranks(pool, simple, cut, x, gate)


def run_batch_invariant(group, x):
    context = build_cp_context(None, group)
    with gla_ext.batch_invariant():
        o, _ = chunk_gla(
            *(x[n].chunk(context.size, 1)[context.rank] for n in "qkvg"), cp_context=context
        )
    return o


def test_bits_of_whole_chunks_on_two_ranks(pool):
    """As docs/distributed.md says of batch_invariant."""
    x = make(Cut((128, 128), B=2))
    with gla_ext.batch_invariant():
        o, _ = chunk_gla(*(x[n] for n in "qkvg"))
    assert torch.equal(torch.cat(pool(run_batch_invariant, x, ranks=2), 1), o)
