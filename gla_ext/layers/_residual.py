"""A block's residual stream, whose sums are made in the norms that follow them."""

from __future__ import annotations

from torch import Tensor, nn

from gla_ext.layers._projections import nobody_sees
from gla_ext.layers.norms import RMSNorm


def add_and_norm(
    norm: nn.Module, x: Tensor, residual: Tensor | None, fuse: bool
) -> tuple[Tensor, Tensor]:
    """The norm of residual + x, or without a residual of x, and what it is the norm of.

    One operator with `fuse`, and where the norm is gla_ext's and no hook wants to see its call.
    """
    if residual is None:
        return norm(x), x
    if fuse and type(norm) is RMSNorm and nobody_sees(norm):
        return norm(x, residual, prenorm=True)
    x = residual + x
    return norm(x), x


def is_seen_through(block: nn.Module) -> bool:
    """Whether nobody minds what a block returns: no hook sees its call, as FSDP's would."""
    return nobody_sees(block)
