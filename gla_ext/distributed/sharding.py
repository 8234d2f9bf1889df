"""Operators on DTensors: sharded over the batch or the heads, every rank computes its shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

# Where batch and heads stand: in tensors of tokens [B, T, H, D], and in states [N, H, K, V].
_TOKENS, _STATE = {"batch": 0, "heads": 2}, {"batch": 0, "heads": 1}


def attend_on_shards(
    op: str,
    function: Callable[..., tuple[Tensor, Tensor | None]],
    tokens: dict[str, Tensor | None],
    state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[DTensor, DTensor | None]:
    """Calls `chunk_gla` or the recurrence on the shards of DTensors.

    All take the placements of q, which on every dimension of the mesh are `Replicate()`, `Shard(0)`
    (the batch) or `Shard(2)` (heads, of a number that divides); another tensor's are changed to
    them.

    Args:
        op: its name.
        function: takes tokens' names, `initial_state` and `cu_seqlens`, gives o and a state.
        tokens: q first, by name.
        state: initial_state.

    Raises:
        NotImplementedError: other placements of q, plain tensors among DTensors, packed sequences
            with a sharded batch.
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
        if role is None and placement != Replicate():
            raise NotImplementedError(
                f"{op}: expected q to be replicated or sharded over batch, Shard(0), or heads, "
                f"Shard(2), got {placement}; redistribute it"
            )
        roles.append(role)
    if cu_seqlens is not None and "batch" in roles:
        raise NotImplementedError(
            f"{op}: expected packed sequences to be replicated or sharded over heads, got "
            "Shard(0); redistribute q"
        )

    def placements(dims: dict[str, int]) -> list[Any]:
        return [Replicate() if role is None else Shard(dims[role]) for role in roles]

    def local(name: str, t: DTensor | None, dims: dict[str, int]) -> Tensor | None:
        if t is None:
            return None
        for size, role in zip(mesh.shape, roles, strict=True):
            if role is not None and t.shape[dims[role]] % size:
                raise NotImplementedError(
                    f"{op}: expected {role} of {name} to be a multiple of the mesh's {size}, got "
                    f"{t.shape[dims[role]]}; redistribute it to Replicate()"
                )
        return t.redistribute(placements=placements(dims)).to_local()

    operands = {name: local(name, t, _TOKENS) for name, t in tokens.items()}
    offsets = cu_seqlens.full_tensor() if isinstance(cu_seqlens, DTensor) else cu_seqlens
    h0 = local("initial_state", state, _STATE)
    o, final = function(**operands, initial_state=h0, cu_seqlens=offsets)
    o = DTensor.from_local(o, mesh, placements(_TOKENS))
    if final is not None:
        final = DTensor.from_local(final, mesh, placements(_STATE))
    return o, final
