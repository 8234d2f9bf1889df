"""DTensors whose tokens a context cuts, and those that operators refuse."""

import pytest
import torch
from common import assert_close, make_inputs
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import gla_ext.ops
from gla_ext import chunk_gla
from gla_ext.distributed import build_cp_context
from gla_ext.layers.attention import Attention


def results(x, context=None, mesh=None, tokens=None, state=None):
    """Outputs, final states and gradients, whole; with a mesh, of DTensors that lie so."""

    def convert(t, placements):
        return t.detach() if mesh is None else distribute_tensor(t.detach(), mesh, placements)

    leaves = [convert(t, tokens).requires_grad_() for t in (x.q, x.k, x.v, x.g)]
    leaves.append(convert(x.initial_state, state).requires_grad_())
    o, final = chunk_gla(
        *leaves[:4], initial_state=leaves[4], output_final_state=True, cp_context=context
    )
    if mesh is not None:
        assert list(o.placements) == tokens and final.placements[1].is_partial()
        final = final.redistribute(placements=state)
    upstream = convert(x.do, tokens), convert(x.dht, state)
    found = (o, final, *torch.autograd.grad((o, final), leaves, upstream))
    return leaves, [t.detach() if mesh is None else t.detach().full_tensor() for t in found]


def run_sharded_tokens(group, x):
    """Tokens over two ranks and heads over two, on a mesh of both."""
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("tp", "cp"))
    context = build_cp_context(None, mesh["cp"].get_group())
    leaves, found = results(x, context, mesh, [Shard(2), Shard(1)], [Shard(1), Replicate()])
    with pytest.raises(NotImplementedError, match="that is cp_context's group, and on no other"):
        chunk_gla(*leaves[:4], cp_context=build_cp_context(None, mesh["tp"].get_group()))
    packed = build_cp_context(torch.tensor([0, 34]), mesh["cp"].get_group())
    with pytest.raises(NotImplementedError, match="expected a cp_context of equal parts"):
        chunk_gla(*leaves[:4], cp_context=packed)
    return found


def test_tokens_that_a_context_cuts(pool):
    x = make_inputs(2, 34, 4, 5, 3, torch.float64)
    _, expected = results(x)
    for found in pool(run_sharded_tokens, x):
        for mine, theirs in zip(found, expected, strict=True):
            assert_close(mine, theirs, 1e-12)


def refusals(mesh):
    """Calls by what they are refused with, of tensors sharded by the first argument's dimension."""

    def sharded(dim, *shape):
        place = Replicate() if dim is None else Shard(dim)
        return distribute_tensor(torch.ones(shape), mesh, [place])

    q, state, inputs = (3, 2, 4, 8), (5, 4, 8, 8), (1, 3, 8)
    ops, heads, pool = gla_ext.ops, [sharded(2, *q)] * 3, sharded(1, *state)
    plain, out = torch.ones(q), torch.empty(q)
    weight, cache = torch.ones(8, 1, 4), torch.ones(1, 8, 4)
    one = sharded(None, 1, 3, 2, 4)
    no_out = "out to be None with DTensors, got a tensor"
    return [
        (r"tokens, Shard\(1\), got S", lambda: chunk_gla(*[sharded(1, *q)] * 4)),
        ("make k a DTensor too", lambda: chunk_gla(sharded(0, *q), plain, plain, plain)),
        (
            r"packed sequences .* redistribute q",
            lambda: chunk_gla(*[sharded(0, *q)] * 4, cu_seqlens=torch.tensor([0, 2])),
        ),
        (
            r"^recurrent_gla_step_: expected q to be repl",
            lambda: ops.recurrent_gla_step_(*[sharded(0, *q)] * 3, state=sharded(None, *state)),
        ),
        (
            r"^recurrent_gla_verify: expected state to lie as q, S\(1\), got R; redistribute it",
            lambda: ops.recurrent_gla_verify(*heads, state=sharded(None, *state)),
        ),
        (no_out, lambda: ops.recurrent_gla_step_(*heads, state=pool, out=out)),
        (no_out, lambda: ops.recurrent_gla_verify(*heads, state=pool, out=out)),
        (
            r"commit_: expected .* make state a DTensor too",
            lambda: ops.recurrent_gla_commit_(
                *heads[:2], state=torch.ones(state), accepted=torch.ones(3).long()
            ),
        ),
        (
            r"^short_convolution_: expected plain tensors",
            lambda: ops.short_convolution_(
                sharded(None, *inputs), sharded(None, 8, 1, 4), state=sharded(None, 2, 8, 4)
            ),
        ),
        (
            r"^short_convolution_: expected plain tensors",
            lambda: ops.short_convolution_(
                torch.ones(inputs), weight, state=cache, out=sharded(None, *inputs)
            ),
        ),
        (
            r"^chunk_gla_: expected plain tensors",
            lambda: ops.chunk_gla_(one, one, one, one, state=sharded(None, 1, 2, 4, 4)),
        ),
        (
            r"^recurrent_gla_buffered_step_: expected plain tensors",
            lambda: ops.recurrent_gla_buffered_step_(
                one,
                one,
                one,
                state=sharded(None, 1, 2, 4, 4),
                count=torch.zeros(1).int(),
                **{f"buffer_{name}": one for name in "kvg"},
            ),
        ),
        (
            r"^Attention: expected plain tensors, got a DT",
            lambda: Attention(8, 2)(sharded(None, 1, 4, 8)),
        ),
    ]


def test_what_is_refused(one_rank):
    for sentence, call in refusals(one_rank):
        with pytest.raises(NotImplementedError, match=sentence):
            call()
