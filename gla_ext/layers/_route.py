"""Choices between implementations of layers and models, by the mode that a call runs in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gla_ext.layers._projections import (
    alike_weights,
    dtype_in_products,
    is_a_part,
    is_plain,
    is_plain_norm,
    one_matrix,
)
from gla_ext.ops._collectives import first_row
from gla_ext.ops._door import (
    can_be_read,
    have_no_rule,
    in_forward_mode,
    is_one,
    is_recorded,
    is_sharded,
)
from gla_ext.ops.chunk import is_batch_invariant
from gla_ext.ops.joint_projection import joint_projection

# Products of more tokens fill a GPU alone, and later kernels read contiguous rows faster.
MOST_ROWS = 256


def project(x: Tensor, linears: Sequence[nn.Module], together: bool) -> tuple[Tensor, ...]:
    """The outputs of the linear maps for x `[B, T, D]`, in their order.

    Without gradients, weights that `lay_side_by_side` has made adjacent in memory are multiplied in
    one product, for at most MOST_ROWS tokens. Exceptions: graphs and traces; batch-invariant mode,
    since larger batches use separate products; and autocast that caches its casts of weights, as it
    does not cache casts of their view. With gradients in eager mode, if x requires one, unmodified
    nn.Linear modules are not called: one operator runs their products, and its backward adds the
    gradients of x.

    Args:
        together: make one product, with the weights concatenated, if the modules are unmodified.
            The results then share one tensor's memory. The weights are copied in every call, and in
            eager mode again in backward, which then has two products instead of two per map and
            their sums. Not used inside transforms of torch.func or in forward-mode AD.
    """
    recorded, grad = is_recorded(), torch.is_grad_enabled()
    # By far the most frequent case without gradients, so it is checked first. Other kinds of
    # weights are not read: a parametrization computes its weight at every access.
    neighbours = (
        not (grad or recorded)
        and type(linears[0]) is nn.Linear
        and is_a_part(linears[0].weight)
        and x.shape[:-1].numel() <= MOST_ROWS
        and not is_batch_invariant()
    )
    adds_up = grad and x.requires_grad and type(x) is Tensor and not recorded
    weights = alike_weights(linears) if neighbours or adds_up or together else None
    apart = weights is None or torch._C._are_functorch_transforms_active()
    if apart or (not recorded and in_forward_mode()):
        return tuple(linear(x) for linear in linears)
    if recorded:  # a compiler's partitioner decides what is saved
        return F.linear(x, torch.cat(weights)).split([w.shape[0] for w in weights], dim=-1)
    dtype = dtype_in_products(weights[0])
    if neighbours and not (torch.is_autocast_cache_enabled() and dtype != weights[0].dtype):
        whole = one_matrix(weights)
        if whole is not None:
            return F.linear(x, whole).split([w.shape[0] for w in weights], dim=-1)
    if not (adds_up or together):
        return tuple(linear(x) for linear in linears)
    if x.dtype != dtype:
        x = x.to(dtype_in_products(x))
    return tuple(joint_projection(x, weights, dtype, together))


def recurs(layer: Any, T: int, history: Any) -> bool:
    """Whether a `GatedLinearAttention` processes its tokens one by one instead of in chunks."""
    if history.cp_context is not None:
        return False
    if layer.mode == "fused_recurrent":
        return True
    # Padded and packed rows use chunk_gla. In batch-invariant mode all do, to get the same bits.
    if history.state is None or history.cu_seqlens is not None or layer.training:
        return False
    return _decodes(T)


def _decodes(T: int) -> bool:
    # Under activation checkpointing, the recomputation has grad mode on, unlike the first forward.
    return not (is_batch_invariant() or torch.is_grad_enabled()) and is_one(T)


def way_of_step(
    T: int, mask: Tensor | None = None, cu_seqlens: Tensor | None = None, cp_context: Any = None
) -> bool | None:
    """Whether the kernels of `gla_ext.model.step` can process the tokens. None: they cannot. True
    or False: they can, and the kernel that reads states may, or may not, begin early. It may not in
    a graph, which may copy the states just before.
    """
    if not _decodes(T) or mask is not None or cu_seqlens is not None or cp_context is not None:
        return None
    return None if have_no_rule() else not is_recorded()


def makes_input_again(layer: Any, o: Tensor, gate: Tensor) -> bool:
    """Whether backward of a `GatedLinearAttention` computes o_proj's input again, together with the
    gradients of the norm, so that autograd saves one tensor less. This is done in training if the
    modules are as the constructor made them.
    """
    if not (layer.training and layer.fuse_norm_and_gate):
        return False
    norm, linear = layer.norm, layer.o_proj
    if not (is_plain(linear) and is_plain_norm(norm)):
        return False
    if linear.weight.layout != torch.strided:
        return False
    dtype = dtype_in_products(linear.weight)
    if not (type(o) is type(gate) is Tensor and o.dtype == gate.dtype == dtype):
        return False
    if o.is_cuda and dtype == torch.float64:  # the norm has no kernels for these
        return False
    weights = [linear.weight] if norm.weight is None else [linear.weight, norm.weight]
    return not have_no_rule(o, gate, *weights)


def pieces(n: int, size: int) -> list[slice] | None:
    """Slices of `size` that cover n, or None in a graph, which cannot loop over them."""
    if is_recorded():
        return None
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def with_own_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, bool]:
    """k and v `[.., HK, D]`, and whether q's heads `[.., H, D]` share them. Under torch.jit.trace k
    and v are repeated for every head, because the legacy ONNX exporter has no shared heads.
    """
    shared = bool(q.shape[-2] != k.shape[-2])  # torch.jit.trace makes tensors of sizes
    if not (shared and torch.jit.is_tracing()):
        return k, v, shared
    groups = int(q.shape[-2]) // int(k.shape[-2])
    return k.repeat_interleave(groups, -2), v.repeat_interleave(groups, -2), False


def read(t: Tensor, waits: bool = False) -> list[int] | None:
    """A tensor's values as a list, or None if they cannot be read now. A tensor that is not on the
    CPU is read only if `waits`.
    """
    return t.tolist() if (waits or t.device.type == "cpu") and can_be_read(t) else None


def check_mask(mask: Tensor, fits: Callable[[Tensor], Tensor], sentence: str) -> None:
    """Raises ValueError if a value of the mask does not fit; the value replaces `{}` in the
    sentence. Only checks a mask on a CPU whose values can be read.
    """
    if mask.device.type == "cpu" and can_be_read(mask):
        odd = mask[~fits(mask)]
        if odd.numel():
            raise ValueError(sentence.format(odd[0].item()))


def are_one(a: Tensor, b: Any, promised: bool) -> bool:
    """Whether b is the tensor a. If that cannot be seen, the caller's promise decides."""
    if b is a:
        return True
    if torch.compiler.is_compiling():  # an address would break a graph
        return promised
    if b is None or b.shape != a.shape:
        return False
    return promised or _same_memory(a, b)


def _same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape are views of the same numbers, with gradients or without."""
    if a.dtype != b.dtype or a.layout != torch.strided or b.layout != torch.strided:
        return False
    # If one of them is detached, the caller wants no gradient through it.
    if torch.is_grad_enabled() and a.requires_grad != b.requires_grad:
        return False
    if not (torch._C._has_storage(a) and torch._C._has_storage(b)):  # in a transform of torch.func
        return False
    return (
        a.untyped_storage()._cdata == b.untyped_storage()._cdata
        and a.storage_offset() == b.storage_offset()
        and a.stride() == b.stride()
    )


def shard_of_vocabulary(logits: Tensor) -> tuple[Tensor, int, str] | None:
    """For logits `[..., vocab_size]` that are a DTensor sharded only by the last dimension: this
    rank's columns, the index of the first one, and the group's name. For other logits: None.
    """
    if not is_sharded(logits) or len(logits.placements) > 1:
        return None
    if not logits.placements[0].is_shard(logits.ndim - 1):
        return None
    mesh = logits.device_mesh
    start = first_row(logits.shape[-1], mesh.size(), mesh.get_local_rank())
    return logits.to_local(), start, mesh.get_group().group_name
