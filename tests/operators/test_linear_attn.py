"""Retention, Lightning attention and plain linear attention, against their own recurrences."""

import functools
import math
import re

import pytest
import torch
from common import DTYPES, PACKED_LENGTHS, assert_close, make_inputs
from torch import Tensor

from gla_ext import batch_invariant
from gla_ext.ops import (
    chunk_lightning_attn,
    chunk_linear_attn,
    chunk_retention,
    fused_chunk_linear_attn,
    fused_chunk_retention,
    fused_recurrent_lightning_attn,
    fused_recurrent_linear_attn,
    fused_recurrent_retention,
)
from gla_ext.selftest import tolerance

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_packing = pytest.mark.parametrize("lengths", [None, PACKED_LENGTHS], ids=["batch", "packed"])


def inputs(dtype=torch.float32, lengths=None, T=70, H=3, positive=False):
    B, T = (2, T) if lengths is None else (1, 165)
    x = make_inputs(B, T, H, 20, 28, dtype=dtype, lengths=lengths)
    return x.map(torch.abs) if positive else x


def decayed(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """S_t = decay S_{t-1} + k_t v_t^T, o_t = K^-.5 S_t^T q_t of [T, D], [.., D] and a number."""
    o = []
    for q_t, k_t, v_t in zip(q, k, v, strict=True):
        S = decay * S + torch.outer(k_t, v_t)
        o.append(S.T @ q_t / math.sqrt(len(q_t)))
    return torch.stack(o) if o else v, S


def over_sequences(x, function) -> tuple[Tensor, Tensor]:
    """function(q, k, v, head, S) of every sequence and head in fp64: o and the final states."""
    x = x.double()
    N = len(x.initial_state)
    o, states = torch.zeros_like(x.v), torch.zeros_like(x.initial_state)
    for n in range(N):
        row, part = n, slice(None)
        if x.cu_seqlens is not None:
            row, part = 0, slice(*x.cu_seqlens[n : n + 2].tolist())
        for h in range(x.q.shape[2]):
            own = (t[row, part, h] for t in (x.q, x.k, x.v))
            o[row, part, h], states[n, h] = function(*own, h, x.initial_state[n, h])
    return o, states


DECAYS = {  # operators, what else they are given, the decay of head h of H
    "retention": (
        (chunk_retention, fused_recurrent_retention),
        {},
        lambda h, H: 1 - 2.0 ** (-5 - h),
    ),
    "lightning": (
        (chunk_lightning_attn, fused_recurrent_lightning_attn),
        {"layer_idx": 3, "num_layers": 12},
        lambda h, H: math.exp(-8 / H * h * (1 - 3 / 12)),
    ),
    "linear": (
        (chunk_linear_attn, fused_recurrent_linear_attn),
        {"normalize": False},
        lambda h, H: 1.0,
    ),
}


@by_dtype
@by_packing
@pytest.mark.parametrize("operators, options, decay", DECAYS.values(), ids=DECAYS)
def test_constant_decays(operators, options, decay, dtype, lengths):
    x = inputs(dtype, lengths)
    H = x.q.shape[2]
    expected = over_sequences(x, lambda q, k, v, h, S: decayed(q, k, v, decay(h, H), S))
    for operator in operators:
        results = operator(
            x.q, x.k, x.v, initial_state=x.initial_state, output_final_state=True,
            cu_seqlens=x.cu_seqlens, **options,
        )  # fmt: skip
        for name, value, truth in zip(("o", "final_state"), results, expected, strict=True):
            assert_close(value, truth, tolerance(name, dtype), name=name)


def test_names_of_others():
    assert fused_chunk_retention is chunk_retention
    assert fused_chunk_linear_attn is chunk_linear_attn


def normalized(q, k, v, h, S, z):
    o, S = decayed(q, k, v, 1.0, S)
    sums = (q * (z + k.cumsum(0))).sum(-1, keepdim=True) / math.sqrt(q.shape[-1])
    return o / (sums + 1e-10), S


@by_dtype
@by_packing
def test_normalized_linear_attention(dtype, lengths):
    """With positive features, and a state that is a pair."""
    x = inputs(dtype, lengths, positive=True)
    z = x.initial_state[..., 0].unsqueeze(1)
    n = iter(range(10_000))  # over_sequences goes by sequence, then head
    H = x.q.shape[2]

    def function(q, k, v, h, S):
        return normalized(q, k, v, h, S, z[next(n) // H, 0, h].double())

    expected = over_sequences(x, function)
    for operator in (chunk_linear_attn, fused_recurrent_linear_attn):
        n = iter(range(10_000))
        o, (state, final_z) = operator(
            x.q, x.k, x.v, initial_state=(x.initial_state, z), output_final_state=True,
            cu_seqlens=x.cu_seqlens, normalize=True,
        )  # fmt: skip
        # Two roundings, of the sum of scores and of what it divides.
        assert_close(o, expected[0], 2 * tolerance("o", dtype), name="o")
        assert_close(state, expected[1], tolerance("final_state", dtype), name="state")
        assert final_z.shape == z.shape and final_z.dtype == z.dtype
    alone = operator(
        x.q, x.k, x.v, initial_state=x.initial_state, normalize=True, cu_seqlens=x.cu_seqlens
    )
    assert alone[1] is None


def test_a_sequence_goes_on_from_its_state():
    """Two calls, the second from the first's (state, z), give what one call gives. Time also runs
    in reverse.
    """
    x = inputs(torch.float64, positive=True)

    def parts(start, end):
        return (t[:, start:end] for t in (x.q, x.k, x.v))

    for operator, options in ((chunk_linear_attn, {}), (fused_recurrent_linear_attn, {})):
        whole, (state, z) = operator(
            x.q, x.k, x.v, output_final_state=True, normalize=True, **options
        )
        first, between = operator(*parts(0, 41), output_final_state=True, normalize=True)
        second, last = operator(
            *parts(41, 70), initial_state=between, output_final_state=True, normalize=True
        )
        assert_close(torch.cat([first, second], 1), whole, 1e-12)
        assert_close(last[0], state, 1e-12)
        assert_close(last[1], z, 1e-12)
    turned, _ = fused_recurrent_linear_attn(
        *(t.flip(1) for t in (x.q, x.k, x.v)), reverse=True, normalize=True
    )
    assert_close(turned.flip(1), whole, 1e-12)


@pytest.mark.parametrize("operator", [chunk_linear_attn, fused_recurrent_linear_attn])
def test_gradients_of_the_quotient(operator):
    x = inputs(torch.float64, T=9, H=2, positive=True)
    x = x.map(lambda t: t[:1, ..., :3] if t.ndim == 4 else t)
    z = torch.rand(1, 1, 2, 3, dtype=torch.float64)
    h0 = x.initial_state[:1, :, :3].contiguous()

    def function(q, k, v, h0, z):
        o, (state, z) = operator(
            q, k, v, initial_state=(h0, z), output_final_state=True, normalize=True
        )
        return o, state, z

    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v, h0, z)]
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("operator", [chunk_linear_attn, fused_recurrent_linear_attn])
def test_same_bits_alone_and_packed(operator):
    """Of the quotient and of both states."""
    x = inputs(lengths=PACKED_LENGTHS, positive=True)
    call = functools.partial(operator, output_final_state=True, normalize=True)
    with batch_invariant():
        o, states = call(x.q, x.k, x.v, cu_seqlens=x.cu_seqlens)
        for n, (start, end) in enumerate(zip(x.cu_seqlens[:-1], x.cu_seqlens[1:], strict=True)):
            own, alone = call(*(t[:, start:end] for t in (x.q, x.k, x.v)))
            assert torch.equal(own, o[:, start:end])
            for state, whole in zip(alone, states, strict=True):
                assert torch.equal(state[0], whole[n])


def test_bad_inputs():
    x = inputs()
    half = x.k[:, :, :1], x.v[:, :, :1]
    for operator, arguments in (
        (chunk_retention, ()),
        (fused_recurrent_retention, ()),
        (chunk_lightning_attn, (0, 1)),
        (fused_recurrent_lightning_attn, (0, 1)),
    ):
        text = f"^{operator.__name__}: expected k and v of as many heads as q, 3, each"
        with pytest.raises(ValueError, match=text):
            operator(x.q, *half, *arguments)
    for operator in (chunk_linear_attn, fused_recurrent_linear_attn):
        name, pair = operator.__name__, (x.initial_state, x.initial_state)
        with pytest.raises(ValueError, match=f"^{name}: expected initial_state to be a tensor, or"):
            operator(x.q, x.k, x.v, initial_state=pair, normalize=False)
        text = f"{name}: expected z of initial_state to have shape [N, 1, H, K] = [N, 1, 3, 20]"
        with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
            operator(x.q, x.k, x.v, initial_state=pair, normalize=True)
        with pytest.raises(TypeError, match=f"^{name}: expected scale to be a number"):
            operator(x.q, x.k, x.v, scale=torch.tensor(1.0))
