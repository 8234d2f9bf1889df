"""The halves of chunk_gla and the fold between them, each as an operator."""

import re

import pytest
import torch
from common import assert_close, make_inputs
from operators import halves

from gla_ext import chunk_gla

ops = torch.ops.gla_ext
HALVES = ("summary", "apply", "summary_bwd", "apply_bwd", "fold")


def make(B=2, T=70, H=2, K=5, V=3, dtype=torch.float64):
    x = make_inputs(B, T, H, K, V, dtype)
    return x, make_inputs(B, T, H, V, V, dtype, seed=1).g


def op(name):
    return getattr(ops, f"chunk_gla_{name}").default


@pytest.mark.parametrize("v_first", [False, True])
def test_a_summary_is_the_state_that_is_left_and_the_sums_of_the_gates(v_first):
    x, gv = make()
    h0 = x.initial_state.mT.contiguous() if v_first else x.initial_state
    for state in (None, h0):
        args = (x.q, x.k, x.v, x.g, gv, state, None, v_first, False, False)
        summary, prepared = ops.chunk_gla_summary(*args)
        left = x.initial_state if state is not None else None
        _, final = chunk_gla(x.q, x.k, x.v, x.g, None, left, True, gv=gv)
        state, decay, value_decay = summary.split((final.numel(), 2 * 2 * 5, 2 * 2 * 3))
        assert_close(state.view_as(final), final, 1e-13)
        assert_close(decay.view(2, 2, 5), x.g.sum(1), 1e-13)
        assert_close(value_decay.view(2, 2, 3), gv.sum(1), 1e-13)
        assert prepared.numel() == 0


@pytest.mark.parametrize("v_first", [False, True])
def test_a_summary_of_backward_is_the_gradient_of_what_enters(v_first):
    x, gv = make()
    h0 = torch.zeros_like(x.initial_state).requires_grad_()
    outputs = chunk_gla(x.q, x.k, x.v, x.g, None, h0, True, gv=gv)
    (expected,) = torch.autograd.grad(outputs, h0, (x.do, x.dht))
    dht = x.dht.mT.contiguous() if v_first else x.dht
    none = torch.empty(0, dtype=torch.uint8)
    found, _ = ops.chunk_gla_summary_bwd(
        x.do, dht, x.q, x.k, x.v, x.g, gv, None, v_first, False, none
    )
    assert_close(found, expected, 1e-13)


def test_a_fold_resets_where_a_decay_is_0_whatever_comes():
    H, K, V = 1, 2, 2
    state = torch.tensor([[torch.inf, 1.0], [2.0, 3.0]])
    decay = torch.tensor([-torch.inf, -1.0])
    one, two = torch.zeros(K, V), torch.ones(K, V)
    summaries = [torch.cat([state.flatten(), one[0]]), torch.cat([two.flatten(), decay])]
    summaries.append(torch.zeros(6))
    x, decays = ops.chunk_gla_fold(
        torch.cat(summaries), None, None, 3, 1, 1, H, K, V, True, False, False, [2], [2], []
    )
    assert_close(x[0, 0], torch.tensor([[1.0, 1.0], [1 + 2 / torch.e, 1 + 3 / torch.e]]), 1e-6)
    assert torch.equal(decays, torch.stack([one[0], decay, torch.zeros(2)]))
    # Backward, from the other end: what comes from part 2 passes part 1 on its way to part 0.
    grads = [torch.zeros(4), torch.ones(4), torch.full((4,), torch.inf)]
    x, _ = ops.chunk_gla_fold(
        torch.cat(grads), decays, None, 3, 1, 1, H, K, V, True, False, False, [0], [2], []
    )
    assert torch.equal(x[0, 0], torch.tensor([[1.0, 1.0], [torch.inf, torch.inf]]))


