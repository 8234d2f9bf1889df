"""Gated Linear Attention in plain PyTorch: every equation once, every intermediate visible.

GLA (Yang et al., arXiv 2312.06635) is linear attention with a K x V state that decays by channel:

    S_t = diag(exp g_t) S_{t-1} + k_t v_t^T        o_t = scale * S_t^T q_t        g <= 0

`recurrence` is the definition. `parallel` is the quadratic form that looks like attention (section
4.1 of the paper). `chunked_forward` and `chunked_backward` are the chunkwise form (section 4.2), in
which tokens of one chunk are combined by scores A, and chunks are combined by the state S. All
compute in the dtype of their inputs, in fp64 to 1e-12 for any gate, including -inf, which resets
the state. `chunk_gla` is the chunkwise form written for speed and differentiated by autograd.

Symbols: B batch, T tokens, H heads, K and V channels of keys and values, N sequences, NT chunks, C
    = 64 tokens per chunk, c = 16 per sub-chunk. q, k, g are [B, T, H, K], v and o [B, T, H, V],
    states [N, H, K, V]. b is the sum of the gates since the chunk's start, in log2 units, so that
    decays are 2^b.

k, v and the gates may have HK heads, a divisor of H: head h of q reads head h // (H // HK) of them.
    Here they are repeated first; backward then sums the gradients dv, dk and dg of `Backward`.

Packed sequences have B = 1 and `cu_seqlens`, N + 1 offsets, and are independent of each other.
Sequence n has ceil(len_n / C) chunks, one sequence after the other, of NT = T // C + N. Unused
chunks, and tokens after the last offset, are zero.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gla_ext._chunks import (
    CHUNK,
    for_every_head,
    packable,
    split_diagonal,
    sum_over_groups,
    to_chunks,
    to_tokens,
)

LOG2E = math.log2(math.e)
TIER1_RANGE = 112.0  # in log2 units: with a mid-range r, 2^(b - r) and its inverse fit into fp32


class Recurrence(NamedTuple):
    o: Tensor  # [B, T, H, V]
    final_state: Tensor  # [N, H, K, V]


class Forward(NamedTuple):
    """Outputs of the five forward steps."""

    b: Tensor  # [B, T, H, K]    step 1, gate cumsum, log2 units
    S: Tensor  # [B, NT, H, K, V]  step 2, the state entering each chunk
    A: Tensor  # [B, T, H, C]    step 3, scores; zero in the c x c diagonal blocks and above
    A_diagonal: Tensor  # [B, T, H, c]  step 4, the diagonal blocks; zero above the diagonal
    o: Tensor  # [B, T, H, V]    step 5
    final_state: Tensor  # [N, H, K, V]  step 2


class Backward(NamedTuple):
    """Outputs of backward steps 3 to 7 (1 and 2 are the forward's)."""

    dS: Tensor  # [B, NT, H, K, V]  step 3, gradient of the state leaving each chunk
    dh0: Tensor  # [N, H, K, V]     step 3
    dv: Tensor  # [B, T, H, V]      step 4
    dA: Tensor  # [B, T, H, C]      step 5, scale included
    dq_intra: Tensor  # [B, T, H, K]  step 6, through A alone
    dk_intra: Tensor
    dg_intra: Tensor
    dq: Tensor  # [B, T, H, K]      step 7
    dk: Tensor
    dg: Tensor


@packable
def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    gv: Tensor | None = None,
    reverse: bool = False,
) -> Recurrence:
    """S_t = diag(exp g_t) S_{t-1} diag(exp gv_t) + k_t v_t^T, o_t = scale S_t^T q_t.

    Args:
        q, k, g: [B, T, H, K]; g is the natural logarithm of the decay, <= 0, may be -inf, or None;
            [B, T, H] is one gate for all channels of a head.
        v: [B, T, H, V].
        scale: factor on q. Default: K ** -0.5.
        initial_state: [N, H, K, V]. Default: zeros.
        cu_seqlens: [N + 1] integer offsets of packed sequences, B = 1. Default: N = B sequences.
        gv: [B, T, H, V], gate on the value channels. Default: none.
        reverse: process the tokens from last to first. Default: False.
    """
    if reverse:
        q, k, v, g, gv = (x if x is None else x.flip(1) for x in (q, k, v, g, gv))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    B, T, H, K = q.shape
    g = g[..., None] if g is not None and g.ndim == 3 else g
    k, v, g, gv = for_every_head(H, k, v, g, gv)
    S = q.new_zeros(B, H, K, v.shape[-1]) if initial_state is None else initial_state
    rows = (scale * q)[:, :, :, None, :].unbind(1)  # T of [B, H, 1, K]
    outer = zip(k[..., None].unbind(1), v[:, :, :, None, :].unbind(1), strict=True)
    alpha = [1.0] * T if g is None else g.exp()[..., None].unbind(1)  # T of [B, H, K, 1]
    beta = [1.0] * T if gv is None else gv.exp()[:, :, :, None, :].unbind(1)
    o = []
    for q_t, (k_t, v_t), alpha_t, beta_t in zip(rows, outer, alpha, beta, strict=True):
        S = alpha_t * S * beta_t + k_t * v_t
        o.append(q_t @ S)
    if reverse:
        o.reverse()
    return Recurrence(torch.stack(o, 1).squeeze(-2) if T else v, S)


def parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
) -> Tensor:
    """All pairs of tokens at once: o_i = sum_{j <= i} A_ij v_j, quadratic in T.

    A_ij = scale * sum_d q_id k_jd exp(sum_{s = j+1..i} g_sd), over the whole sequence.

    Args: as in `recurrence`. Returns o, [B, T, H, V]. Needs memory for T * T * K numbers per head.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k, v, g = for_every_head(q.shape[2], k, v, g)
    q, k, v, g = (x.transpose(1, 2) for x in (q, k, v, g))  # [B, H, T, D]
    b = _log2_decay(g).cumsum(-2)
    A = scale * (q[..., :, None, :] * k[..., None, :, :] * _pair_decay(b)).sum(-1)
    o = A @ v
    if initial_state is not None:
        o = o + scale * (q * b.exp2()) @ initial_state
    return o.transpose(1, 2)


@packable
def chunked_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    b: Tensor | None = None,
) -> Forward:
    """The five forward steps; returns the result of each.

    Args: as in `recurrence`, and
        b: [B, T, H, K], used instead of the exact output of step 1, so that a step that was given a
            rounded b can be compared with the correct result for that b.
    """
    T, scale = q.shape[1], q.shape[-1] ** -0.5 if scale is None else scale
    k, v, g = for_every_head(q.shape[2], k, v, g)
    b = gate_cumsum(to_chunks(g)) if b is None else to_chunks(b, hold=True)
    q, k, v = (to_chunks(x) for x in (q, k, v))
    S, final_state = chunk_states(k, v, b, initial_state)
    A = scores(q, k, b, scale)
    o = output(q, v, b, A, S, scale)
    A_off_diagonal, A_diagonal = split_diagonal(A)
    tokens = [to_tokens(x, T) for x in (b, A_off_diagonal, A_diagonal, o)]
    return Forward(tokens[0], S.transpose(1, 2), *tokens[1:], final_state)


@packable
def chunked_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    dht: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    b: Tensor | None = None,
) -> Backward:
    """The backward steps, without autograd; returns the result of each.

    Args: as in `chunked_forward`, and
        do: [B, T, H, V], gradient of o.
        dht: [N, H, K, V], gradient of the final state. Default: zeros.
    """
    T, scale = q.shape[1], q.shape[-1] ** -0.5 if scale is None else scale
    HK = k.shape[2]
    k, v, g = for_every_head(q.shape[2], k, v, g)
    g = to_chunks(g)
    b = gate_cumsum(g) if b is None else to_chunks(b, hold=True)
    do, q, k, v = (to_chunks(x) for x in (do, q, k, v))
    S, _ = chunk_states(k, v, b, initial_state)
    A = scores(q, k, b, scale)
    dS, dh0 = state_grads(q, do, b, dht, scale)
    dv = value_grads(k, do, b, A, dS)
    dA = score_grads(do, v, scale)
    intra = intra_grads(q, k, b, dA)
    dq, dk, dg = merge_grads(q, k, v, do, b, S, dS, *intra, scale)
    dg = dg.masked_fill(_is_reset(g), 0)
    dv, dA, *intra, dq, dk, dg = (to_tokens(x, T) for x in (dv, dA, *intra, dq, dk, dg))
    dv, dk, dg = (sum_over_groups(x, HK) for x in (dv, dk, dg))
    return Backward(dS.transpose(1, 2), dh0, dv, dA, *intra, dq, dk, dg)


# The steps, on tensors split into chunks, [B, H, NT, C, D]; x.mT transposes the last two dims. i >=
# j are tokens of one chunk; index C is its last token.


def gate_cumsum(g):
    """Step 1: b_i = sum_{s <= i} g_s log2(e)."""
    return _log2_decay(g).cumsum(-2)


def chunk_states(k, v, b, h0=None):
    """Step 2: S' = 2^{b_C} S + sum_j (k_j 2^{b_C - b_j}) v_j^T, chunk after chunk."""
    B, H, NT, _, K = k.shape
    S = k.new_zeros(B, H, NT, K, v.shape[-1])  # entering each chunk
    b_last = b[..., -1:, :]
    kv = (k * (b_last - b).exp2()).mT @ v
    state = k.new_zeros(B, H, K, v.shape[-1]) if h0 is None else h0
    for n in range(NT):
        S[:, :, n] = state
        state = b_last[:, :, n].mT.exp2() * state + kv[:, :, n]
    return S, state


