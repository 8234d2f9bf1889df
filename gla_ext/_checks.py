"""The checks of csrc/checker.h, with its sentences, for calls that plain torch operations serve."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FLOATING = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})


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
