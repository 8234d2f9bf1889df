"""The operators as plain torch operations, for graphs that other programs run.

Nothing is read back, nothing branches on data, and the length may be symbolic. Tokens meet in
blocks of at most 16, pair by pair, blocks meet through states, 16 of them one after the other, and
such groups again pair by pair. Every exponent is a sum of gates, none a difference of such sums: at
most 0, and exact at any gate, -inf included.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

UNITS = 16  # tokens of a block, and blocks of a group


def gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    gv: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float | None,
    reverse: bool,
    state_v_first: bool,
) -> tuple[Tensor, Tensor]:
    """o and the final state of `fused_recurrent_gla`, whose arguments these are, and so of
    `chunk_gla`; reverse without cu_seqlens alone.
    """
    if reverse and cu_seqlens is not None:
        raise NotImplementedError(
            "fused_recurrent_gla: reverse = True with cu_seqlens has no plain form, for export "
            "reverse each sequence instead"
        )
    dtype, wide, H = v.dtype, torch.promote_types(q.dtype, torch.float32), q.shape[2]
    q = q.to(wide) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if g is not None and g.ndim == 3:  # one gate a head
        g = g.unsqueeze(-1).expand_as(k)
    g = torch.zeros_like(k, dtype=wide) if g is None else _finite(g.to(wide))
    gv = None if gv is None else _finite(gv.to(wide))
    tensors = [q, *(_for_every_head(x, H) for x in (k.to(wide), v.to(wide), g, gv))]
    if reverse:
        tensors = [x if x is None else x.flip(1) for x in tensors]
    h0 = initial_state
    if h0 is not None and state_v_first:
        h0 = h0.transpose(-1, -2)
    if cu_seqlens is None:
        o, state = _of_batch(*tensors, h0)
    else:
        o, state = _of_packed(*tensors, h0, cu_seqlens.long())
    if reverse:
        o = o.flip(1)
    return o.to(dtype), state.transpose(-1, -2).contiguous() if state_v_first else state


class _Blocks(NamedTuple):
    """Of every block of c tokens, what does not depend on the state that enters it."""

    o: Tensor  # [.., c, V], of pairs of its tokens
    q: Tensor  # [.., c, K], decayed since the block's start
    beta: Tensor | None  # [.., c, V], the decay of values since then
    kv: Tensor  # [.., K, V], added to the state
    x: Tensor  # [.., K], log of the state's decay
    xv: Tensor | None  # [.., V]

    def outputs(self, state: Tensor) -> Tensor:
        through = self.q @ state
        return self.o + (through if self.beta is None else through * self.beta)


def _blocks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, gv: Tensor | None) -> _Blocks:
    """All are `[.., c, D]`."""
    decay = _decays(g)
    scores = (k.unsqueeze(-2) * decay * q.unsqueeze(-3)).sum(-1)  # [.., j, i]
    k = k * decay[..., -1, :]
    if gv is None:
        o, beta, xv = scores.transpose(-1, -2) @ v, None, None
    else:
        decay = _decays(gv)
        o = (scores.unsqueeze(-1) * decay * v.unsqueeze(-2)).sum(-3)
        v, beta, xv = v * decay[..., -1, :], gv.cumsum(-2).exp(), gv.sum(-2)
    return _Blocks(o, q * g.cumsum(-2).exp(), beta, k.transpose(-1, -2) @ v, g.sum(-2), xv)


def _of_batch(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, gv: Tensor | None, h0: Tensor | None
) -> tuple[Tensor, Tensor]:
    """o `[B, T, H, V]` and the final states `[B, H, K, V]`."""
    B, T, H, _ = q.shape
    c, count = _units(T)

    def cut(x: Tensor) -> Tensor:  # [B, H, count, c, D]
        x = F.pad(x, (0, 0, 0, 0, 0, count * c - T))
        return x.reshape(B, count, c, H, x.shape[-1]).permute(0, 3, 1, 2, 4)

    blocks = _blocks(*(x if x is None else cut(x) for x in (q, k, v, g, gv)))
    states = _entering(blocks.kv, blocks.x, blocks.xv, h0)
    o = blocks.outputs(states).permute(0, 2, 3, 1, 4).reshape(B, count * c, H, v.shape[-1])
    last = (x if x is None else x[:, :, -1] for x in (states, blocks.x, blocks.xv))
    return _first(o, 1, T), _decayed(*last) + blocks.kv[:, :, -1]


def _of_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    gv: Tensor | None,
    h0: Tensor | None,
    offsets: Tensor,
) -> tuple[Tensor, Tensor]:
    """o `[1, T, H, V]` and the final states `[N, H, K, V]`: every sequence starts a block."""
    T, N = q.shape[1], offsets.shape[0] - 1
    count = T // UNITS + N + int(isinstance(T, torch.SymInt))  # never 1 then, see _units
    lengths = offsets[1:] - offsets[:-1]
    owned = (lengths + UNITS - 1) // UNITS  # blocks of each sequence
    first = owned.cumsum(0) - owned
    block = torch.arange(count, device=q.device)
    sequence = (first <= block.unsqueeze(1)).sum(1) - 1  # of each block
    place = (block - first[sequence]).unsqueeze(1) * UNITS + torch.arange(UNITS, device=q.device)
    there = place < lengths[sequence].unsqueeze(1)  # [count, c]
    token = torch.where(there, offsets[sequence].unsqueeze(1) + place, 0).flatten()

    def cut(x: Tensor) -> Tensor:  # [H, count, c, D]
        x = x[0].index_select(0, token).unflatten(0, (count, UNITS))
        return torch.where(there[..., None, None], x, 0).permute(2, 0, 1, 3)

    blocks = _blocks(*(x if x is None else cut(x) for x in (q, k, v, g, gv)))
    starts = (block == first[sequence])[:, None, None]
    h0 = torch.zeros_like(blocks.kv[:, :N].transpose(0, 1)) if h0 is None else h0
    own = h0.index_select(0, sequence).transpose(0, 1)  # [H, count, K, V]
    # A first block forgets what other sequences left, and adds what its own starts from.
    kv = torch.where(starts, blocks.kv + _decayed(own, blocks.x, blocks.xv), blocks.kv)
    x = torch.where(starts[:, 0], _lowest(g), blocks.x)
    states = torch.where(starts, own, _entering(kv, x, blocks.xv, None))
    o = blocks.outputs(states).flatten(1, 2)  # [H, count * c, V]

    t = torch.arange(T, device=q.device)
    sequence = (offsets[1:] <= t.unsqueeze(1)).sum(1)  # N after the last offset
    inside = sequence < N
    sequence = sequence.clamp(max=N - 1)
    slot = torch.where(inside, first[sequence] * UNITS + t - offsets[sequence], 0)
    o = o.index_select(1, slot).transpose(0, 1)
    last = (first + owned - 1).clamp(min=0)
    at_end = [None if x is None else x.index_select(1, last) for x in (states, blocks.x, blocks.xv)]
    final = (_decayed(*at_end) + blocks.kv.index_select(1, last)).transpose(0, 1)
    final = torch.where((lengths > 0)[:, None, None, None], final, h0)
    return torch.where(inside[:, None, None], o, 0).unsqueeze(0), final


def _entering(kv: Tensor, x: Tensor, xv: Tensor | None, h0: Tensor | None) -> Tensor:
    """The state that enters each of n units, S' = decay S + kv, `[.., n, K, V]`, h0 the first or
    None for zero; x `[.., n, K]` and xv `[.., n, V]` are logs of the decays.
    """
    n = kv.shape[-3]
    size, groups = _units(n)
    missing = groups * size - n
    kv = F.pad(kv, (0, 0, 0, 0, 0, missing)).unflatten(-3, (groups, size))
    x, xv = (
        t if t is None else F.pad(t, (0, 0, 0, missing)).unflatten(-2, (groups, size))
        for t in (x, xv)
    )
    # In a group that starts from nothing, and what it leaves.
    inside, state = [], torch.zeros_like(kv[..., 0, :, :])
    for i in range(size):
        inside.append(state)
        state = _decayed(state, *(t if t is None else t[..., i, :] for t in (x, xv)))
        state = state + kv[..., i, :, :]
    # From group to group, the first state before them all.
    h0 = torch.zeros_like(state[..., 0, :, :]) if h0 is None else h0
    added = torch.cat([h0.unsqueeze(-3), state], -3)
    added = _first(added, added.ndim - 3, groups)  # [.., groups, K, V]
    totals = [t if t is None else _shifted(t.sum(-2)) for t in (x, xv)]
    if xv is None:
        decay = _decays(totals[0]).transpose(-1, -3)  # [.., K, i, j]
        starts = (decay @ added.transpose(-2, -3)).transpose(-2, -3)
    else:
        decay, decay_v = (_decays(t) for t in totals)  # [.., j, i, D]
        starts = (decay.unsqueeze(-1) * decay_v.unsqueeze(-2) * added.unsqueeze(-3)).sum(-4)
    before = [t if t is None else _shifted(t).cumsum(-2) for t in (x, xv)]
    states = torch.stack(inside, -3) + _decayed(starts.unsqueeze(-3), *before)
    states = states.flatten(-4, -3)
    return _first(states, states.ndim - 3, n)


def _units(n: int) -> tuple[int, int]:
    """Into how many units of what size n are cut."""
    if isinstance(n, torch.SymInt):
        # At least two, or a program exported at a short length is one of such lengths alone: torch
        # asks of every size whether it is 1, and broadcasts.
        return UNITS, n // UNITS + 2
    size = max(1, min(UNITS, n))
    return size, max(1, (n + size - 1) // size)


def _first(x: Tensor, dim: int, n: int) -> Tensor:
    """x[:n] in that dimension. A slice of symbolic length would be of another symbol's."""
    if isinstance(n, torch.SymInt):
        return x.index_select(dim, torch.arange(n, device=x.device))
    return x.narrow(dim, 0, n)


