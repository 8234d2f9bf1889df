"""The operators as plain torch operations, for graphs that other programs run.

Nothing is read back, no branch depends on data, and the length may be symbolic. Blocks have at most
16 tokens, which are combined pair by pair. Blocks are combined through states, 16 in sequence;
groups of 16 blocks are again combined pair by pair. Every exponent is a sum of gates, never a
difference of such sums, so it is at most 0 and exact for any gate, including -inf.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

UNITS = 16  # tokens per block, and blocks per group


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
    """o and the final state of `fused_recurrent_gla`, and so of `chunk_gla`; the arguments are
    those of `fused_recurrent_gla`. reverse is only possible without cu_seqlens.
    """
    if reverse and cu_seqlens is not None:
        raise NotImplementedError(
            "fused_recurrent_gla: reverse = True with cu_seqlens has no plain form, for export "
            "reverse each sequence instead"
        )
    dtype, wide, H = v.dtype, torch.promote_types(q.dtype, torch.float32), q.shape[2]
    q = q.to(wide) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if g is not None and g.ndim == 3:  # one gate per head
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
    """For every block of c tokens, the results that do not depend on the state that enters it."""

    o: Tensor  # [.., c, V], the contribution of pairs of its tokens
    q: Tensor  # [.., c, K], q decayed since the block's start
    beta: Tensor | None  # [.., c, V], decay of values since the block's start
    kv: Tensor  # [.., K, V], what the block adds to the state
    x: Tensor  # [.., K], log of the state's decay over the block
    xv: Tensor | None  # [.., V], the same for values

    def outputs(self, state: Tensor) -> Tensor:
        through = self.q @ state
        return self.o + (through if self.beta is None else through * self.beta)


def _blocks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, gv: Tensor | None) -> _Blocks:
    """All arguments are `[.., c, D]`."""
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
    """o `[1, T, H, V]` and the final states `[N, H, K, V]`. Every sequence starts a new block."""
    T, N = q.shape[1], offsets.shape[0] - 1
    count = T // UNITS + N + int(isinstance(T, torch.SymInt))  # at least 2 if symbolic, see _units
    lengths = offsets[1:] - offsets[:-1]
    owned = (lengths + UNITS - 1) // UNITS  # blocks of each sequence
    first = owned.cumsum(0) - owned
    block = torch.arange(count, device=q.device)
    sequence = (first <= block.unsqueeze(1)).sum(1) - 1  # sequence of each block
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
    # A sequence's first block drops the state of other sequences and adds its own initial state.
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
    """The states `[.., n, K, V]` that enter each of n units, by S' = decay S + kv. h0 is the first
    one, None for zero. x `[.., n, K]` and xv `[.., n, V]` are logs of the decays.
    """
    n = kv.shape[-3]
    size, groups = _units(n)
    missing = groups * size - n
    kv = F.pad(kv, (0, 0, 0, 0, 0, missing)).unflatten(-3, (groups, size))
    x, xv = (
        t if t is None else F.pad(t, (0, 0, 0, missing)).unflatten(-2, (groups, size))
        for t in (x, xv)
    )
    # States within a group that starts from zero, and the state at its end.
    inside, state = [], torch.zeros_like(kv[..., 0, :, :])
    for i in range(size):
        inside.append(state)
        state = _decayed(state, *(t if t is None else t[..., i, :] for t in (x, xv)))
        state = state + kv[..., i, :, :]
    # From group to group; h0 enters the first group.
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
    """Size and number of the units into which n is cut."""
    if isinstance(n, torch.SymInt):
        # At least two units. With one, torch would specialize the exported program to short
        # lengths, as it checks every size for being 1, to broadcast it.
        return UNITS, n // UNITS + 2
    size = max(1, min(UNITS, n))
    return size, max(1, (n + size - 1) // size)


def _first(x: Tensor, dim: int, n: int) -> Tensor:
    """x[:n] along dim. A slice of symbolic length would get a new symbol instead of n as its
    length.
    """
    if isinstance(n, torch.SymInt):
        return x.index_select(dim, torch.arange(n, device=x.device))
    return x.narrow(dim, 0, n)


def _shifted(x: Tensor) -> Tensor:
    """`[.., n, D]` shifted by one: 0, then all but the last."""
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
    """Gates clamped at a value whose decay is 0 anyway, so that 0 times their sums is 0 and not
    NaN.
    """
    return g.clamp(min=_lowest(g))


def _lowest(g: Tensor) -> float:
    return -763.0 if g.dtype == torch.float64 else -104.0


def _for_every_head(x: Tensor | None, H: int) -> Tensor | None:
    """`[B, T, HK, D]` -> `[B, T, H, D]`: head h is head h // (H // HK) of x."""
    if x is None or x.shape[2] == H:
        return x
    return x.unsqueeze(3).expand(-1, -1, -1, H // x.shape[2], -1).flatten(2, 3)
