"""SwiGLU, alone and with the linear map that follows it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gla_ext import _C  # noqa: F401  loading it registers torch.ops.gla_ext
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
from gla_ext.ops._tracing import have_no_rule, is_of_unknown_class

_fwd = torch.ops.gla_ext.swiglu_fwd.default
_linear = torch.ops.gla_ext.swiglu_linear.default


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
    if not _takes_plain(gate, up):
        return _fwd(gate, up)
    _check("swiglu", gate, up)
    return plain_swiglu(gate, up)


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

    Raises:
        TypeError: for other dtypes.
        ValueError: for shapes or devices that do not fit.
        NotImplementedError: a device or layout without kernels; double backward.
    """
    check_tensors("swiglu_linear", "gate up weight bias", gate, up, weight, bias)
    gate, up = _promoted(gate, up)
    tensors = [gate, up, weight] if bias is None else [gate, up, weight, bias]
    if _takes_plain(*tensors):
        _check_linear(gate, up, weight, bias)
        return F.linear(plain_swiglu(gate, up), weight, bias)
    # Compiled too: of the plain formula torch's partitioner keeps the product, which a product with
    # the weight's gradient reads, beside gate and up.
    return _linear(gate, up, weight, bias)


def _promoted(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    # Dtypes that are not promoted the checks refuse.
    if gate.dtype == up.dtype or not {gate.dtype, up.dtype} <= FLOATING:
        return gate, up
    wide = torch.promote_types(gate.dtype, up.dtype)
    return gate.to(wide), up.to(wide)


def _takes_plain(*tensors: Tensor) -> bool:
    """Whether plain torch operations have what the operators have not: kernels for fp64 on CUDA and
    for sparse weights, rules for subclasses but DTensor, for transforms of torch.func and for
    forward-mode AD; and ONNX.
    """
    for t in tensors:
        if (t.is_cuda and t.dtype == torch.float64) or t.layout != torch.strided:
            return True
    return have_no_rule(*tensors)


def plain_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`swiglu` as plain torch operations, rounded once, but for subclasses of tensors twice: of
    operations in fp32 autograd would keep three tensors of twice the size.
    """
    if is_of_unknown_class(gate) or is_of_unknown_class(up):
        return F.silu(gate) * up
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (F.silu(gate.to(wide)) * up.to(wide)).to(gate.dtype)


def _check(op: str, gate: Tensor, up: Tensor) -> None:
    """Raises what the operators raise; see csrc/checks/swiglu.cpp."""
    check_device(op, "up", up, "gate", gate)
    check_floating(op, "gate", gate)
    check_dtype_like(op, "up", up, "gate", gate)
    check_at_least_a_vector(op, "gate", gate, "[..., D]")
    check_shape(op, "up", up, "[..., D]", gate.shape)


def _check_linear(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None) -> None:
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
