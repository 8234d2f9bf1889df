"""FLA's context of context parallelism, with its own cuts."""

from __future__ import annotations

from typing import Any

import torch

from gla_ext.distributed._cuts import Cut, Part, places_of
from gla_ext.distributed._door import refuse_in_graph
from gla_ext.distributed.context import CPContext

# On the offsets of FLA's object: FSDP2 with a policy that casts copies the object at every call.
_KEPT = "_gla_ext_context"


class _FromFLA(CPContext):
    """The cuts of an `FLACPContext`: equal parts, packed sequences."""

    def __init__(self, theirs: Any) -> None:
        super().__init__(theirs.group, None, None, theirs.layout, theirs.conv1d_kernel_size)
        self.cuts_rows_evenly = False
        if theirs.cu_seqlens_cpu is not None:
            local = tuple(theirs.cu_seqlens_cpu.tolist())
        else:
            local = tuple(theirs.cu_seqlens.tolist())
        tokens = local[-1]
        if theirs.layout == "contiguous":
            sizes, counts = (tokens,), (len(local) - 1,)
            before, after = (theirs.pre_num_ranks,), (theirs.post_num_ranks,)
        else:
            sizes = (theirs.part_len,) * 2
            counts = (theirs.front_num_seqs, len(local) - 1 - theirs.front_num_seqs)
            before, after = theirs.pre_num_ranks_by_part, theirs.post_num_ranks_by_part
        places = places_of(self.rank, self.size, theirs.layout)
        parts, first, start = [], 0, 0
        for place, length, count, *shared in zip(places, sizes, counts, before, after, strict=True):
            offsets = tuple(x - start for x in local[first : first + count + 1])
            last_tokens = offsets[-1] - offsets[-2]
            parts.append(Part(place, length, (first, first + count), offsets, *shared, last_tokens))
            first, start = first + count, start + length
        self._tokens, self._theirs, self._fields = tokens, theirs.cu_seqlens, _fields_of(theirs)
        self._parts, self._lengths = tuple(parts), (sizes[0],) * (self.size * len(sizes))

    def _make_cut(self, T: int, device: torch.device) -> Cut:
        if self._tokens != T:
            raise ValueError(
                f"cp_context: expected {self._tokens} tokens on each rank, as FLA's context says, "
                f"got {T}"
            )
        return Cut(self._parts, self._lengths, self._theirs.to(device))


def from_fla(theirs: Any) -> CPContext:
    """The `CPContext` of an `FLACPContext`.

    Raises:
        ValueError: a context without a group; in a graph, one that no call in eager mode has had.
    """
    if theirs.group is None:
        raise ValueError("cp_context: expected FLA's context to have a group, got None")
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
    """What cuts follow from, beside the offsets."""
    of_parts = (theirs.part_len, theirs.front_num_seqs)
    of_parts += (theirs.pre_num_ranks_by_part, theirs.post_num_ranks_by_part)
    whole = (theirs.pre_num_ranks, theirs.post_num_ranks)
    return (theirs.group.group_name, theirs.layout, *whole, *of_parts)
