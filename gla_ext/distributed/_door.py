"""All checks of a call's mode in this package: whether a graph is recorded, and DTensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import distribute_tensor

from gla_ext.ops._door import is_sharded


def compare(context: Any, op: str, key: tuple, facts: Callable[[], dict[str, Any]]) -> None:
    """Checks that facts and a `CPContext` are the same on all ranks, once for each key.

    This is a collective call: all ranks must make it, or none. Nothing is compared in graphs.

    The facts, given by name and compared as text, must be a function of the key. If a rank's facts
    differ, every rank raises ValueError, which names the first difference.
    """
    key = (op, key)
    if context.size == 1 or torch.compiler.is_compiling() or key in context._compared:
        return
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return
    mine = {"cu_seqlens": context.offsets, "lengths": context.lengths}
    mine = {name: str(fact) for name, fact in (mine | facts()).items()}
    every: list[dict[str, str]] = [{}] * context.size
    dist.all_gather_object(every, mine, group=context.group)
    for rank, theirs in enumerate(every):
        for name in dict.fromkeys((*every[0], *theirs)):
            expected, found = every[0].get(name, "nothing"), theirs.get(name, "nothing")
            if found != expected:
                raise ValueError(
                    f"{op}: expected the same {name} on all ranks of cp_context's group, got "
                    f"{expected} on rank 0 and {found} on rank {rank}"
                )
    context._compared.add(key)


def refuse_in_graph(sentence: str) -> None:
    """Raises ValueError while torch.compile records a graph."""
    if torch.compiler.is_compiling():
        raise ValueError(sentence)


def check_all_sharded(op: str, tensors: dict[str, Tensor | None]) -> None:
    """Raises NotImplementedError if one of the tensors is not a DTensor."""
    for name, t in tensors.items():
        if t is not None and not is_sharded(t):
            raise NotImplementedError(
                f"{op}: expected plain tensors, got a DTensor among them; make {name} a DTensor "
                "too, or call it on to_local() tensors, sharded over batch or heads"
            )


def whole(t: Tensor | None) -> Tensor | None:
    """A DTensor's full tensor; a plain tensor is returned as it is."""
    return t.full_tensor() if t is not None and is_sharded(t) else t


def cut_as(like: Tensor, t: Tensor) -> Tensor:
    """Shards `t`, which every rank has whole, as `like` is sharded if that is a DTensor."""
    if not is_sharded(like):
        return t
    return distribute_tensor(t, like.device_mesh, like.placements, src_data_rank=None)