def scores(q, k, b, scale):
    """Steps 3 and 4: A_ij = scale sum_d q_id k_jd 2^{b_id - b_jd}, one chunk at a time."""
    A = q.new_zeros(*q.shape[:-1], CHUNK)
    for n in range(q.shape[2]):
        pairs = q[:, :, n, :, None] * k[:, :, n, None] * _pair_decay(b[:, :, n])  # [.., C, C, K]
        A[:, :, n] = scale * pairs.sum(-1)
    return A


def output(q, v, b, A, S, scale):
    """Step 5: o_i = scale (q_i 2^{b_i})^T S + sum_{j <= i} A_ij v_j."""
    return scale * (q * b.exp2()) @ S + A @ v


def state_grads(q, do, b, dht, scale):
    """Backward step 3: dS = 2^{b_C} dS' + scale sum_i (q_i 2^{b_i}) do_i^T, last chunk first."""
    B, H, NT, _, K = q.shape
    dS = q.new_zeros(B, H, NT, K, do.shape[-1])  # leaving each chunk
    qdo = scale * (q * b.exp2()).mT @ do
    dstate = q.new_zeros(B, H, K, do.shape[-1]) if dht is None else dht
    for n in reversed(range(NT)):
        dS[:, :, n] = dstate
        dstate = b[:, :, n, -1:].mT.exp2() * dstate + qdo[:, :, n]
    return dS, dstate


def value_grads(k, do, b, A, dS):
    """Backward step 4: dv_j = sum_{i >= j} A_ij do_i + (k_j 2^{b_C - b_j})^T dS'."""
    return A.mT @ do + (k * (b[..., -1:, :] - b).exp2()) @ dS


def score_grads(do, v, scale):
    """Backward step 5: dA_ij = scale do_i . v_j."""
    return (scale * do @ v.mT).tril()


def intra_grads(q, k, b, dA):
    """Backward step 6: the gradients that reach q, k and g through A.

    dq_i = sum_{j <= i} dA_ij k_j 2^{b_i - b_j}, dk_j = sum_{i >= j} dA_ij q_i 2^{b_i - b_j}. A pair
    decays by every gate between its tokens: dg_t = sum_{j < t <= i} dA_ij q_i k_j 2^{b_i - b_j}.
        This is computed as a suffix sum in which pairs on one side of t cancel.
    """
    dq, dk = torch.zeros_like(q), torch.zeros_like(k)
    for n in range(q.shape[2]):
        decayed = dA[:, :, n, :, :, None] * _pair_decay(b[:, :, n])  # [.., C, C, K]
        dq[:, :, n] = (decayed * k[:, :, n, None]).sum(-2)
        dk[:, :, n] = (decayed * q[:, :, n, :, None]).sum(-3)
    return dq, dk, _suffix_sum(q * dq - k * dk)


