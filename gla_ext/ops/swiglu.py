"""SwiGLU, alone and with the linear map after it."""

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

    Computed in fp32 (fp64 for fp64 inputs) and rounded once, by one kernel forward and one
    backward. Autograd saves only gate and up. Tensor subclasses other than DTensor use torch's
    operations, which round twice and save the activated gate too.

    Args:
        gate: `[..., D]`; bfloat16, float16, float32 or float64. Rows of a wider tensor, such as one
            half of a product's output, are read in place.
        up: `[..., D]`, the same dtypes and strides.

    Returns:
        `[..., D]`, contiguous, in the dtype of gate and up, promoted as by torch if they differ.

    Raises:
        TypeError: for other dtypes.
        ValueError: for shapes or devices that do not fit.
        NotImplementedError: a device or layout without kernels; double backward.
    """
    check_tensors("swiglu", "gate up", gate, up)
    gate, up = _promoted(gate, up)
    return form_on(_fwd, _checked, gate, up)(gate, up)


def swiglu_linear(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear(swiglu(gate, up), weight, bias)`, for which autograd saves only gate, up and weight.

    The weight's gradient needs the output of SwiGLU. Backward computes it again, in the kernel for
    the gradients of gate and up. Under autocast all inputs are cast to autocast's dtype.

    Args:
        gate: `[..., D]`; bfloat16, float16, float32 or float64, with strides as in `swiglu`.
        up: `[..., D]`, the same.
        weight: `[N, D]`, of the dtype of gate and up.
        bias: `[N]`, of the same dtype. Default: None (0).

    Returns:
        `[..., N]` in that dtype.

    Raises the errors of `swiglu`.
    """
    check_tensors("swiglu_linear", "gate up weight bias", gate, up, weight, bias)
    gate, up = _promoted(gate, up)
    tensors = [gate, up, weight] if bias is None else [gate, up, weight, bias]
    # The operator is used when compiled too. With the plain formula, torch's partitioner would save
    # the output of SwiGLU besides gate and up, as the matrix product for the weight's gradient
    # reads it.
    return form_on(_linear, _checked_linear, *tensors)(gate, up, weight, bias)


def _promoted(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    # Other dtypes are not promoted here; the checks reject them.
    if gate.dtype == up.dtype or not {gate.dtype, up.dtype} <= FLOATING:
        return gate, up
    wide = torch.promote_types(gate.dtype, up.dtype)
    return gate.to(wide), up.to(wide)


def plain_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`swiglu` in plain torch operations, rounded once. Tensor subclasses are rounded twice,
    because for operations in fp32 autograd would save three tensors of twice the size.
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
    """Raises the same errors as the operators; see csrc/swiglu/op.cpp."""
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
    casts = kind != "meta" and torch.is_autocast_enabled(kind)  # autocast has no meta device
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
    flops=product(0, 2),  # only counted in inference mode; otherwise the product is torch's own
    vmap=slice_by_slice,
    made_of=lambda gate, up, weight, bias: F.linear(_fwd(gate, up), weight, bias),
)
