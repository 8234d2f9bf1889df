"""Several linear maps of one input."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gla_ext.layers.norms import GatedRMSNorm
from gla_ext.ops._door import has_tangent, in_forward_mode, is_recorded
from gla_ext.ops.chunk import is_batch_invariant
from gla_ext.ops.joint_projection import joint_projection

# Products of more tokens fill a GPU by themselves, and what follows reads rows of their own faster.
MOST_ROWS = 256


def project(x: Tensor, linears: Sequence[nn.Module], together: bool) -> tuple[Tensor, ...]:
    """What each of the linear maps makes of x `[B, T, D]`, in their order.

    Without gradients, weights that `lay_side_by_side` has made one in memory take one product.
    Modules as torch made them are not called in eager mode where x has a gradient, which the
    products of backward then add up.

    Args:
        together: one product with all weights in one, where the modules are as torch made them;
            the results then share one tensor's memory. It copies the weights in every call, and
            in eager mode again in backward, which has two products instead of two a map and their
            sums. Not in transforms of torch.func.
    """
    if (fused := project_fused(x, linears)) is not None:
        return fused
    weights = None
    if (together or _adds_up(x)) and not torch._C._are_functorch_transforms_active():
        weights = _alike_weights(linears)
    if weights is None:
        return tuple(linear(x) for linear in linears)
    if torch.compiler.is_compiling():  # whose partitioner decides what is saved
        return F.linear(x, torch.cat(weights)).split([w.shape[0] for w in weights], dim=-1)
    dtype = dtype_in_products(weights[0])
    if x.dtype != dtype:
        x = x.to(dtype_in_products(x))
    return tuple(joint_projection(x, weights, dtype, together))


def _adds_up(x: Tensor) -> bool:
    """Whether maps apart have a gradient of x that one operator adds up: in eager mode, where
    autograd would sum what the products have written.
    """
    wanted = x.requires_grad and torch.is_grad_enabled()
    return wanted and type(x) is Tensor and not is_recorded() and not in_forward_mode()


def project_fused(x: Tensor, linears: Sequence[nn.Module]) -> tuple[Tensor, ...] | None:
    """`project` by one product, of at most MOST_ROWS and where the weights are one matrix in
    memory, else None: where a gradient may be wanted, in graphs and traces, in batch-invariant
    mode, since batches of other sizes are apart, and where autocast keeps its casts of the weights,
    as it does not of their view.
    """
    if torch.is_grad_enabled() or is_recorded():
        return None
    # By far the most frequent case, found out soon. Nothing is asked of weights of other kinds:
    # a parametrization computes its weight every time.
    if not (type(linears[0]) is nn.Linear and _is_a_part(linears[0].weight)):
        return None
    if x.shape[:-1].numel() > MOST_ROWS or is_batch_invariant():
        return None
    weight = _side_by_side(linears)
    if weight is None or any(has_tangent(linear.weight) for linear in linears):
        return None
    if torch.is_autocast_cache_enabled() and dtype_in_products(weight) != weight.dtype:
        return None
    return F.linear(x, weight).split([linear.weight.shape[0] for linear in linears], dim=-1)


def lay_side_by_side(linears: Sequence[nn.Module]) -> None:
    """Makes the weights neighbours in one piece of memory, if the modules are as torch made them
    and the weights are not yet neighbours.

    The parameters stay the same objects with the same values.
    """
    weights = _alike_weights(linears)
    if (
        weights is None
        or not all(map(_is_in_memory, weights))
        or _side_by_side(linears) is not None
    ):
        return
    inference = {w.is_inference() for w in weights}
    if len({w.data_ptr() for w in weights}) < len(weights) or len(inference) > 1:
        return
    # A parameter whose data are of the other kind could neither be viewed nor trained.
    with torch.inference_mode(*inference), torch.no_grad():
        parts = torch.cat([w.detach() for w in weights]).split([w.shape[0] for w in weights])
        for weight, part in zip(weights, parts, strict=True):
            weight.data = part


def _side_by_side(linears: Sequence[nn.Module]) -> Tensor | None:
    """The weights as the one matrix that they are in memory, or None: where they are not, and for
    modules that are not as torch made them.
    """
    weights = _alike_weights(linears)
    if weights is None or not all(map(_is_a_part, weights)):
        return None
    first = weights[0]
    rows, columns = sum(w.shape[0] for w in weights), first.shape[1]
    start, address = first.storage_offset(), first.data_ptr()
    if first.untyped_storage().nbytes() < (start + rows * columns) * first.itemsize:
        return None
    for w in weights:
        if w.data_ptr() != address or w.shape[1] != columns or not w.is_contiguous():
            return None
        address += w.nbytes
    return first.as_strided((rows, columns), (columns, 1), start)


def _is_a_part(weight: Tensor) -> bool:
    """Whether a weight's storage is larger than the weight."""
    return _is_in_memory(weight) and weight.untyped_storage().nbytes() > weight.nbytes


def _is_in_memory(weight: Tensor) -> bool:
    """Not so are sparse weights, meta ones, and those in a transform of torch.func."""
    plain = type(weight) in (nn.Parameter, Tensor) and not weight.is_meta
    return plain and torch._C._has_storage(weight)


def split_heads(x: Tensor, width: int) -> Tensor:
    """`[B, T, heads * width]` to `[B, T, heads, width]`, of as many heads as arrive."""
    try:
        return x.unflatten(-1, (-1, width))
    except RuntimeError as error:
        if x.shape[-1] % width == 0:
            raise
        raise ValueError(
            f"GatedLinearAttention: expected a projection's width to be a multiple of the head's, "
            f"{width}, got {x.shape[-1]}: shards hold whole heads"
        ) from error


def dtype_in_products(t: Tensor) -> torch.dtype:
    """What autocast, where it is on, makes of a tensor that a product takes."""
    device = t.device.type
    # Dynamo traces the second question alone, which knows no meta device.
    there = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device)
    on = device != "meta" and there and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on and t.dtype != torch.float64 else t.dtype


def is_plain(linear: nn.Module, biased: bool = False) -> bool:
    """Whether a module is nothing but a product with its weight: no adapter, quantized or sharded
    weight has taken its place, no bias unless `biased`, no forward of its own, and no hook wants to
    see its call.
    """
    return (
        type(linear) is nn.Linear
        and (linear.bias is None or (biased and type(linear.bias) in (nn.Parameter, Tensor)))
        and type(linear.weight) in (nn.Parameter, Tensor)
        and nobody_sees(linear)
    )


def is_plain_norm(norm: nn.Module) -> bool:
    """Whether a module is nothing but the norm with its gate, as `is_plain` of a linear map."""
    return (
        type(norm) is GatedRMSNorm
        and type(norm.weight) in (nn.Parameter, Tensor, type(None))
        and nobody_sees(norm)
    )


def nobody_sees(module: nn.Module) -> bool:
    """Whether it makes no difference that a module is not called, but what it consists of."""
    every = torch.nn.modules.module
    return (
        "forward" not in vars(module)
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and not module._backward_hooks
        and not module._backward_pre_hooks
        and not every._global_forward_hooks
        and not every._global_forward_pre_hooks
        and not every._global_backward_hooks
        and not every._global_backward_pre_hooks
    )


def _alike_weights(linears: Sequence[nn.Module]) -> list[Tensor] | None:
    """The weights of modules as torch made them, if these can be put together as they are."""
    weights: list[Tensor] = []
    for linear in linears:
        if not is_plain(linear):
            return None
        weight = linear.weight
        if weights and (weight.dtype != weights[0].dtype or weight.device != weights[0].device):
            return None
        weights.append(weight)
    return weights
