"""Calls whose tokens must have bits that depend on their past alone, and their cuts."""

import torch
from common import make_inputs
from torch.nn.functional import logsigmoid

from gla_ext import batch_invariant, chunk_gla
from gla_ext.ops import chunk_gla_step

T, CHUNK = 192, 64
NORMALIZERS = (0.05, 0.3, 1.0, 16.0, 200.0)


def late(g):
    """Strong from the middle of a chunk on."""
    g = g / 16
    g[:, 40:64] *= 300
    g[:, 150:] *= 300
    return g


def one_reset(g):
    g = g / 16
    g[:, 37, :, 0] = -torch.inf
    g[:, 100] = -torch.inf
    return g


def over_the_limit(g):
    """b is -80 (log2 units) at token 41 of a chunk, -112 at token 58."""
    g = torch.full_like(g, -1.35)
    g[..., 1:] = -0.01
    return g


def positive(g):
    """b of a channel rises above 8 (log2 units) at token 28 of a chunk, and falls again."""
    g = torch.full_like(g, -0.2)
    g[:, torch.arange(g.shape[1]) % CHUNK < 30, :, 0] = 0.2
    return g


GATES = {str(n): lambda g, n=n: g / n for n in NORMALIZERS} | {
    "resets": lambda g: g.masked_fill(g < -1.5, -torch.inf),
    "late": late,
    "one reset": one_reset,
    "over the limit": over_the_limit,
    "positive": positive,
}


def make(gate, dtype, T=T, kind="keys", HK=2, B=1, K=20, V=28, gate_dtype=None):
    """Arguments of chunk_gla, gates on the sides that `kind` names."""
    x = make_inputs(B, T, 2, K, V, dtype)
    raw = logsigmoid(make_inputs(B, T, HK, K + V, 1, torch.float64, 0.0, seed=1).k)
    g, gv = (GATES[gate](part.clone()).to(gate_dtype or dtype) for part in raw.split((K, V), -1))
    tokens = {"q": x.q, "k": x.k[:, :, :HK], "v": x.v[:, :, :HK], "g": None, "gv": None}
    if kind in ("keys", "both"):
        tokens["g"] = g
    if kind == "heads":
        tokens["g"] = g[..., 0]
    if kind in ("values", "both"):
        tokens["gv"] = gv
    return tokens, x.initial_state


def part(tokens, first, end):
    return {name: x if x is None else x[:, first:end] for name, x in tokens.items()}


def run(tokens, state, first=0, end=None):
    return chunk_gla(**part(tokens, first, end), initial_state=state, output_final_state=True)


def check_cuts(tokens, state, cuts=range(1, T)):
    """Every prefix, and every second part that goes on from the last boundary before a cut."""
    with batch_invariant():
        o, final_state = run(tokens, state)
        boundaries = [(0, state)]
        for first in range(CHUNK, T, CHUNK):
            boundaries.append((first, run(tokens, state, 0, first)[1]))
        for cut in cuts:
            before, left = run(tokens, state, 0, cut)
            assert torch.equal(before, o[:, :cut]), cut
            first, entered = boundaries[cut // CHUNK]
            if cut == first:
                assert torch.equal(left, entered)
            after, left = run(tokens, entered, first)
            assert torch.equal(after[:, cut - first :], o[:, cut:]), cut
            assert torch.equal(left, final_state), cut
    return o


def decode(tokens, state, sizes):
    """o of all tokens, by calls for as many new ones as `sizes` says in turn."""
    found, first, t = [], 0, 0
    length = tokens["q"].shape[1]
    while t < length:
        new = min(sizes[len(found) % len(sizes)], first + CHUNK - t, length - t)
        arguments = part(tokens, first, t + new)
        arguments["q"] = arguments["q"][:, t - first :]
        o, state = chunk_gla_step(**arguments, boundary_state=state)
        found.append(o)
        t += new
        first = t // CHUNK * CHUNK
    return torch.cat(found, 1), state
