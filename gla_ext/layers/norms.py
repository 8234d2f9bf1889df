"""Root mean square norms, with and without an output gate."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gla_ext.layers._options import typed_options
from gla_ext.ops.rms_norm import (
    norm_gate_linear,
    plain_rms_norm,
    rms_norm,
    rms_norm_residual,
)

__all__ = ["GatedRMSNorm", "RMSNorm", "plain_rms_norm", "rms_norm", "rms_norm_residual"]


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension, `rms_norm` as a module.

    Under `torch.compile` it runs plain torch operations, which inductor fuses with their
    neighbours.

    Args:
        hidden_size: size of the last dimension.
        elementwise_affine: whether there is a `weight`. Default: True.
        eps: added to the mean square. Default: 1e-5.
        dtype: dtype of the weight. Default: torch's default dtype.

    forward takes x `[..., hidden_size]` and optionally a residual of that shape, to which x is
    added first (`rms_norm_residual`). With prenorm it also returns the input of the norm: x or the
    sum.
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
        # Stored as text. With dynamic=True, torch.compile makes a float attribute a symbol, finds
        # that operators do not accept symbols, and traces everything again.
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

    Args: the arguments of `RMSNorm`, and
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

    def _into_linear(self, x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        """`F.linear` of the norm's output with its heads flattened; backward computes it again."""
        return norm_gate_linear(x, gate, weight, self.weight, self.activation, self.eps)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation}"
