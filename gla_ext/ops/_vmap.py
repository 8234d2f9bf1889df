"""Rules for `torch.vmap` and batched gradients. Forward operators become one call of a larger
batch. Calls in which a mapped argument has no batch (weights or offsets for every slice, backward)
become one call per slice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_Result = tuple[Tensor | tuple[Tensor, ...], int | tuple[int | None, ...] | None]
_Dims = tuple[int | None, ...]


def slice_by_slice(op: Callable[..., Any], info: Any, in_dims: _Dims, *args: Any) -> _Result:
    """One call per slice; the results are stacked."""
    if info.batch_size == 0:
        raise ValueError(f"{op.name()}: expected torch.vmap over at least 1 slice, got 0")
    results = [
        op(*(x if dim is None else x.select(dim, i) for x, dim in zip(args, in_dims, strict=True)))
        for i in range(info.batch_size)
    ]
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


def as_one_batch(
    batched: Sequence[int], has_batch: Callable[..., Sequence[bool]], joins: bool = True
) -> Callable[..., _Result]:
    """One call for all slices, if every mapped argument has a batch.

    batched: positions of the arguments whose first dimension is the batch. The mapped dimension is
    merged into it or, without `joins`, put before it. has_batch: for given arguments, whether each
    result has the batch first; an empty sequence if one call is not possible.
    """

    def rule(op: Callable[..., Any], info: Any, in_dims: _Dims, *args: Any) -> _Result:
        outputs = has_batch(*args)
        mapped = {i for i, dim in enumerate(in_dims) if dim is not None}
        given = [i for i in batched if args[i] is not None]
        # The operator itself raises an error for a tensor without dimensions.
        has_dimensions = all(args[i].ndim > (i in mapped) for i in given)
        if not (outputs and mapped <= set(given) and has_dimensions):
            return slice_by_slice(op, info, in_dims, *args)
        N, wide = info.batch_size, list(args)
        for i in given:
            x, dim = args[i], in_dims[i]
            x = x.expand(N, *x.shape) if dim is None else x.movedim(dim, 0)
            B = x.shape[1]  # the operator checks that all are equal
            wide[i] = x.flatten(0, 1) if joins else x
        results = op(*wide)
        if joins:
            results = tuple(
                y.unflatten(0, (N, B)) if is_batched else y
                for y, is_batched in zip(results, outputs, strict=True)
            )
        return tuple(results), tuple(0 if is_batched else None for is_batched in outputs)

    return rule
