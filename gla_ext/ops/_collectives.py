"""Collectives, with gradients, of a process group given by name, in eager mode and in graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_functional = torch.ops._c10d_functional  # a torch build without distributed lacks its operators


def _reduced(x: Tensor, by: str, group_name: str) -> Tensor:
    found = _functional.all_reduce.default(x.detach().contiguous(), by, group_name)
    return _functional.wait_tensor.default(found)


def all_sum(x: Tensor, group_name: str) -> Tensor:
    """The sum over ranks, on every rank; no gradient passes."""
    return _reduced(x, "sum", group_name)


def all_max(x: Tensor, group_name: str) -> Tensor:
    """The maximum over ranks, on every rank; no gradient passes."""
    return _reduced(x, "max", group_name)


def all_gather(x: Tensor, size: int, group_name: str) -> Tensor:
    """Every rank's x, `[size, *x.shape]`; no gradient passes."""
    row = x.detach().contiguous().unsqueeze(0)
    rows = _functional.all_gather_into_tensor.default(row, size, group_name)
    return _functional.wait_tensor.default(rows).view(size, *x.shape)


def first_row(rows: int, size: int, rank: int) -> int:
    """First row of a rank's part of `rows` rows, which are split as by `torch.chunk`."""
    return min(rows, -(-rows // size) * rank)


class _SumOfGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group_name: str) -> Tensor:
        ctx.group_name = group_name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_sum(gradient, ctx.group_name), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, group_name: str) -> Tensor:
        ctx.size = size
        return all_sum(x, group_name)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient if ctx.size == 1 else gradient * ctx.size, None, None


def sum_gradients(x: Tensor, group_name: str) -> Tensor:
    """x, which is the same on every rank; its gradient is the sum of the ranks' gradients."""
    return _SumOfGradients.apply(x, group_name)


def sum_over_ranks(x: Tensor, group_name: str) -> Tensor:
    """The sum of the ranks' x. The gradient of the sum must be the same on every rank."""
    return _Sum.apply(x, 1, group_name)


def sum_of_averaged(x: Tensor, size: int, group_name: str) -> Tensor:
    """The sum of the ranks' x. Its gradient is multiplied by size, to undo a later average of
    gradients over the ranks (DDP, FSDP2).
    """
    return _Sum.apply(x, size, group_name)