BAD = {
    "summaries": (0, torch.zeros(3), ValueError, "expected summaries to have shape [size *"),
    "summaries' dtype": (
        0, torch.zeros(3, dtype=torch.float16), TypeError,
        "expected summaries to be torch.float32 or torch.float64, got torch.float16",
    ),
    "boundary": (2, torch.zeros(2, 2, 5, 3), ValueError, "expected boundary to have shape [rows"),
    "boundary's dtype": (
        2, torch.zeros(2, 2, 3, 5).double(), TypeError, "expected boundary to be torch.float32"
    ),
    "reach, backwards": (
        1, torch.zeros(2, 32), ValueError, "at place 1 to be from 0 to 0, got 1"
    ),
    "size": (3, 0, ValueError, "expected size to be at least 1, got 0"),
    "parts": (12, [0, 1], ValueError, "expected places to have 1 element, got 2"),
    "places": (12, [2], ValueError, "expected places to be from 0 to 1, got 2"),
    "reach": (13, [2], ValueError, "reach of the part at place 1 to be from 0 to 1, got 2"),
    "reach of two": (13, [0, 1], ValueError, "expected reach to have 1 element, got 2"),
    "entered": (14, [0, 1], ValueError, "expected entered to have 1 element, got 2"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_what_a_fold_refuses(case):
    place, value, error, message = case
    arguments = list(halves()["chunk_gla_fold"])
    arguments[place] = value
    with pytest.raises(error, match=re.escape(message)):
        ops.chunk_gla_fold(*arguments)


def refused(error, sentence):
    return pytest.raises(error, match=re.escape(sentence))


def test_halves_check_their_inputs():
    arguments = halves()
    q, k, v, g, gv, h0, *others = arguments["chunk_gla_apply"]
    with refused(ValueError, "expected k to have shape [B, T, HK, K] = [2, 70, 2, 5], got"):
        ops.chunk_gla_apply(q, k[:, 1:], v, g, gv, h0, *others)
    with refused(TypeError, "expected initial_state to be torch.float32, got torch.float64"):
        ops.chunk_gla_apply(q, k, v, g, gv, h0.double(), *others)
    with refused(ValueError, "expected v to have shape [B, T, HK, V] = [2, 70, 2, 3], got"):
        ops.chunk_gla_summary(q, k, v[:1], g, gv, *arguments["chunk_gla_summary"][5:])
    for name in ("summary_bwd", "apply_bwd"):
        do, dht, *others = arguments[f"chunk_gla_{name}"]
        with refused(ValueError, "expected do to have shape [B, T, H, V] = [2, 70, 2, 3], got"):
            op(name)(do[:, 1:], dht, *others)
        with refused(ValueError, "expected dht to have shape [N, H, K, V] = [2, 2, 5, 3], got"):
            op(name)(do, dht[:1], *others)


RANKS = {"rank": 0, "size": 2, "group": "", "counts": [1], "before": [0], "after": [1]}
BAD_RANKS = {
    "rank": ({"rank": 2}, "expected rank to be from 0 to 1, got 2"),
    "before": ({"before": []}, "expected before to have 1 element, got 0"),
    "after": ({"after": [0, 0]}, "expected after to have 1 element, got 2"),
    "counts": ({"counts": []}, "expected counts to have 1 element, got 0"),
    "spans": ({"spans": [0, 1]}, "expected spans to have 4 elements, got 2"),
}


@pytest.mark.parametrize("change, message", BAD_RANKS.values(), ids=BAD_RANKS)
def test_what_a_call_across_ranks_refuses(change, message):
    x = make_inputs(1, 8, 2, 5, 3, lengths=(8,))
    ranks = RANKS | {"spans": [0, 8, 0, 8]} | change
    with refused(ValueError, f"chunk_gla_across_ranks: {message}"):
        ops.chunk_gla_across_ranks(
            *(x.q, x.k, x.v, x.g, None, None, x.cu_seqlens, None, False, False, False, False),
            *ranks.values(),
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_q_k_and_v(dtype):
    arguments = halves()["chunk_gla_apply"]
    with torch.autocast("cpu", dtype):
        o, state, _ = ops.chunk_gla_apply(*arguments)
    assert o.dtype == dtype and state.dtype == torch.float32
