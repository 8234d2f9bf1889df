"""Views in larger tensors, for pools and for outputs that are given."""

import torch
from torch import Tensor

OUTPUTS = ("contiguous", "tokens of more", "wider rows", "transposed", "misaligned")
POOLS = ("rows of a wider pool", "a layer of many", "misaligned")


def view_like(x: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """A view of x's shape and dtype that lies so, and the tensor that it is in, full of NaN.

    Args:
        x: an output `[B, T, ..., V]` or a pool `[P, ...]`.
        layout: one of `OUTPUTS` or `POOLS`.
    """
    P, T, *rest = x.shape
    match layout:
        case "contiguous":
            shape, view = x.shape, lambda t: t
        case "tokens of more":
            shape, view = (P, T + 3, *rest), lambda t: t[:, 1:-2]
        case "wider rows":
            shape, view = (P, T + 3, *rest[:-1], rest[-1] + 3), lambda t: t[:, 1:-2, ..., :-3]
        case "transposed":  # of [B, T, D] the batch, of [B, T, H, V] the heads
            shape, view = x.transpose(-3, -2).shape, lambda t: t.transpose(-3, -2)
        case "misaligned":
            shape, view = (x.numel() + 1,), lambda t: t[1:].view(x.shape)
        case "rows of a wider pool":
            shape, view = (2 * P, T, *rest), lambda t: t[::2]
        case "a layer of many":
            shape, view = (P, 5, T, *rest), lambda t: t[:, 2]
    whole = x.new_full(shape, torch.nan)
    return view(whole), whole


def pool_like(before: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """`view_like`, with the values of `before`."""
    pool, whole = view_like(before, layout)
    return pool.copy_(before), whole


def assert_nothing_beside(view: Tensor, whole: Tensor):
    """`view`, which has no NaN, is all that was written of the tensor that it is in."""
    assert whole.isnan().sum() == whole.numel() - view.numel()
