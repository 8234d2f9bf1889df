"""The reference proves itself: three forms agree in fp64, and the backward by hand is
autograd's.

Equal bits (see common.py): the same calls, a sequence at a time.
"""

import pytest
import torch
from common import (
    GATES,
    PACKED_LENGTHS,
    SHAPES,
    assert_close,
    assert_results_close,
    exact,
    exact_by_chunks,
    make_inputs,
    outputs_and_gradients,
)

from gla_ext import reference
from gla_ext._chunks import CHUNK, SUB_CHUNK

SMALL = [name for name in SHAPES if name not in ("train", "long")]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda x: x * 1.01, r"relative RMS error 1\.00e-02, allowed 5\.00e-03"),
        (lambda x: x.where(x != x.max(), torch.nan), r"NaN wrong at 1 places, first \[2, 3\]"),
        (lambda x: x.where(x != x.max(), torch.inf), "inf wrong at 1 places"),
        (lambda x: x.where(x != x.max(), 99.0), r"worst at \(2, 3\): 99, not 11"),
        (lambda x: x[:2], "shape"),
    ],
)
def test_comparator_fails(change, message):
    x = torch.arange(12.0).view(3, 4)
    assert_close(x, x, 0.0)
    with pytest.raises(AssertionError, match=message):
        assert_close(change(x), x, 5e-3)


def test_recurrence_is_its_equation():
    B, T, H, K, V = 2, 5, 2, 3, 4
    x = make_inputs(B, T, H, K, V, torch.float64)
    gv = torch.nn.functional.logsigmoid(x.v)
    o, final_state = reference.recurrence(x.q, x.k, x.v, x.g, 0.7, x.initial_state, gv=gv)
    for n in range(B):
        for h in range(H):
            S = x.initial_state[n, h]
            for t in range(T):
                S = x.g[n, t, h].exp().diag() @ S @ gv[n, t, h].exp().diag()
                S = S + torch.outer(x.k[n, t, h], x.v[n, t, h])
                assert_close(o[n, t, h], 0.7 * S.T @ x.q[n, t, h], 1e-14)
            assert_close(final_state[n, h], S, 1e-14)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("shape", SMALL)
def test_all_forms_agree(shape, gate):
    x = make_inputs(*SHAPES[shape], torch.float64, gate)
    truth = exact(x)
    assert_results_close(exact_by_chunks(x), truth, x)
    o = reference.parallel(x.q, x.k, x.v, x.g, initial_state=x.initial_state)
    assert_close(o, truth["o"], 1e-12, name="parallel")


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("states", [True, False])
def test_packed_sequences(gate, states):
    x = make_inputs(1, 165, 3, 5, 4, torch.float64, gate, states=states, lengths=PACKED_LENGTHS)
    assert_results_close(exact_by_chunks(x), exact(x), x)
    end = int(x.cu_seqlens[-1])
    results = exact_by_chunks(x)
    assert end < 165
    assert all(not results[name][:, end:].any() for name in ("o", "dq", "dk", "dv", "dg"))


def test_packed_equals_separate():
    x = make_inputs(1, 165, 2, 5, 4, torch.float64, lengths=PACKED_LENGTHS)
    packed = exact(x)
    for n, (start, end) in enumerate(zip(x.cu_seqlens, x.cu_seqlens[1:], strict=False)):
        alone = exact(x.select(n))
        for name, value in alone.items():
            is_state = name in ("final_state", "dh0")
            own = packed[name][n : n + 1] if is_state else packed[name][:, start:end]
            assert torch.equal(own, value), name


def test_packed_chunks_follow_each_other():
    x = make_inputs(1, 165, 2, 5, 4, torch.float64, lengths=PACKED_LENGTHS)
    packed = reference.chunked_forward(
        x.q, x.k, x.v, x.g, initial_state=x.initial_state, cu_seqlens=x.cu_seqlens
    )
    assert packed.S.shape == (1, 165 // CHUNK + len(PACKED_LENGTHS), 2, 5, 4)
    slot = 0
    for n, length in enumerate(PACKED_LENGTHS):
        if length:
            assert torch.equal(packed.S[0, slot], x.initial_state[n])
        slot += -(-length // CHUNK)
    assert slot < packed.S.shape[1] and not packed.S[0, slot:].any()


@pytest.mark.parametrize("gate", [1.0, "reset"])
def test_scores_are_split_in_blocks(gate):
    x = make_inputs(1, 130, 2, 5, 4, torch.float64, gate)
    forward = reference.chunked_forward(x.q, x.k, x.v, x.g)
    v = torch.eye(130, dtype=torch.float64).expand(1, 2, 130, 130).transpose(1, 2)
    scores = reference.parallel(x.q, x.k, v, x.g)  # [B, T, H, T]
    A, A_diagonal = torch.zeros_like(forward.A), torch.zeros_like(forward.A_diagonal)
    for t in range(130):
        start, sub_start = t // CHUNK * CHUNK, t // SUB_CHUNK * SUB_CHUNK
        A[:, t, :, : sub_start - start] = scores[:, t, :, start:sub_start]
        A_diagonal[:, t, :, : t + 1 - sub_start] = scores[:, t, :, sub_start : t + 1]
    assert_close(forward.A, A, 2e-12)
    assert_close(forward.A_diagonal, A_diagonal, 2e-12)


@pytest.mark.parametrize("gate", [*GATES, "packed"])
def test_fast_form_and_its_autograd(gate):
    if gate == "packed":
        x = make_inputs(1, 165, 3, 5, 4, torch.float64, lengths=PACKED_LENGTHS)
    else:
        x = make_inputs(2, 130, 3, 20, 28, torch.float64, gate)

    def function(q, k, v, g, initial_state):
        return reference.chunk_gla(q, k, v, g, None, initial_state, x.cu_seqlens)

    assert_results_close(outputs_and_gradients(function, x), exact(x), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_computes_in_the_dtype_of_its_inputs(dtype):
    x = make_inputs(1, 70, 2, 5, 4, dtype)
    for form in (reference.recurrence, reference.chunked_forward, reference.chunk_gla):
        o = form(x.q, x.k, x.v, x.g).o
        assert o.dtype == dtype
        bound = 30 * torch.finfo(dtype).eps
        assert_close(o, reference.recurrence(*(y.double() for y in (x.q, x.k, x.v, x.g))).o, bound)
