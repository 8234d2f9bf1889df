"""The recurrence on DTensors: sharded over the batch or the heads, every rank computes its shard;
over the tokens where a context says how they are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from gla_ext.distributed._door import check_all_sharded, whole
from gla_ext.ops._context import context_of

# Where batch and heads stand in states [N, H, K, V], which every rank of a cut text has whole.
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

    All take the placements of q, which on every dimension of the mesh are `Replicate()`, `Shard(0)`
    (the batch) or `Shard(2)` (heads, of a number that divides), and on that of cp_context's group
    `Shard(1)` (tokens); another tensor's are changed to them. Where tokens are sharded the final
    state is `Partial()`.

    Args:
        function: takes tokens' names, `initial_state` and `cu_seqlens`, gives o and a state.
        tokens: q first, by name.
        cp_context: how the tokens are cut. Default: they are not.

    Raises:
        NotImplementedError: other placements of q, plain tensors among DTensors, packed sequences
            with a sharded batch, a context whose parts are not shards.
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
        """Those of tensors whose sharded dimensions stand there. Where tokens are cut, states have
        none: every rank has them whole, or a part that is summed.
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
        # A state's gradient is one rank's, of those that have it whole.
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

    The first of tokens is replicated or sharded over the heads, `Shard(2)`, on every dimension of
    the mesh; the pool lies as it is written to, replicated or `Shard(1)` there. Other tokens are
    redistributed.

    Args:
        function: takes tokens, state and rows by name; gives o or None.
        rows: int tensors `[B]`, plain ones the same on every rank, and offsets of packed tokens.

    Raises:
        NotImplementedError: other placements of the first or of the pool, plain tensors among
            DTensors, an output that is given.
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
    """A tensor that every rank has, as a DTensor."""
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
