"""In `batch_invariant()` on a CPU a token's output has bits that depend on its past alone."""

import dataclasses

import pytest
import torch
from common import (
    DTYPES,
    PACKED_LENGTHS,
    assert_close,
    exact,
    make_inputs,
    ours,
    tolerance,
)
from past_alone import GATES, check_cuts, decode, make, part, run
from torch.nn.functional import logsigmoid

from gla_ext import batch_invariant, chunk_gla, chunk_gla_, fused_recurrent_gla
from gla_ext.ops import chunk_gla_step
from gla_ext.selftest import relative_error

MODES = ("sweep", "materialised")
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_gate = pytest.mark.parametrize("gate", GATES)


@by_dtype
@by_gate
def test_all_cuts(gate, dtype):
    check_cuts(*make(gate, dtype))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["values", "both", "heads", "none"])
@pytest.mark.parametrize("gate", ["0.3", "16.0", "late", "one reset", "over the limit", "positive"])
def test_all_cuts_of_other_gates(gate, kind, dtype, mode, monkeypatch):
    monkeypatch.setenv("GLA_EXT_CPU_MODE", mode)
    check_cuts(*make(gate, dtype, kind=kind, HK=1))


@by_dtype
@by_gate
def test_decoding(gate, dtype):
    tokens, state = make(gate, dtype, kind="both", B=2)
    with batch_invariant():
        o, final_state = run(tokens, state)
    for sizes in ((1,), (3, 1, 64)):
        found, left = decode(tokens, state, sizes)
        assert torch.equal(found, o)
        assert torch.equal(left, final_state)


def test_decoding_between_boundaries():
    tokens, state = make("late", torch.float32, T=100)
    found, left = decode(tokens, state, (1,))
    with batch_invariant():
        assert torch.equal(found, run(tokens, state)[0])
        assert torch.equal(left, run(tokens, state, 0, 64)[1])
    assert chunk_gla_step(**part(tokens, 0, 3), boundary_state=state)[1] is state


def test_decoding_has_a_gradient():
    tokens, state = make("1.0", torch.float64, T=5, K=3, V=2)
    leaves = [tokens[name].requires_grad_() for name in ("k", "v", "g")]
    q = tokens["q"][:, 3:]
    torch.autograd.gradcheck(lambda *x: chunk_gla_step(q, *x, boundary_state=state)[0], leaves)


@pytest.mark.parametrize("newest, tokens", [(1, 65), (3, 2), (0, 2), (0, 0)])
def test_errors(newest, tokens):
    x = torch.zeros(1, 65, 1, 4)
    message = (
        f"chunk_gla_step: expected q of 1 or more .* at most 64 tokens, got {newest} and {tokens}"
    )
    with pytest.raises(ValueError, match=message):
        chunk_gla_step(x[:, :newest], *[x[:, :tokens]] * 3)


@pytest.mark.parametrize("q, got", [(torch.zeros(4), r"\[4\]"), (None, "None")])
def test_not_tensors_of_tokens(q, got):
    x = torch.zeros(1, 2, 1, 4)
    message = rf"chunk_gla_step: expected q .* 4 dimensions, got {got} and \[1, 2, 1, 4\]"
    with pytest.raises(ValueError, match=message):
        chunk_gla_step(q, x, x, x)
    with pytest.raises(TypeError, match="chunk_gla_step: expected k to be a tensor, got <class 'l"):
        chunk_gla_step(x, [1.0], x, x)


@by_dtype
@by_gate
def test_packed_and_pool(gate, dtype):
    """Sequences that are packed, and go on in a pool, have the bits of each alone."""
    total, N = sum(PACKED_LENGTHS), len(PACKED_LENGTHS)
    tokens, state = make(gate, dtype, total)
    states = state.repeat(N, 1, 1, 1)
    cu_seqlens = torch.tensor([0, *PACKED_LENGTHS]).cumsum(0)
    pool = states.clone()
    with batch_invariant():
        o, final_states = chunk_gla(
            **tokens, initial_state=states, output_final_state=True, cu_seqlens=cu_seqlens
        )
        in_pool = chunk_gla_(**tokens, state=pool, cu_seqlens=cu_seqlens)
        assert torch.equal(in_pool, o) and torch.equal(pool, final_states)
        for n in range(N):
            first, end = cu_seqlens[n : n + 2].tolist()
            for cut in range(1, end - first + 1):
                found, left = run(tokens, state, first, first + cut)
                assert torch.equal(found, o[:, first : first + cut])
            if end > first:
                assert torch.equal(left, final_states[n : n + 1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@by_gate
def test_later_tokens_are_not_seen(gate, dtype):
    """Other tokens after one, of any size and NaN but in v, change nothing before them. In v NaN
    reaches its block of 16 tokens.
    """
    tokens, state = make(gate, dtype, kind="both")
    with batch_invariant():
        o, _ = run(tokens, state)
        for cut in (5, 41, 63, 64, 90, 150):
            other = {name: x.clone() for name, x in tokens.items()}
            for name, x in other.items():
                x[:, cut:] = 1e4 if name == "v" else torch.nan
            assert torch.equal(run(other, state)[0][:, :cut], o[:, :cut])
            other = {name: x.clone() for name, x in tokens.items()}
            for x in (other["g"], other["gv"]):
                x[:, cut:] = -torch.inf
            assert torch.equal(run(other, state)[0][:, :cut], o[:, :cut])
            other["v"][:, cut] = torch.nan
            assert torch.equal(run(other, state)[0][:, : cut // 16 * 16], o[:, : cut // 16 * 16])


@by_dtype
@by_gate
@pytest.mark.parametrize("size", [1.0, 1e-2])
def test_accuracy(gate, dtype, size):
    """Forward and every gradient. Positive gates, and small numbers in fp16, are as exact as
    outside the mode.
    """
    x = make_inputs(1, 150, 2, 33, 20, dtype, size=size)
    g = GATES[gate](logsigmoid(make_inputs(1, 150, 2, 33, 1, torch.float64, 0.0, seed=1).k))
    x = dataclasses.replace(x, g=g.to(dtype))
    expected, outside = exact(x), ours(x)
    with batch_invariant():
        found = ours(x)
    for name, value in found.items():
        allowed = max(tolerance(name, dtype), 1.1 * relative_error(outside[name], expected[name]))
        assert_close(value, expected[name], allowed, name=name)


@by_dtype
@by_gate
@pytest.mark.parametrize("size", [1e-2, 1e-4])
def test_accuracy_of_gates_on_values(gate, dtype, size):
    tokens, state = make(gate, dtype, kind="both", T=150)
    tokens["q"] = size * tokens["q"]
    wide = {name: x.double() for name, x in tokens.items()}
    options = {"gk": wide.pop("g"), "initial_state": state.double(), "output_final_state": True}
    expected = fused_recurrent_gla(**wide, **options)
    with batch_invariant():
        found = run(tokens, state)
    for name, value, truth in zip(("o", "final_state"), found, expected, strict=True):
        assert_close(value, truth, tolerance(name, dtype), name=name)
