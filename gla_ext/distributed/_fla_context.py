"""FLA's context of context parallelism, with FLA's own split of the tokens."""

from __future__ import annotations

from typing import Any

import torch

from gla_ext.distributed._cuts import Cut
from gla_ext.distributed._door import refuse_in_graph
from gla_ext.distributed.context import CPContext, check_layout

# Stored on the offsets, as FSDP2 with a casting policy copies FLA's object at every call.
_KEPT = "_gla_ext_context"


class _FromFLA(CPContext):
    """The split of an `FLACPContext`: equal parts, packed sequences."""

    def __init__(self, theirs: Any) -> None:
        super().__init__(theirs.group, None, None, theirs.conv1d_kernel_size)
        self.cuts_rows_evenly = False
        offsets = theirs.cu_seqlens if theirs.cu_seqlens_cpu is None else theirs.cu_seqlens_cpu
        self._local, self._fields = tuple(offsets.tolist()), _fields_of(theirs)
        self._shared = (theirs.pre_num_ranks, theirs.post_num_ranks)
        self._theirs = theirs.cu_seqlens

    def _make_cut(self, T: int, device: torch.device) -> Cut:
        tokens = self._local[-1]
        if tokens != T:
            raise ValueError(
                f"cp_context: expected {tokens} tokens on each rank, as FLA's context says, got {T}"
            )
        lengths, theirs = (tokens,) * self.size, self._theirs.to(device)
        return Cut(self.rank, lengths, 0, self._local, *self._shared, theirs)


def from_fla(theirs: Any) -> CPContext:
    """The `CPContext` of an `FLACPContext`.

    Raises:
        ValueError: for a context without a group or with the zigzag layout; in a graph, for a
            context that was not used in eager mode before.
    """
    if theirs.group is None:
        raise ValueError("cp_context: expected FLA's context to have a group, got None")
    check_layout("cp_context", theirs.layout)
    made = getattr(theirs.cu_seqlens, _KEPT, None)
    if made is None or made._fields != _fields_of(theirs):
        refuse_in_graph(
            "cp_context: expected FLA's context to be known from a call in eager mode before a "
            "graph is made with it, got a new one; gla_ext.distributed.build_cp_context's need none"
        )
        made = _FromFLA(theirs)
        setattr(theirs.cu_seqlens, _KEPT, made)
    return made


def _fields_of(theirs: Any) -> tuple[Any, ...]:
    """The fields that determine the cuts, besides the offsets."""
    return (theirs.group.group_name, theirs.pre_num_ranks, theirs.post_num_ranks)