def _shifted(x: Tensor) -> Tensor:
    """0 and all but the last of `[.., n, D]`."""
    return _first(F.pad(x, (0, 0, 1, 0)), x.ndim - 2, x.shape[-2])


def _decays(x: Tensor) -> Tensor:
    """exp(sum of x_s, j < s <= i) for j <= i, else 0: `[.., n, D]` -> `[.., j, i, D]`."""
    t = torch.arange(x.shape[-2], device=x.device)
    after = t.unsqueeze(-1) < t  # [j, s]
    sums = torch.where(after.unsqueeze(-1), x.unsqueeze(-3), 0).cumsum(-2)
    return torch.where((t.unsqueeze(-1) <= t).unsqueeze(-1), sums.exp(), 0)


def _decayed(state: Tensor, x: Tensor, xv: Tensor | None) -> Tensor:
    """diag(exp x) S diag(exp xv)."""
    state = x.exp().unsqueeze(-1) * state
    return state if xv is None else state * xv.exp().unsqueeze(-2)


def _finite(g: Tensor) -> Tensor:
    """Gates, held where their decay is 0 already: 0 times a sum of them is 0."""
    return g.clamp(min=_lowest(g))


def _lowest(g: Tensor) -> float:
    return -763.0 if g.dtype == torch.float64 else -104.0


def _for_every_head(x: Tensor | None, H: int) -> Tensor | None:
    """`[B, T, HK, D]` -> `[B, T, H, D]`: head h is number h // (H // HK)."""
    if x is None or x.shape[2] == H:
        return x
    return x.unsqueeze(3).expand(-1, -1, -1, H // x.shape[2], -1).flatten(2, 3)
