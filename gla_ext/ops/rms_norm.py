"""Root mean square norms: with an output gate, with a residual, and before a linear map."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gla_ext.ops._activations import ACTIVATIONS
from gla_ext.ops._checks import (
    FLOATING,
    check_at_least_a_vector,
    check_device,
    check_dtype_like,
    check_floating,
    check_shape,
    check_tensors,
)
from gla_ext.ops._door import form_on
from gla_ext.ops._flops import product
from gla_ext.ops._operator import declare
from gla_ext.ops._sharding import each_but_last
from gla_ext.ops._vmap import as_one_batch, slice_by_slice


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-5,
    gate: Tensor | None = None,
    activation: str = "swish",
) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight * activation(gate)` over the last dimension.

    Computed in fp32 (fp64 for fp64 inputs) and rounded once. Forward is one kernel; backward is one
    kernel and a last sum for the weight's gradient. Zhang and Sennrich, 2019 (arXiv:1910.07467).

    Args:
        x: `[..., V]`; bfloat16, float16, float32 or float64; any strides.
        weight: `[V]`, bfloat16, float16, float32 or float64. Default: None (1).
        eps: added to the mean square. Default: 1e-5.
        gate: `[..., V]`, of any of these dtypes and any strides. Default: None (no gate).
        activation: activation of the gate, one of `gla_ext.layers.activations.ACTIVATIONS`.
            Default: 'swish'.

    Returns:
        `[..., V]` in x's dtype, contiguous.

    Raises:
        TypeError: for other dtypes.
        ValueError: for shapes or devices that do not fit, or another activation.
        NotImplementedError: in double backward, forward-mode AD and torch.func transforms but vmap.

    Under `torch.compile(fullgraph=True)` torch raises its own error, which quotes these.
    """
    check_tensors("rms_norm", "x weight gate", x, weight, gate)
    # A gate of another dtype than x: both are promoted. The operator rejects dtypes that are not
    # floating.
    if gate is not None and gate.dtype != x.dtype and {gate.dtype, x.dtype} <= FLOATING:
        wide = torch.promote_types(x.dtype, gate.dtype)
        return rms_norm(x.to(wide), weight, eps, gate.to(wide), activation).to(x.dtype)
    # inductor fuses a norm without a gate with neighbouring sums and products. A norm with a gate
    # is between the recurrence and a projection, and the operator's backward reads everything once.
    compiled = _checked if gate is None else None
    form = form_on(_fwd, _checked, x, compiled=compiled, has_rules=True)
    return form(x, weight, gate, activation, eps)[0]


def rms_norm_residual(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Adds x to a residual and applies `rms_norm` to the sum: `stream = residual + x`.

    Forward is one kernel, which reads and writes the sum once. Backward is one kernel, which also
    adds the gradient of the sum, and a last sum for the weight's gradient. Autograd saves the sum
    and one number per row.

    Args:
        x: `[..., V]`; bfloat16, float16, float32 or float64; any strides.
        residual: `[..., V]`, of x's dtype or a wider one, such as float32 with the bfloat16 of
            autocast. A narrower one is cast to x's dtype.
        weight, eps: as in `rms_norm`.

    Returns:
        The norm of the sum in x's dtype, and the sum, rounded as `residual + x` rounds it.

    Raises the errors of `rms_norm`.
    """
    check_tensors("rms_norm_residual", "x residual weight", x, residual, weight)
    wide = x.dtype
    if residual.dtype != x.dtype and {residual.dtype, x.dtype} <= FLOATING:
        wide = torch.promote_types(x.dtype, residual.dtype)
        residual = residual.to(wide)
    form = _apart  # for dtypes without a kernel
    if wide in (x.dtype, torch.float32):
        form = form_on(_residual_fwd, _apart, x, residual, compiled=_apart, has_rules=True)
    y, stream, *_ = form(x, residual, weight, eps)
    return y, stream


def _apart(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """The sum and its norm, by separate operators."""
    stream = residual + x
    return rms_norm(stream, weight, eps).to(x.dtype), stream


def _checked(
    x: Tensor, weight: Tensor | None, gate: Tensor | None, activation: str, eps: float
) -> tuple[Tensor]:
    """The norm in plain torch operations, where these are faster or the only option. Raises the
    same errors as the operator, see csrc/rms_norm/op.cpp.
    """
    op = "rms_norm_gate"
    if gate is not None:
        check_device(op, "gate", gate, "x", x)
    if weight is not None:
        check_device(op, "weight", weight, "x", x)
    check_floating(op, "x", x)
    if gate is not None:
        check_dtype_like(op, "gate", gate, "x", x)
    if weight is not None:
        check_floating(op, "weight", weight)
    check_at_least_a_vector(op, "x", x, "[..., V]")
    V = x.shape[-1]
    if V < 1:
        raise ValueError(f"{op}: expected the last dimension of x to be at least 1, got {V}")
    if gate is not None:
        check_shape(op, "gate", gate, "[..., V]", x.shape)
    if weight is not None:
        check_shape(op, "weight", weight, "[V]", [V])
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"{op}: expected activation to be one of {', '.join(ACTIVATIONS)}, got {activation!r}"
        )
    return (plain_rms_norm(x, weight, eps, gate, activation),)


def plain_rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-5,
    gate: Tensor | None = None,
    activation: str = "swish",
) -> Tensor:
    """`rms_norm` in plain torch operations, with the same arguments and result."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    # No matrix product, which autocast would run in a narrower dtype.
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight
    if gate is not None:
        y = y * ACTIVATIONS[activation](gate.to(y.dtype))
    return y.to(x.dtype)


def _plain(
    x: Tensor, weight: Tensor | None, gate: Tensor | None, activation: str, eps: float
) -> tuple[Tensor, Tensor]:
    y = plain_rms_norm(x, weight, eps, gate, activation)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return y, torch.rsqrt(wide.square().mean(-1) + eps)


def _plain_residual(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    stream = residual + x
    y, rstd = _plain(stream, weight, None, "swish", eps)
    return y.to(x.dtype), stream, rstd


def _norm_linear(norm: Callable[..., Any], o: Tensor, gate: Tensor, *args: Any) -> Tensor:
    weight, norm_weight, activation, eps = args
    y = norm(o, norm_weight, gate.unflatten(-1, o.shape[-2:]), activation, eps)[0]
    return F.linear(y.flatten(-2), weight)


_fwd = declare(
    "rms_norm_gate_fwd",
    plain=_plain,
    vmap=as_one_batch((0, 2), lambda *_: (True, True), joins=False),  # x and gate
    shards=each_but_last("x gate y rstd"),
)
declare(
    "rms_norm_gate_bwd",
    vmap=slice_by_slice,
    shards=each_but_last("dy x gate rstd dx dgate y", "dweight"),
)
_residual_fwd = declare(
    "rms_norm_residual_fwd",
    plain=_plain_residual,
    vmap=as_one_batch((0, 1), lambda *_: (True, True, True), joins=False),  # x and residual
    shards=each_but_last("x residual y stream rstd"),
)
declare(
    "rms_norm_residual_bwd",
    vmap=slice_by_slice,
    shards=each_but_last("dy dstream stream rstd dx dresidual", "dweight"),
)
norm_gate_linear = declare(
    "norm_gate_linear",
    plain=partial(_norm_linear, _checked),
    flops=product(0, 2),  # only counted in inference mode, as in swiglu_linear
    vmap=slice_by_slice,
    made_of=partial(_norm_linear, _fwd),
)
