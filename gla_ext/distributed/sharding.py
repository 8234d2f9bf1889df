"""The recurrence on DTensors. If they are sharded by batch or heads, every rank computes its shard.
They may be sharded by tokens if a cp_context tells how.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from gla_ext.distributed._door import check_all_sharded, whole
from gla_ext.ops._context import context_of

# Dimensions of batch and heads in states [N, H, K, V], which ranks that split tokens have whole.
_STATE = {"batch": 0, "heads": 1}


def attend_on_shards(
    op: str,
    function: Callable[..., tuple[Tensor, Tensor | None]],
    tokens: dict[str, Tensor | None],
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    cp_context: Any = None,
) -> tuple[DTensor, DTensor | None]:
    """Calls `chunk_gla` or the recurrence on the shards of DTensors.

    All tensors get the placements of q. On each dimension of the mesh these may be `Replicate()`,
    `Shard(0)` (batch) or `Shard(2)` (heads, if their number is divisible), and on the dimension of
    cp_context's group `Shard(1)` (tokens). Other tensors are redistributed. If tokens are sharded,
    the final state is `Partial()`.

    Args:
        function: takes the tokens by name, `initial_state` and `cu_seqlens`; returns o and a state.
        tokens: tensors by name, q first.
        cp_context: how the tokens are split. Default: they are not.

    Raises:
        NotImplementedError: other placements of q, plain tensors mixed with DTensors, packed
            sequences with a sharded batch, a context whose parts are not the shards.
    """
    q = tokens["q"]
    check_all_sharded(op, {**tokens, "initial_state": state})
    context, mesh, roles = context_of(cp_context), q.device_mesh, []
    for placement in q.placements:
        role = next((r for r, dim in context.shards.items() if placement == Shard(dim)), None)
        if role is None and placement != Replicate():
            raise NotImplementedError(
                f"{op}: expected q to be replicated or sharded over batch, Shard(0), or heads, "
                f"Shard(2), or with a cp_context over tokens, Shard(1), got {placement}; "
                "redistribute it"
            )
        roles.append(role)
    context.check_shards(op, mesh, roles)
    if cu_seqlens is not None and "batch" in roles:
        raise NotImplementedError(
            f"{op}: expected packed sequences to be replicated or sharded over heads, got "
            "Shard(0); redistribute q"
        )

    def placements(dims: dict[str, int], summed: bool = False) -> list[Any]:
        """Placements of a tensor whose dimensions have the roles in `dims`. If tokens are split,
        states have no dimension for that: every rank has them whole, or a part that is summed.
        """
        everywhere = Partial() if summed else Replicate()
        return [
            Replicate() if role is None else Shard(dims[role]) if role in dims else everywhere
            for role in roles
        ]

    def local(name: str, t: DTensor | None, dims: dict[str, int]) -> Tensor | None:
        if t is None:
            return None
        for role, dim in dims.items():
            sharded = [found == role for found in roles]
            _check_divides(f"{op}: expected {role} of {name}", t, dim, mesh, sharded)
        # Of ranks that all have the whole state, only one computes its gradient, so it is summed.
        return t.redistribute(placements=placements(dims)).to_local(
            grad_placements=placements(dims, summed=True)
        )

    operands = {name: local(name, t, context.shards) for name, t in tokens.items()}
    h0 = local("initial_state", state, _STATE)
    o, final = function(**operands, initial_state=h0, cu_seqlens=whole(cu_seqlens))
    o = DTensor.from_local(o, mesh, placements(context.shards))
    if final is not None:
        final = DTensor.from_local(final, mesh, placements(_STATE, summed=True))
    return o, final


def step_on_shards(
    op: str,
    function: Callable[..., Tensor | None],
    tokens: dict[str, Tensor | None],
    state: Tensor,
    rows: dict[str, Tensor | None],
    out: Tensor | None = None,
) -> DTensor | None:
    """Calls an operator on a pool of states with DTensors.

    The first of tokens must be replicated or sharded by the heads, `Shard(2)`, on each dimension of
    the mesh. The pool is written in place, so it must already be replicated or `Shard(1)` there to
    match. Other tokens are redistributed.

    Args:
        function: takes tokens, state and rows by name; returns o or None.
        rows: int tensors `[B]`, and offsets of packed tokens; plain tensors must be the same on all
            ranks.

    Raises:
        NotImplementedError: other placements of the first tensor or of the pool, plain tensors
            mixed with DTensors, an `out` that is given.
    """
    name, first = next(iter(tokens.items()))
    check_all_sharded(op, {**tokens, "state": state})
    if out is not None:
        raise NotImplementedError(
            f"{op}: expected out to be None with DTensors, got a tensor; call it on to_local() "
            "tensors"
        )
    mesh, of_tokens = first.device_mesh, first.placements
    if any(placement not in (Replicate(), Shard(2)) for placement in of_tokens):
        raise NotImplementedError(
            f"{op}: expected {name} to be replicated or sharded over heads, Shard(2), got "
            f"{', '.join(map(str, of_tokens))}; redistribute it: a pool is one batch's, and tokens "
            "follow each other"
        )
    expected = tuple(Replicate() if p == Replicate() else Shard(1) for p in of_tokens)
    if state.placements != expected:
        raise NotImplementedError(
            f"{op}: expected state to lie as {name}, {', '.join(map(str, expected))}, got "
            f"{', '.join(map(str, state.placements))}; redistribute it once, it is written in place"
        )
    cut = [p != Replicate() for p in of_tokens]
    for label, t, dim in (*((n, t, 2) for n, t in tokens.items()), ("state", state, 1)):
        _check_divides(f"{op}: expected heads of {label}", t, dim, mesh, cut)
    local = {
        n: None if t is None else t.redistribute(placements=of_tokens).to_local()
        for n, t in tokens.items()
    }
    every = {n: whole(t) for n, t in rows.items()}
    o = function(**local, state=state.to_local(), **every)
    return None if o is None else DTensor.from_local(o, mesh, of_tokens)


def replicated(t: Tensor, mesh: DeviceMesh) -> DTensor:
    """Wraps a tensor that is the same on every rank in a DTensor."""
    return DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _check_divides(
    what: str, t: Tensor | None, dim: int, mesh: DeviceMesh, sharded: Sequence[bool]
) -> None:
    for size, cut in zip(mesh.shape, sharded, strict=True):
        if t is not None and cut and t.shape[dim] % size:
            raise NotImplementedError(
                f"{what} to be a multiple of the mesh's {size}, got {t.shape[dim]}; redistribute "
                "it to Replicate()"
            )
