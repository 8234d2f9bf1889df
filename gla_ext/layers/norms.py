"""Root mean square norms, with and without an output gate."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gla_ext import _C  # noqa: F401  loading it registers torch.ops.gla_ext
from gla_ext.layers._options import typed_options
from gla_ext.layers.activations import ACTIVATIONS
from gla_ext.layers.activations import activation as function_of
from gla_ext.ops._checks import (
    FLOATING,
    check_at_least_a_vector,
    check_device,
    check_dtype_like,
    check_floating,
    check_shape,
    check_tensors,
)
from gla_ext.ops._tracing import is_of_unknown_class, is_recorded_for_onnx

_fwd = torch.ops.gla_ext.rms_norm_gate_fwd.default
_residual_fwd = torch.ops.gla_ext.rms_norm_residual_fwd.default


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-5,
    gate: Tensor | None = None,
    activation: str = "swish",
) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight * activation(gate)` over the last dimension.

    Computed in fp32 (fp64 for fp64 inputs) and rounded once, in one kernel forward and, but for
    the last sum of the weight's gradient, one backward. Zhang and Sennrich, 2019
    (arXiv:1910.07467).

    Args:
        x: `[..., V]`; bfloat16, float16, float32 or float64; any strides.
        weight: `[V]`, of any of these dtypes. Default: None (1).
        eps: added to the mean square. Default: 1e-5.
        gate: `[..., V]`, of any of these dtypes and any strides. Default: None (no gate).
        activation: of the gate, one of `gla_ext.layers.activations.ACTIVATIONS`. Default: 'swish'.

    Returns:
        `[..., V]` in x's dtype, contiguous.

    Raises:
        TypeError: for other dtypes.
        ValueError: for shapes or devices that do not fit, or another activation.
        NotImplementedError: in double backward, forward-mode AD and torch.func transforms but vmap.

    Under `torch.compile(fullgraph=True)` torch raises an error of its own that quotes these.
    """
    check_tensors("rms_norm", "x weight gate", x, weight, gate)
    # Dtypes that are not promoted the checks refuse.
    if gate is not None and gate.dtype != x.dtype and {gate.dtype, x.dtype} <= FLOATING:
        wide = torch.promote_types(x.dtype, gate.dtype)
        return rms_norm(x.to(wide), weight, eps, gate.to(wide), activation).to(x.dtype)
    if _takes_plain(x, gate):
        _check(x, weight, gate, activation)
        return plain_rms_norm(x, weight, eps, gate, activation)
    return _fwd(x, weight, gate, activation, eps)[0]


def rms_norm_residual(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """A residual stream, to which x is added, and its `rms_norm`: `stream = residual + x`.

    One kernel forward, which reads and writes the stream once, and, but for the last sum of the
    weight's gradient, one backward, which adds the gradient of the stream inside. Autograd keeps
    the stream and one number a row.

    Args:
        x: `[..., V]`; bfloat16, float16, float32 or float64; any strides.
        residual: `[..., V]`, of x's dtype or a wider one, as a stream in float32 is beside the
            bfloat16 of autocast; of a shorter one it is cast to x's.
        weight: `[V]`, of any of these dtypes. Default: None (1).
        eps: added to the mean square. Default: 1e-5.

    Returns:
        The norm of the stream in x's dtype, and the stream, as `residual + x` rounds it.

    Raises:
        TypeError: for other dtypes.
        ValueError: for shapes or devices that do not fit.
        NotImplementedError: in double backward, forward-mode AD and torch.func transforms but vmap.
    """
    check_tensors("rms_norm_residual", "x residual weight", x, residual, weight)
    wide = x.dtype
    if residual.dtype != x.dtype and {residual.dtype, x.dtype} <= FLOATING:
        wide = torch.promote_types(x.dtype, residual.dtype)
        residual = residual.to(wide)
    if (
        wide not in (x.dtype, torch.float32)
        or _takes_plain(x, None)
        or _takes_plain(residual, None)
    ):
        stream = residual + x
        return rms_norm(stream, weight, eps).to(x.dtype), stream
    y, stream, _ = _residual_fwd(x, residual, weight, eps)
    return y, stream


def _takes_plain(x: Tensor, gate: Tensor | None) -> bool:
    """Whether plain torch operations serve better, or alone."""
    # A norm alone lies beside sums and products that inductor fuses it with. One with a gate stands
    # between the recurrence and a projection, and the operator's backward reads everything once.
    if gate is None and torch.compiler.is_compiling():
        return True
    # The operator has no fp64 kernels but on CPU, and no form in ONNX.
    if (x.is_cuda and x.dtype == torch.float64) or is_of_unknown_class(x):
        return True
    return is_recorded_for_onnx()


def _check(x: Tensor, weight: Tensor | None, gate: Tensor | None, activation: str) -> None:
    """Raises what the operator raises; see csrc/rms_norm/op.cpp."""
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


def plain_rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-5,
    gate: Tensor | None = None,
    activation: str = "swish",
) -> Tensor:
    """`rms_norm` as plain torch operations, with arguments and result of that."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    # No product that autocast would run in a shorter dtype.
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight
    if gate is not None:
        y = y * function_of(activation, "activation")(gate.to(y.dtype))
    return y.to(x.dtype)


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension, `rms_norm` as a module.

    Inside `torch.compile` it is plain torch operations, which inductor fuses with their
    neighbours.

    Args:
        hidden_size: size of the last dimension.
        elementwise_affine: whether there is a `weight`. Default: True.
        eps: added to the mean square. Default: 1e-5.
        dtype: dtype of the weight. Default: torch's default dtype.

    forward takes x `[..., hidden_size]` and perhaps a residual of that shape, which x is added to
    first (`rms_norm_residual`); with prenorm it also returns what it has normed, x or the sum.
    """

    @typed_options
    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool | None = True,
        eps: float = 1e-5,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.elementwise_affine = elementwise_affine
        self.eps = eps
        weight = nn.Parameter(torch.ones(hidden_size, dtype=dtype)) if elementwise_affine else None
        self.register_parameter("weight", weight)

    @property
    def eps(self) -> float:
        """Added to the mean square."""
        return float(self._eps)

    @eps.setter
    def eps(self, value: float) -> None:
        # As text. With dynamic=True torch.compile takes a float attribute for a symbol, finds that
        # operators cannot have it, and traces all again.
        self._eps = repr(float(value))

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def forward(
        self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        if residual is None:
            y, stream = rms_norm(x, self.weight, self.eps), x
        else:
            y, stream = rms_norm_residual(x, residual, self.weight, self.eps)
        return (y, stream) if prenorm else y

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


class GatedRMSNorm(RMSNorm):
    """RMS norm times an activated gate, `norm(x) * activation(gate)`, rounded once.

    Args: those of `RMSNorm`, and
        activation: one of `gla_ext.layers.activations.ACTIVATIONS`. Default: 'swish'.

    forward takes x and gate of one shape `[..., hidden_size]` and returns that shape in x's dtype.
    """

    @typed_options
    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool | None = True,
        eps: float = 1e-5,
        dtype: torch.dtype | None = None,
        activation: str = "swish",
    ) -> None:
        super().__init__(hidden_size, elementwise_affine, eps, dtype)
        self.activation = activation

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, gate, self.activation)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation}"
