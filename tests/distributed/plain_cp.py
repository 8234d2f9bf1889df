"""The context-parallel operator in plain torch: what a rank's tokens leave, gathered, folded, and
`chunk_gla` from there; in backward the same, the last part first.
"""

import contextlib
import itertools

import torch

from gla_ext import chunk_gla
from gla_ext.distributed import _operator
from gla_ext.distributed._collectives import all_gather


@contextlib.contextmanager
def in_place():
    """Inside, this is the operator."""
    before = _operator.chunk_gla_across_ranks
    _operator.chunk_gla_across_ranks = chunk_gla_across_ranks
    try:
        yield
    finally:
        _operator.chunk_gla_across_ranks = before


def chunk_gla_across_ranks(
    q, k, v, g, gv, initial_state, cu_seqlens, scale, output_final_state, state_v_first,
    batch_invariant, for_backward_bytes, rank, size, group_name, counts, before, after,
):  # fmt: skip
    """Of the signature of `gla_ext.distributed._operator.chunk_gla_across_ranks`."""
    del output_final_state, batch_invariant, for_backward_bytes
    if initial_state is not None and state_v_first:
        initial_state = initial_state.mT
    call = _Call(scale, cu_seqlens, rank, size, group_name, counts, before, after)
    o, state = _AcrossRanks.apply(call, q, k, v, g, gv, initial_state)
    return o, state.mT if state_v_first else state


class _Call:
    def __init__(self, scale, cu_seqlens, rank, size, group_name, counts, before, after):
        self.scale, self.cu_seqlens = scale, cu_seqlens
        self.size, self.group_name = size, group_name
        self.before, self.after, self.counts = before, after, counts
        self.parts = len(counts)
        self.places = (rank, 2 * size - 1 - rank)[: self.parts]
        starts = [sum(counts[:p]) for p in range(self.parts)]
        if cu_seqlens is None:
            rows = [list(range(p, self.parts * counts[0], self.parts)) for p in range(self.parts)]
            self.first = self.last = rows
        else:
            self.first = [[s] if n else [] for s, n in zip(starts, counts, strict=True)]
            self.last = [[s + n - 1] if n else [] for s, n in zip(starts, counts, strict=True)]

    def run(self, q, k, v, g, gv, state):
        return chunk_gla(q, k, v, g, self.scale, state, True, False, self.cu_seqlens, gv=gv)

    def decays(self, g):
        """The sum of g over the tokens of each own sequence, `[N, H, K]`."""
        if self.cu_seqlens is None:
            return g.sum(1)
        offsets = self.cu_seqlens.tolist()
        ranges = itertools.pairwise(offsets)
        sums = [g[0, start:end].sum(0) for start, end in ranges]
        return torch.stack(sums) if sums else g.new_zeros(0, *g.shape[2:])

    def gathered(self, x, rows):
        """The rows of each part, of every part in order: a list of `[R, ...]`."""
        R = self.counts[0] if self.cu_seqlens is None else 1
        mine = [x[r] if r else x.new_zeros(R, *x.shape[1:]) for r in rows]
        every = all_gather(torch.stack(mine), self.size, self.group_name)
        return [*every[:, 0], *(every[:, 1].flip(0) if self.parts == 2 else ())]


def _decayed(state, D, Dv):
    """exp(D) state exp(Dv), 0 where a decay is."""
    for decay, dim in ((D, -1), (Dv, -2)):
        if decay is not None:
            factor = decay.exp().unsqueeze(dim)
            state = torch.where(factor == 0, 0.0, state * factor)
    return state


class _AcrossRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, q, k, v, g, gv, initial_state):
        H, heads = q.shape[2], k.shape[2]
        N = q.shape[0] if call.cu_seqlens is None else call.cu_seqlens.numel() - 1
        wide = torch.promote_types(q.dtype, torch.float32)
        state = q.new_zeros(N, H, q.shape[3], v.shape[3], dtype=wide)
        if initial_state is not None:
            state = initial_state.clone()
        for rows, before in zip(call.first, call.before, strict=True):
            if before:
                state[rows] = 0
        with torch.no_grad():
            left = call.gathered(call.run(q, k, v, g, gv, state)[1], call.last)
            decays = []
            for gate in (g, gv):
                D = None if gate is None else call.decays(gate.to(wide))
                D = None if D is None else D.repeat_interleave(H // heads, 1)
                decays.append([None] * len(left) if D is None else call.gathered(D, call.last))
            for place, rows, before in zip(call.places, call.first, call.before, strict=True):
                if before:
                    total = torch.zeros_like(left[0])
                    for i in range(place - before, place):
                        total = _decayed(total, decays[0][i], decays[1][i]) + left[i]
                    state[rows] = total
            o, final = call.run(q, k, v, g, gv, state)
        ends = torch.ones(N, dtype=torch.bool)
        for rows, after in zip(call.last, call.after, strict=True):
            if after:
                ends[rows] = False
        ctx.call, ctx.decays, ctx.ends = call, decays, ends
        ctx.given = initial_state is not None
        ctx.save_for_backward(q, k, v, g, gv, state)
        return o, final.masked_fill(~ends[:, None, None, None], 0)

    @staticmethod
    def backward(ctx, do, dfinal):
        call, decays = ctx.call, ctx.decays
        leaves = [x if x is None else x.detach().requires_grad_() for x in ctx.saved_tensors]
        wanted = [x for x in leaves if x is not None]
        with torch.enable_grad():
            outputs = call.run(*leaves)
        dfinal = dfinal.masked_fill(~ctx.ends[:, None, None, None], 0)
        (dstate,) = torch.autograd.grad(outputs, leaves[-1], (do, dfinal), retain_graph=True)
        left = call.gathered(dstate, call.first)
        for place, rows, after in zip(call.places, call.last, call.after, strict=True):
            if after:
                total = torch.zeros_like(left[0])
                for i in range(place + after, place, -1):
                    total = _decayed(total, decays[0][i], decays[1][i]) + left[i]
                dfinal[rows] = total
        found = iter(torch.autograd.grad(outputs, wanted, (do, dfinal), materialize_grads=True))
        gradients = [None if x is None else next(found) for x in leaves]
        for rows, before in zip(call.first, call.before, strict=True):
            if before:
                gradients[-1][rows] = 0
        return None, *gradients[:-1], gradients[-1] if ctx.given else None