def merge_grads(q, k, v, do, b, S, dS, dq, dk, dg, scale):
    """Backward step 7: adds the gradients through the states that enter (S) and leave (S') a chunk.

    dq_i += scale 2^{b_i} (S do_i), dk_j += 2^{b_C - b_j} (dS' v_j), and dg without cancellation:
    dg_t += sum_{i >= t} q_i dq_i + sum_{j < t} k_j dk_j + 2^{b_C} rowsum_V(S * dS').
    """
    b_last = b[..., -1:, :]
    dq_inter = scale * b.exp2() * (do @ S.mT)
    dk_inter = (b_last - b).exp2() * (v @ dS.mT)
    carried = k * dk_inter
    through = b_last.exp2() * (S * dS).sum(-1)[..., None, :]
    dg_inter = _suffix_sum(q * dq_inter) + (carried.cumsum(-2) - carried) + through
    return dq + dq_inter, dk + dk_inter, dg + dg_inter


@packable
def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Recurrence:
    """The chunkwise form for speed: all chunks at once except for the state, gradients by autograd.

    If every chunk's b has a range of at most `TIER1_RANGE`, its scores are one matrix product of q
    2^{b - r} and k 2^{r - b}, with the mid-range r of each channel. Otherwise they are computed
    pair by pair.

    Args: as in `recurrence`.
    """
    T, scale = q.shape[1], q.shape[-1] ** -0.5 if scale is None else scale
    k, v, g = for_every_head(q.shape[2], k, v, g)
    q, k, v, g = (to_chunks(x, at_least=1) for x in (q * scale, k, v, g))
    b = gate_cumsum(g)
    b_last = b[..., -1:, :]
    low, high = b.detach().aminmax(dim=-2, keepdim=True)
    if bool((high - low <= TIER1_RANGE).all()):
        r = (low + high) / 2
        A = ((q * (b - r).exp2()) @ (k * (r - b).exp2()).mT).tril()
    else:
        chunks = zip(q.unbind(2), k.unbind(2), b.unbind(2), strict=True)
        pairs = [q[..., :, None, :] * k[..., None, :, :] * _pair_decay(b) for q, k, b in chunks]
        A = torch.stack([x.sum(-1) for x in pairs], 2)
    kv = (k * (b_last - b).exp2()).mT @ v
    state = torch.zeros_like(kv[:, :, 0]) if initial_state is None else initial_state
    S = []
    for decay_n, kv_n in zip(b_last.mT.exp2().unbind(2), kv.unbind(2), strict=True):
        S.append(state)
        state = decay_n * state + kv_n
    o = A @ v + (q * b.exp2()) @ torch.stack(S, 2)
    return Recurrence(to_tokens(o, T), state)


def _log2_decay(g):
    """g in log2 units, limited to finite values whose decay is 0, for the sums. NaN stays NaN."""
    return torch.where(_is_reset(g), _lowest(g), g * LOG2E)


def _is_reset(g):
    return g * LOG2E < _lowest(g)


def _lowest(g):
    return -1100.0 if g.dtype == torch.float64 else -150.0


def _pair_decay(b):
    """2^{b_i - b_j} for i >= j, else 0: [.., C, K] -> [.., C, C, K]. Masks before the exp."""
    later = torch.ones(b.shape[-2], b.shape[-2], dtype=torch.bool, device=b.device).tril()
    difference = b[..., :, None, :] - b[..., None, :, :]
    return torch.where(later[..., None], difference, -torch.inf).exp2()


def _suffix_sum(x):
    return x.flip(-2).cumsum(-2).flip(-2)
