"""The operators under `torch.vmap` and batched gradients.

Importing it registers a rule for every operator: those of forward become one call of a larger
batch, and what has no batch (weights and offsets of every slice, backward) a call for each slice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gla_ext import _C  # noqa: F401  loading it registers torch.ops.gla_ext

_ops = torch.ops.gla_ext
_Result = tuple[Tensor | tuple[Tensor, ...], int | tuple[int | None, ...] | None]
_Dims = tuple[int | None, ...]


def _slice_by_slice(op: Callable[..., Any], info: Any, in_dims: _Dims, *args: Any) -> _Result:
    """A call for each slice, and the results stacked."""
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


def _as_one_batch(
    op: Callable[..., Any],
    batched: Sequence[int],
    has_batch: Callable[..., Sequence[bool]],
    joins: bool,
    info: Any,
    in_dims: _Dims,
    *args: Any,
) -> _Result:
    """One call for all slices, where all that is mapped has a batch.

    Args:
        batched: positions of the arguments whose first dimension is the batch.
        has_batch: from the arguments, which results have the batch first; none where one call
            cannot serve.
        joins: the mapped dimension is joined with the batch; else it comes before what is there.
    """
    outputs = has_batch(*args)
    mapped = {i for i, dim in enumerate(in_dims) if dim is not None}
    given = [i for i in batched if args[i] is not None]
    # The operator has a sentence for a tensor without dimensions.
    has_dimensions = all(args[i].ndim > (i in mapped) for i in given)
    if not (outputs and mapped <= set(given) and has_dimensions):
        return _slice_by_slice(op, info, in_dims, *args)
    N, wide = info.batch_size, list(args)
    for i in given:
        x, dim = args[i], in_dims[i]
        x = x.expand(N, *x.shape) if dim is None else x.movedim(dim, 0)
        B = x.shape[1]  # which the operator finds to be everyone's
        wide[i] = x.flatten(0, 1) if joins else x
    results = op(*wide)
    if joins:
        results = tuple(
            y.unflatten(0, (N, B)) if is_batched else y
            for y, is_batched in zip(results, outputs, strict=True)
        )
    return tuple(results), tuple(0 if is_batched else None for is_batched in outputs)


def _chunk_gla_outputs(*args: Any) -> Sequence[bool]:
    """o, final_state and kept; the last, bytes of a plan, is empty unless asked for."""
    cu_seqlens, output_final_state = args[6], args[8]
    if cu_seqlens is not None or any(for_backward_bytes > 0 for for_backward_bytes in args[11:]):
        return ()
    return True, output_final_state, False


def _recurrent_gla_outputs(*args: Any) -> Sequence[bool]:
    """o and final_state."""
    return () if args[6] is not None else (True, args[8])


def _short_convolution_outputs(*args: Any) -> Sequence[bool]:
    """y and state."""
    return () if args[4] is not None else (True, args[5])


# q, k, v, gates and initial_state; x and the state of a convolution; x and gate of a norm.
_JOINED = {
    "chunk_gla_fwd": (range(6), _chunk_gla_outputs, True),
    "recurrent_gla_fwd": (range(6), _recurrent_gla_outputs, True),
    "short_convolution_fwd": ((0, 3), _short_convolution_outputs, True),
    "rms_norm_gate_fwd": ((0, 2), lambda *_: (True, True), False),
    "rms_norm_residual_fwd": ((0, 1), lambda *_: (True, True, True), False),
}
_SLICED = (
    "chunk_gla_bwd",
    "recurrent_gla_bwd",
    "recurrent_gla_verify",
    "short_convolution_bwd",
    "rms_norm_gate_bwd",
    "rms_norm_residual_bwd",
    "cross_entropy_fwd",
    "cross_entropy_bwd",
    "linear_cross_entropy_fwd",
    "gate_projection_fwd",
    "gate_projection_bwd",
    "swiglu_fwd",
    "swiglu_bwd",
    "swiglu_linear",
    "norm_gate_linear",
)

for _name, _how in _JOINED.items():
    _op = getattr(_ops, _name).default
    torch.library.register_vmap(_op, functools.partial(_as_one_batch, _op, *_how))
for _name in _SLICED:
    _op = getattr(_ops, _name).default
    torch.library.register_vmap(_op, functools.partial(_slice_by_slice, _op))
