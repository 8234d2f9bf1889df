"""Several linear maps of one input."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gla_ext.layers.norms import GatedRMSNorm, RMSNorm

# Device types that autocast may cast for.
_CASTS = {"cpu", "cuda", "xpu", "hpu", "mps", "mtia", "maia", "xla", "privateuseone"}
_CASTS = frozenset(filter(torch.amp.is_autocast_available, _CASTS))


def lay_side_by_side(linears: Sequence[nn.Module]) -> None:
    """Puts the weights next to each other in one block of memory, if the modules are unmodified
    nn.Linear modules and the weights are not there yet.
    The parameters stay the same objects with the same values.
    """
    weights = alike_weights(linears)
    if weights is None or not all(map(_is_in_memory, weights)) or one_matrix(weights) is not None:
        return
    inference = {w.is_inference() for w in weights}
    if len({w.data_ptr() for w in weights}) < len(weights) or len(inference) > 1:
        return
    # A parameter and its data must both be inference tensors or both not, to be viewed and trained.
    with torch.inference_mode(*inference), torch.no_grad():
        parts = torch.cat([w.detach() for w in weights]).split([w.shape[0] for w in weights])
        for weight, part in zip(weights, parts, strict=True):
            weight.data = part


def one_matrix(weights: Sequence[Tensor]) -> Tensor | None:
    """A view of the weights as one matrix if they are adjacent in memory, else None."""
    if not all(map(is_a_part, weights)):
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


def is_a_part(weight: Tensor) -> bool:
    """Whether a weight's storage is larger than the weight."""
    return _is_in_memory(weight) and weight.untyped_storage().nbytes() > weight.nbytes


def _is_in_memory(weight: Tensor) -> bool:
    """False for sparse weights, meta weights, and weights inside a transform of torch.func."""
    plain = type(weight) in (nn.Parameter, Tensor) and not weight.is_meta
    return plain and torch._C._has_storage(weight)


def split_heads(x: Tensor, width: int) -> Tensor:
    """`[B, T, heads * width]` to `[B, T, heads, width]`; the number of heads follows from x."""
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
    """The dtype in which a matrix product reads the tensor: autocast's, if that is on."""
    device = t.device.type
    on = device in _CASTS and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on and t.dtype != torch.float64 else t.dtype


def is_plain(linear: nn.Module, biased: bool = False) -> bool:
    """Whether calling a module is the same as multiplying by its weight. That means: an nn.Linear
    with a plain weight (no adapter, not quantized or sharded), no bias unless `biased`, no replaced
    forward and no hooks.
    """
    return (
        type(linear) is nn.Linear
        and (linear.bias is None or (biased and type(linear.bias) in (nn.Parameter, Tensor)))
        and type(linear.weight) in (nn.Parameter, Tensor)
        and nobody_sees(linear)
    )


def is_plain_norm(norm: nn.Module, kind: type = GatedRMSNorm) -> bool:
    """Whether calling a module is the same as calling the norm operator: as `is_plain`, for
    norms.
    """
    weights = (nn.Parameter, Tensor, type(None))
    return type(norm) is kind and type(norm.weight) in weights and nobody_sees(norm)


def nobody_sees(module: nn.Module) -> bool:
    """Whether a module's call can be skipped unnoticed: it has no hooks and no replaced forward."""
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


def alike_weights(linears: Sequence[nn.Module]) -> list[Tensor] | None:
    """The weights of unmodified nn.Linear modules if their dtypes and devices agree, else None."""
    weights: list[Tensor] = []
    for linear in linears:
        if not is_plain(linear):
            return None
        weight = linear.weight
        if weights and (weight.dtype != weights[0].dtype or weight.device != weights[0].device):
            return None
        weights.append(weight)
    return weights


def add_and_norm(
    norm: nn.Module, x: Tensor, residual: Tensor | None, fuse: bool
) -> tuple[Tensor, Tensor]:
    """Returns the norm of residual + x and that sum; without a residual, the norm of x and x.

    With `fuse`, both are one operator, provided that the norm is gla_ext's and has no hooks.
    """
    if residual is None:
        return norm(x), x
    if fuse and type(norm) is RMSNorm and nobody_sees(norm):
        return norm(x, residual, prenorm=True)
    x = residual + x
    return norm(x), x
