"""Several linear maps of one input."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def project(x: Tensor, linears: Sequence[nn.Module], together: bool) -> tuple[Tensor, ...]:
    """What each of the linear maps makes of x `[B, T, D]`, in their order.

    Args:
        together: one product with all weights in one, where the modules are as torch made them;
            the results are then views of one tensor. It copies the weights in every call, keeps
            the copy for x's gradient until backward, and saves one product there instead of one a
            map and their sums.
    """
    if not (together and all(_is_plain(linear) for linear in linears) and _are_alike(linears)):
        return tuple(linear(x) for linear in linears)
    weights = [linear.weight for linear in linears]
    return F.linear(x, torch.cat(weights)).split([w.shape[0] for w in weights], dim=-1)


def _is_plain(linear: nn.Module) -> bool:
    """Whether a module is nothing but a product with its weight: no adapter, quantized or sharded
    weight has taken its place, no bias, no forward of its own, and no hook wants to see its call.
    """
    every = torch.nn.modules.module
    return (
        type(linear) is nn.Linear
        and "forward" not in vars(linear)
        and linear.bias is None
        and type(linear.weight) in (nn.Parameter, Tensor)
        and not linear._forward_hooks
        and not linear._forward_pre_hooks
        and not linear._backward_hooks
        and not linear._backward_pre_hooks
        and not every._global_forward_hooks
        and not every._global_forward_pre_hooks
        and not every._global_backward_hooks
        and not every._global_backward_pre_hooks
    )


def _are_alike(linears: Sequence[nn.Linear]) -> bool:
    """Whether their weights can be put together as they are."""
    return len({(linear.weight.dtype, linear.weight.device) for linear in linears}) == 1
