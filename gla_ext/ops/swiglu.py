"""SwiGLU, alone and with the linear map that follows it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gla_ext.ops._checks import (
    FLOATING,
    check_at_least_a_vector,
    check_device,
    check_dtype_like,
    check_floating,
    check_rank,
    check_shape,
    check_tensors,
)
from gla_ext.ops._door import form_on
from gla_ext.ops._flops import product
from gla_ext.ops._operator import declare
from gla_ext.ops._sharding import each
from gla_ext.ops._vmap import slice_by_slice


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, element by element (Shazeer, 2020, arXiv:2002.05202).

    Computed in fp32 (fp64 for fp64 inputs) and rounded once, in one kernel forward and one
    backward; autograd keeps gate and up alone. Subclasses of tensors but DTensor take torch's
    operations, which round twice and keep the activated gate too.

    Args:
        gate: `[..., D]`; bfloat16, float16, float32 or float64. Rows of a wider tensor, as halves
            of one product are, are read where they lie.
        up: `[..., D]`, likewise.

    Returns:
        `[..., D]`, contiguous, in the dtype of both, or the one that torch promotes them to.

    Raises:
        TypeError: for other dtypes.
        ValueError: for shapes or devices that do not fit.
        NotImplementedError: a device or layout without kernels; double backward.
    """
    check_tensors("swiglu", "gate up", gate, up)
    gate, up = _promoted(gate, up)
    return form_on(_fwd, _checked, gate, up)(gate, up)


def swiglu_linear(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear(swiglu(gate, up), weight, bias)`, for which autograd keeps gate, up and weight alone.

    What the weight's gradient needs of the product is made again in backward, in the kernel of the
    gradients of gate and up. Under autocast all are cast to its dtype.

    Args:
        gate: `[..., D]`; bfloat16, float16, float32 or float64, strides as `swiglu`'s.
        up: `[..., D]`, likewise.
        weight: `[N, D]`, of the dtype of gate and up.
        bias: `[N]`, of that dtype. Default: None (0).

    Returns:
        `[..., N]` in that dtype.

    What is raised is as in `swiglu`.
    """
    check_tensors("swiglu_linear", "gate up weight bias", gate, up, weight, bias)
    gate, up = _promoted(gate, up)
    tensors = [gate, up, weight] if bias is None else [gate, up, weight, bias]
    # Compiled too: of the plain formula torch's partitioner keeps the product, which a product with
    # the weight's gradient reads, beside gate and up.
    return form_on(_linear, _checked_linear, *tensors)(gate, up, weight, bias)


def _promoted(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    # Dtypes that are not promoted the checks refuse.
    if gate.dtype == up.dtype or not {gate.dtype, up.dtype} <= FLOATING:
        return gate, up
    wide = torch.promote_types(gate.dtype, up.dtype)
    return gate.to(wide), up.to(wide)


def plain_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`swiglu` as plain torch operations, rounded once, but for subclasses of tensors twice: of
    operations in fp32 autograd would keep three tensors of twice the size.
    """
    form = form_on(_rounded_once, _rounded_once, gate, up, of_subclasses=_rounded_twice)
    return form(gate, up)


def _rounded_once(gate: Tensor, up: Tensor) -> Tensor:
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (F.silu(gate.to(wide)) * up.to(wide)).to(gate.dtype)


def _rounded_twice(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _plain_linear(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(plain_swiglu(gate, up), weight, bias)


def _checked(gate: Tensor, up: Tensor) -> Tensor:
    _check("swiglu", gate, up)
    return plain_swiglu(gate, up)


def _check(op: str, gate: Tensor, up: Tensor) -> None:
    """Raises what the operators raise; see csrc/swiglu/op.cpp."""
    check_device(op, "up", up, "gate", gate)
    check_floating(op, "gate", gate)
    check_dtype_like(op, "up", up, "gate", gate)
    check_at_least_a_vector(op, "gate", gate, "[..., D]")
    check_shape(op, "up", up, "[..., D]", gate.shape)


def _checked_linear(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    op = "swiglu_linear"
    parameters = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    _check(op, gate, up)
    kind = gate.device.type
    casts = kind != "meta" and torch.is_autocast_enabled(kind)  # which knows no meta device
    for name, t in parameters.items():
        check_device(op, name, t, "gate", gate)
        if not casts:
            check_dtype_like(op, name, t, "gate", gate)
    check_rank(op, "weight", weight, 2, "[N, D]")
    check_shape(op, "weight", weight, "[N, D]", [weight.shape[0], gate.shape[-1]])
    if bias is not None:
        check_shape(op, "bias", bias, "[N]", weight.shape[:1])
    return _plain_linear(gate, up, weight, bias)


_fwd = declare("swiglu_fwd", plain=plain_swiglu, vmap=slice_by_slice, shards=each("gate up result"))
declare("swiglu_bwd", vmap=slice_by_slice, shards=each("dy gate up dgate dup y"))
_linear = declare(
    "swiglu_linear",
    plain=_plain_linear,
    flops=product(0, 2),  # seen in inference mode alone; else the product is torch's own
    vmap=slice_by_slice,
    made_of=lambda gate, up, weight, bias: F.linear(_fwd(gate, up), weight, bias),
)
