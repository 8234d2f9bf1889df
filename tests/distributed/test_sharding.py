"""Operators on DTensors: sharded over batch or heads, with one process's results."""

import pytest
import torch
from common import assert_close, make_inputs
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from gla_ext import chunk_gla, fused_recurrent_gla
from gla_ext.distributed import build_cp_context

OPERATORS = {"chunk_gla": chunk_gla, "fused_recurrent_gla": fused_recurrent_gla}
PLACEMENTS = {"batch": (Shard(0), Shard(0)), "heads": (Shard(2), Shard(1))}
PLACEMENTS |= {"replicated": (Replicate(), Replicate())}


def run_sharded(group, x, operator, placement):
    mesh = DeviceMesh.from_group(group, "cpu")
    tokens, state = PLACEMENTS[placement]
    leaves = [distribute_tensor(t, mesh, [tokens]).requires_grad_() for t in (x.q, x.k, x.v, x.g)]
    leaves[1] = distribute_tensor(x.k, mesh, [Replicate()]).requires_grad_()  # is redistributed
    leaves.append(distribute_tensor(x.initial_state, mesh, [state]).requires_grad_())
    o, final = OPERATORS[operator](
        *leaves[:4], initial_state=leaves[4], output_final_state=True, cu_seqlens=x.cu_seqlens
    )
    assert o.placements == (tokens,) and final.placements == (state,)
    upstream = (distribute_tensor(x.do, mesh, [tokens]), distribute_tensor(x.dht, mesh, [state]))
    gradients = torch.autograd.grad((o, final), leaves, upstream)
    return [t.detach().full_tensor() for t in (o, final, *gradients)]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_results_are_one_process_s(pool, operator, placement):
    lengths = (20, 13) if placement == "heads" else None
    x = make_inputs(1 if lengths else 4, 33, 4, 5, 3, torch.float64, lengths=lengths)
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v, x.g, x.initial_state)]
    o, final = OPERATORS[operator](
        *leaves[:4], initial_state=leaves[4], output_final_state=True, cu_seqlens=x.cu_seqlens
    )
    expected = (o, final, *torch.autograd.grad((o, final), leaves, (x.do, x.dht)))
    for found in pool(run_sharded, x.map(torch.Tensor.detach), operator, placement, ranks=2):
        for mine, theirs in zip(found, expected, strict=True):
            assert_close(mine, theirs, 1e-12)


def run_sharded_tokens(group, x):
    """Tokens over two ranks and heads over two, on a mesh of both."""
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("tp", "cp"))
    context = build_cp_context(None, mesh["cp"].get_group())
    tokens, state = [Shard(2), Shard(1)], [Shard(1), Replicate()]
    leaves = [distribute_tensor(t, mesh, tokens).requires_grad_() for t in (x.q, x.k, x.v, x.g)]
    leaves.append(distribute_tensor(x.initial_state, mesh, state).requires_grad_())
    o, final = chunk_gla(
        *leaves[:4], initial_state=leaves[4], output_final_state=True, cp_context=context
    )
    assert list(o.placements) == tokens and final.placements[1].is_partial()
    upstream = (distribute_tensor(x.do, mesh, tokens), distribute_tensor(x.dht, mesh, state))
    final = final.redistribute(placements=state)
    gradients = torch.autograd.grad((o, final), leaves, upstream)
    with pytest.raises(NotImplementedError, match="that is cp_context's group, and on no other"):
        chunk_gla(*leaves[:4], cp_context=build_cp_context(None, mesh["tp"].get_group()))
    packed = build_cp_context(torch.tensor([0, 34]), mesh["cp"].get_group())
    with pytest.raises(NotImplementedError, match="expected a cp_context of equal parts"):
        chunk_gla(*leaves[:4], cp_context=packed)
    return [t.detach().full_tensor() for t in (o, final, *gradients)]


def test_tokens_that_a_context_cuts(pool):
    x = make_inputs(2, 34, 4, 5, 3, torch.float64)
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v, x.g, x.initial_state)]
    o, final = chunk_gla(*leaves[:4], initial_state=leaves[4], output_final_state=True)
    expected = (o, final, *torch.autograd.grad((o, final), leaves, (x.do, x.dht)))
    for found in pool(run_sharded_tokens, x.map(torch.Tensor.detach)):
        for mine, theirs in zip(found, expected, strict=True):
            assert_close(mine, theirs, 1e-12)


def test_what_is_refused(one_rank):
    x = make_inputs(2, 8, 2, 4, 4)

    def sharded(dim, t=x.q):
        return distribute_tensor(t, one_rank, [Shard(dim)])

    with pytest.raises(NotImplementedError, match=r"tokens, Shard\(1\), got S"):
        chunk_gla(*[sharded(1)] * 4)
    with pytest.raises(NotImplementedError, match="make k a DTensor too"):
        chunk_gla(sharded(0), x.k, x.v, x.g)
    with pytest.raises(NotImplementedError, match=r"packed sequences .* redistribute q"):
        chunk_gla(*[sharded(0)] * 4, cu_seqlens=torch.tensor([0, 8]))
