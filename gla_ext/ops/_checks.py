"""Argument checks in Python: the types of all arguments, and for calls that run as plain torch
operations the checks of csrc/dispatch/checker.h, with the same messages.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Values of an environment variable that turn a switch off.
OFF = ("0", "false", "off", "no")
SHORT = (torch.bfloat16, torch.float16)
FLOATING = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})


def check_tensors(op: str, names: str, *values: Any) -> None:
    """Raises TypeError where a value is neither a tensor nor None.

    Args:
        op: the function that was called.
        names: the names of the values, in their order, separated by blanks.
    """
    for t in values:
        if type(t) is not Tensor and t is not None and not isinstance(t, Tensor):
            _refuse_value(op, names, values)


def check_plain_tensors(op: str, names: str, *values: Any) -> None:
    """Like `check_tensors`; also raises NotImplementedError for a DTensor."""
    for t in values:
        if type(t) is not Tensor and t is not None:
            if not isinstance(t, Tensor):
                _refuse_value(op, names, values)
            if type(t).__name__ == "DTensor":
                raise NotImplementedError(
                    f"{op}: expected plain tensors, got a DTensor; call it on to_local() tensors, "
                    "sharded over batch or heads"
                )


def _refuse_value(op: str, names: str, values: Sequence[Any]) -> None:
    for name, t in zip(names.split(), values, strict=True):
        if t is not None and not isinstance(t, Tensor):
            raise TypeError(f"{op}: expected {name} to be a tensor, got {type(t)}")


def without_last_of_one(g: Tensor | None, k: Tensor) -> Tensor | None:
    """Removes the last dimension of a gate `[B, T, HK, 1]` if K is not 1: operators take `[B, T,
    HK]`.
    """
    if g is not None and g.ndim == 4 and g.shape[-1] == 1 and k.shape[-1] != 1:
        return g.squeeze(-1)
    return g


def wide_state(state: Tensor | None, q: Tensor) -> Tensor | None:
    """Converts a bfloat16 or float16 initial state to float32, as operators require, except with
    float64 q, where they raise an error.
    """
    if state is not None and state.dtype in SHORT and q.dtype != torch.float64:
        return state.float()
    return state


def check_scale(op: str, scale: Any) -> None:
    """Raises TypeError if scale is neither a number nor None. A tensor would have to be read back
    and would get no gradient.
    """
    if scale is None or type(scale) is float:
        return
    if isinstance(scale, Tensor):
        raise TypeError(
            f"{op}: expected scale to be a number, got a tensor; multiply q by it instead"
        )
    if not isinstance(scale, (int, numbers.Real, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"{op}: expected scale to be a number, got {type(scale)}")


def check_device(op: str, name: str, t: Tensor, first_name: str, first: Tensor) -> None:
    if t.device != first.device:
        raise ValueError(
            f"{op}: expected {name} on the device of {first_name}, {first.device}, got {t.device}"
        )


def check_floating(op: str, name: str, t: Tensor) -> None:
    if t.dtype not in FLOATING:
        raise TypeError(
            f"{op}: expected {name} to be torch.bfloat16, torch.float16, torch.float32 or "
            f"torch.float64, got {t.dtype}"
        )


def check_dtype_like(op: str, name: str, t: Tensor, first_name: str, first: Tensor) -> None:
    if t.dtype != first.dtype:
        raise TypeError(
            f"{op}: expected {name} to be {first.dtype} like {first_name}, got {t.dtype}"
        )


def check_rank(op: str, name: str, t: Tensor, rank: int, dims: str) -> None:
    if t.ndim != rank:
        dimensions = "dimension" if rank == 1 else "dimensions"
        raise ValueError(
            f"{op}: expected {name} to have {rank} {dimensions} {dims}, got {t.ndim} with shape "
            f"{list(t.shape)}"
        )


def check_at_least_a_vector(op: str, name: str, t: Tensor, dims: str) -> None:
    if t.ndim < 1:
        raise ValueError(f"{op}: expected {name} to have at least 1 dimension {dims}, got 0")


def check_shape(op: str, name: str, t: Tensor, dims: str, expected: Sequence[int]) -> None:
    check_rank(op, name, t, len(expected), dims)
    if list(t.shape) != list(expected):
        raise ValueError(
            f"{op}: expected {name} to have shape {dims} = {list(expected)}, got {list(t.shape)}"
        )
