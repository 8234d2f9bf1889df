"""The operators on sharded tensors (`torch.distributed.tensor.DTensor`).

Once a program imports DTensors, every operator of gla_ext gets a rule of one of two kinds. The
first kind names the shards that the operator can compute locally; the placements of the largest
inputs are kept if possible and other inputs are redistributed to match. The second kind raises an
error that names the function to call instead. `chunk_gla` and the recurrence choose their shards in
Python, see gla_ext/distributed/sharding.py, because not all results of their operators are sharded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

# For one dimension of a mesh: the dimension by which each tensor is sharded, by its name in the
# operator's schema, or SUM for an output that is summed over the ranks. Other tensors are
# replicated.
SUM = "sum"
Shards = dict[str, int | str]
Given = dict[str, Any]
Rule = Callable[[Given], Iterator[Shards]]

# For declared operators: the rule; or a function that composes the operator from operators with
# rules; or the function to call instead of an operator that takes no DTensors.
_RULES: dict[str, Rule] = {}
_DECOMPOSED: dict[str, Callable[..., Any]] = {}
_INSTEAD: dict[str, str] = {}


def names_of_operators() -> list[str]:
    """Names of all registered operators of gla_ext, without namespace."""
    names = (name.split("::") for name in torch._C._dispatch_get_all_op_names())
    return sorted(name for namespace, name in names if namespace == "gla_ext")


def register(tensor: ModuleType) -> None:
    """Registers the rules with torch.distributed.tensor."""
    for name in names_of_operators():
        function = _DECOMPOSED.get(name, _refuse)
        if name in _RULES:
            function = functools.partial(_on_shards, tensor, _RULES[name])
        torch.library.register_torch_dispatch(f"gla_ext::{name}", tensor.DTensor, function)


# Flags, and the output that is empty if the flag is False.
_ASKS_FOR = {"output_state": "state", "product": "y", "output": "y"}


@torch.no_grad()  # autograd has already recorded the operator on DTensors
def _on_shards(
    tensor: ModuleType,
    rule: Rule,
    cls: type,
    op: Any,
    types: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """Calls the operator on every rank's shards."""
    schema = op._schema
    given = {argument.name: argument.default_value for argument in schema.arguments}
    given |= dict(zip(given, args, strict=False)) | (kwargs or {})
    inputs = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    mesh = next(t.device_mesh for t in inputs.values() if isinstance(t, cls))
    for name, t in inputs.items():
        if not isinstance(t, cls) and name != "cu_seqlens":  # the same on every rank
            raise NotImplementedError(
                f"{_name(op)}: expected {name} to be a DTensor like the others, got a plain "
                "tensor; make it one with distribute_tensor, or call it on to_local() tensors"
            )
    sharded = {name: t for name, t in inputs.items() if isinstance(t, cls)}
    choices: list[Shards] = [{}, *rule(given)]

    def placement(where: int | str | None) -> Any:
        if where is None:
            return tensor.Replicate()
        return tensor.Partial() if where == SUM else tensor.Shard(where)

    chosen = []
    for dim in range(mesh.ndim):

        def stays(shards: Shards, dim: int = dim) -> int:
            """Number of elements of inputs that already have the placement of this choice."""
            kept = (n for n, t in sharded.items() if t.placements[dim] == placement(shards.get(n)))
            return sum(sharded[n].numel() for n in kept)

        chosen.append(max(choices, key=stays))
    local = {}
    for name, t in sharded.items():
        placements = tuple(placement(c.get(name)) for c in chosen)
        if t.placements != placements:
            t = t.detach().redistribute(placements=placements)
        local[name] = t.to_local()
    outputs = op(*(given | local).values())
    single = isinstance(outputs, Tensor)
    # Outputs without elements: gradients of missing inputs, and outputs that a flag turns off.
    absent = {f"d{argument.name}" for argument in schema.arguments} - {f"d{n}" for n in inputs}
    absent |= {name for flag, name in _ASKS_FOR.items() if given.get(flag) is False}
    found = []
    for output, t in zip(schema.returns, [outputs] if single else outputs, strict=True):
        name = output.name or "result"
        if name == "dx" and t.ndim != given["dy"].ndim:  # dresidual serves as both gradients
            absent.add(name)
        shards = [None if name in absent else c.get(name) for c in chosen]
        shape = list(t.shape)
        for c, where in zip(chosen, shards, strict=True):
            if isinstance(where, int):
                like = next(n for n in c if n in sharded)
                shape[where] = sharded[like].shape[c[like]]
        options = {"shape": torch.Size(shape), "stride": contiguous_strides(shape)}
        placements = [placement(where) for where in shards]
        found.append(cls.from_local(t, mesh, placements, run_check=False, **options))
    return found[0] if single else tuple(found)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(size, 1))
    return tuple(strides[: len(shape)])


def _name(op: Any) -> str:
    return op._schema.name.removeprefix("gla_ext::")


def each_but_last(names: str, summed: str = "") -> Rule:
    """Rule for rows: shards all named tensors by the same dimension, any but the last. The first
    named tensor must always be given.
    """

    def rule(given: Given) -> Iterator[Shards]:
        for dim in range(given[names.split()[0]].ndim - 1):
            yield dict.fromkeys(names.split(), dim) | dict.fromkeys(summed.split(), SUM)

    return rule


def each(names: str) -> Rule:
    """Rule for elementwise operators: shards all named tensors by the same dimension."""

    def rule(given: Given) -> Iterator[Shards]:
        for dim in range(given[names.split()[0]].ndim):
            yield dict.fromkeys(names.split(), dim)

    return rule


def _refuse(cls: type, op: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> None:
    name = _name(op)
    instead = f"call {_INSTEAD[name]}, or redistribute" if name in _INSTEAD else "redistribute"
    raise NotImplementedError(
        f"{name}: expected plain tensors, got a DTensor; {instead} to whole sequences, sharded "
        "over batch or heads, and call it on to_local() tensors"
    )
