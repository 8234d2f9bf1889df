"""Operators on DTensors: sharded over the batch or the heads, every rank computes its shard; over
the tokens where a context says how they are cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from gla_ext.distributed.context import as_context

# Where batch, heads and tokens stand: in tensors of tokens [B, T, H, D], and in states
# [N, H, K, V], which every rank of a cut text has whole.
_TOKENS, _STATE = {"batch": 0, "heads": 2, "tokens": 1}, {"batch": 0, "heads": 1}


def attend_on_shards(
    op: str,
    function: Callable[..., tuple[Tensor, Tensor | None]],
    tokens: dict[str, Tensor | None],
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    cp_context: Any = None,
) -> tuple[DTensor, DTensor | None]:
    """Calls `chunk_gla` or the recurrence on the shards of DTensors.

    All take the placements of q, which on every dimension of the mesh are `Replicate()`, `Shard(0)`
    (the batch) or `Shard(2)` (heads, of a number that divides), and on that of cp_context's group
    `Shard(1)` (tokens); another tensor's are changed to them. Where tokens are sharded the final
    state is `Partial()`.

    Args:
        op: its name.
        function: takes tokens' names, `initial_state` and `cu_seqlens`, gives o and a state.
        tokens: q first, by name.
        state: initial_state.
        cp_context: how the tokens are cut. Default: they are not.

    Raises:
        NotImplementedError: other placements of q, plain tensors among DTensors, packed sequences
            with a sharded batch, a context whose parts are not shards.
    """
    q = tokens["q"]
    for name, t in {**tokens, "initial_state": state}.items():
        if t is not None and not isinstance(t, DTensor):
            raise NotImplementedError(
                f"{op}: expected plain tensors, got a DTensor among them; make {name} a DTensor "
                "too, or call it on to_local() tensors, sharded over batch or heads"
            )
    mesh, roles = q.device_mesh, []
    for placement in q.placements:
        role = next((r for r, dim in _TOKENS.items() if placement == Shard(dim)), None)
        if role == "tokens" and cp_context is None:
            role = None
        if role is None and placement != Replicate():
            raise NotImplementedError(
                f"{op}: expected q to be replicated or sharded over batch, Shard(0), or heads, "
                f"Shard(2), or with a cp_context over tokens, Shard(1), got {placement}; "
                "redistribute it"
            )
        roles.append(role)
    if cp_context is not None:
        _check_context(op, cp_context, mesh, roles)
    if cu_seqlens is not None and "batch" in roles:
        raise NotImplementedError(
            f"{op}: expected packed sequences to be replicated or sharded over heads, got "
            "Shard(0); redistribute q"
        )

    def placements(dims: dict[str, int], summed: bool = False) -> list[Any]:
        """Those of tensors whose sharded dimensions stand there. Where tokens are cut, states have
        none: every rank has them whole, or a part that is summed.
        """
        whole = Partial() if summed else Replicate()
        return [
            Replicate() if role is None else Shard(dims[role]) if role in dims else whole
            for role in roles
        ]

    def local(name: str, t: DTensor | None, dims: dict[str, int]) -> Tensor | None:
        if t is None:
            return None
        for size, role in zip(mesh.shape, roles, strict=True):
            if role in dims and t.shape[dims[role]] % size:
                raise NotImplementedError(
                    f"{op}: expected {role} of {name} to be a multiple of the mesh's {size}, got "
                    f"{t.shape[dims[role]]}; redistribute it to Replicate()"
                )
        # A state's gradient is one rank's, of those that have it whole.
        return t.redistribute(placements=placements(dims)).to_local(
            grad_placements=placements(dims, summed=True)
        )

    operands = {name: local(name, t, _TOKENS) for name, t in tokens.items()}
    offsets = cu_seqlens.full_tensor() if isinstance(cu_seqlens, DTensor) else cu_seqlens
    h0 = local("initial_state", state, _STATE)
    o, final = function(**operands, initial_state=h0, cu_seqlens=offsets)
    o = DTensor.from_local(o, mesh, placements(_TOKENS))
    if final is not None:
        final = DTensor.from_local(final, mesh, placements(_STATE, summed=True))
    return o, final


def _check_context(op: str, cp_context: Any, mesh: Any, roles: list[str | None]) -> None:
    """That the mesh's shards of tokens are a context's parts, and there are some."""
    context = as_context(cp_context)
    found = [mesh.get_group(i) for i, role in enumerate(roles) if role == "tokens"]
    if [*map(dist.get_process_group_ranks, found)] != [dist.get_process_group_ranks(context.group)]:
        raise NotImplementedError(
            f"{op}: expected q to be sharded over tokens, Shard(1), on the dimension of the mesh "
            "that is cp_context's group, and on no other; redistribute it"
        )
    if context.layout != "contiguous" or not context.cuts_rows_evenly:
        raise NotImplementedError(
            f"{op}: expected a cp_context of equal parts, contiguous and without cu_seqlens, "
            "beside DTensors; call it on to_local() tensors"
        )
