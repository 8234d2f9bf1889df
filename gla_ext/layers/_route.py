"""Which way layers and models take: all that they ask of the mode that a call runs in."""

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

# Products of more tokens fill a GPU by themselves, and what follows reads rows of their own faster.
MOST_ROWS = 256


def project(x: Tensor, linears: Sequence[nn.Module], together: bool) -> tuple[Tensor, ...]:
    """What each of the linear maps makes of x `[B, T, D]`, in their order.

    Without gradients, weights that `lay_side_by_side` has made one in memory take one product, of
    at most MOST_ROWS tokens; not so in graphs and traces, in batch-invariant mode, since batches of
    other sizes are apart, and where autocast keeps its casts of the weights, as it does not of
    their view. Modules as torch made them are not called in eager mode where x has a gradient,
    which the products of backward then add up.

    Args:
        together: one product with all weights in one, where the modules are as torch made them;
            the results then share one tensor's memory. It copies the weights in every call, and
            in eager mode again in backward, which has two products instead of two a map and their
            sums. Not in transforms of torch.func, nor in forward-mode AD.
    """
    recorded, grad = is_recorded(), torch.is_grad_enabled()
    # By far the most frequent case without gradients, found out soon. Nothing is asked of weights
    # of other kinds: a parametrization computes its weight every time.
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
    """Whether a `GatedLinearAttention`'s tokens pass one after the other and not in chunks."""
    if history.cp_context is not None:
        return False
    if layer.mode == "fused_recurrent":
        return True
    # Padded and packed rows take chunk_gla, and so must all where each has the same bits alone.
    if history.state is None or history.cu_seqlens is not None or layer.training:
        return False
    return _decodes(T)


def _decodes(T: int) -> bool:
    # Checkpointing computes again with grad mode on what it computed with grad mode off.
    return not (is_batch_invariant() or torch.is_grad_enabled()) and is_one(T)


def way_of_step(
    T: int, mask: Tensor | None = None, cu_seqlens: Tensor | None = None, cp_context: Any = None
) -> bool | None:
    """How the kernels of `gla_ext.model.step` serve a token: None, not at all; else whether the one
    that reads states may begin early: a graph may copy them just before.
    """
    if not _decodes(T) or mask is not None or cu_seqlens is not None or cp_context is not None:
        return None
    return None if have_no_rule() else not is_recorded()


def makes_input_again(layer: Any, o: Tensor, gate: Tensor) -> bool:
    """Whether backward of a `GatedLinearAttention` makes o_proj's input again, with the gradients
    of the norm: in training, where the modules are as the constructor made them. Autograd keeps one
    tensor less then.
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
    if o.is_cuda and dtype == torch.float64:  # for which the norm has no kernels
        return False
    weights = [linear.weight] if norm.weight is None else [linear.weight, norm.weight]
    return not have_no_rule(o, gate, *weights)


def pieces(n: int, size: int) -> list[slice] | None:
    """n in parts of a size, or None in a graph, which has no loop over them."""
    if is_recorded():
        return None
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def with_own_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, bool]:
    """k and v of `[.., HK, D]`, and whether q's heads `[.., H, D]` share them. By torch.jit.trace
    each has its own: the legacy exporter knows no shared ones.
    """
    shared = bool(q.shape[-2] != k.shape[-2])  # torch.jit.trace makes tensors of sizes
    if not (shared and torch.jit.is_tracing()):
        return k, v, shared
    groups = int(q.shape[-2]) // int(k.shape[-2])
    return k.repeat_interleave(groups, -2), v.repeat_interleave(groups, -2), False


def read(t: Tensor, waits: bool = False) -> list[int] | None:
    """A tensor's numbers, where a program may look at them; of another device's than the CPU if it
    waits for them.
    """
    return t.tolist() if (waits or t.device.type == "cpu") and can_be_read(t) else None


def check_mask(mask: Tensor, fits: Callable[[Tensor], Tensor], sentence: str) -> None:
    """Raises ValueError, on a CPU and where values can be read, for a number that does not fit, in
    whose place the sentence has `{}`.
    """
    if mask.device.type == "cpu" and can_be_read(mask):
        odd = mask[~fits(mask)]
        if odd.numel():
            raise ValueError(sentence.format(odd[0].item()))


def are_one(a: Tensor, b: Any, promised: bool) -> bool:
    """Whether b is the tensor a, as far as a caller's promise that it is lets that be seen."""
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
    # One that is detached wants no gradient to pass.
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
    """Of logits `[..., vocab_size]` that are a DTensor sharded by their last dimension alone: this
    rank's columns, the number of the first and the group's name. None of others.
    """
    if not is_sharded(logits) or len(logits.placements) > 1:
        return None
    if not logits.placements[0].is_shard(logits.ndim - 1):
        return None
    mesh = logits.device_mesh
    start = first_row(logits.shape[-1], mesh.size(), mesh.get_local_rank())
    return logits.to_local(), start, mesh.get_group().group_name
