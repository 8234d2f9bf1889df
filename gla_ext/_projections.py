"""Several linear maps of one input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def project(x: Tensor, linears: Sequence[nn.Module], together: bool) -> tuple[Tensor, ...]:
    """What each of the linear maps makes of x `[B, T, D]`, in their order.

    Args:
        together: one product with all weights in one, in eager mode and where the modules are as
            torch made them; the results then share one tensor's memory. It copies the weights in
            every call and again in backward, which has two products instead of two a map and their
            sums.
    """
    # A compiled graph gains nothing from it, and its partitioner would save the weights' copy; a
    # trace that is to be stored holds no Python function.
    together = together and not (torch.compiler.is_compiling() or torch.jit.is_tracing())
    if not (together and all(_is_plain(linear) for linear in linears) and _are_alike(linears)):
        return tuple(linear(x) for linear in linears)
    weights = [linear.weight for linear in linears]
    dtype = _dtype_in_products(weights[0])
    return _Projections.apply(x.to(_dtype_in_products(x)), dtype, *weights)


class _Projections(torch.autograd.Function):
    """`x @ w.T` for each of the weights, in one product; saves x and the weights, no copy.

    The weights, alike, are cast to dtype inside: their gradients come back in their own.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        y = F.linear(x, _joined(weights, dtype))
        return y.split([w.shape[0] for w in weights], dim=-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, dtype, *weights = inputs
        needs_dx, _, *needs_dw = ctx.needs_input_grad
        ctx.save_for_backward(x if any(needs_dw) else None, *(weights if needs_dx else ()))
        ctx.dtype, ctx.weight_dtype = dtype, weights[0].dtype

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        needs_dx, _, *needs_dw = ctx.needs_input_grad
        dy = torch.cat(gradients, -1) if needs_dx or all(needs_dw) else None
        dx = dy @ _joined(weights, ctx.dtype) if needs_dx else None
        if not any(needs_dw):
            return dx, None, *(None for _ in needs_dw)
        needed = [g for g, needs in zip(gradients, needs_dw, strict=True) if needs]
        if len(needed) < len(gradients):
            dy = torch.cat(needed, -1)
        dw = (dy.flatten(0, -2).T @ x.flatten(0, -2)).split([g.shape[-1] for g in needed])
        # Copied: of views of one storage, none could be freed or saved without the others.
        copies = (part.to(ctx.weight_dtype, copy=True) for part in dw)
        return dx, None, *(next(copies) if needs else None for needs in needs_dw)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        raise NotImplementedError(
            "GatedLinearAttention: forward-mode AD is not supported, use reverse mode (backward)"
        )


def _joined(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([w.to(dtype) for w in weights])


def _dtype_in_products(t: Tensor) -> torch.dtype:
    """What autocast, where it is on, makes of a tensor that a product takes."""
    device = t.device.type
    on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on and t.dtype != torch.float64 else t.dtype


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
