"""Root mean square norms, with and without an output gate."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension: `x / sqrt(mean(x^2) + eps) * weight`.

    Computed in fp32 (fp64 for fp64 inputs) and rounded once to the input's dtype; plain torch
    operations, so that inductor fuses it with its neighbours, but in eager eval mode without a
    gradient torch's own kernel. Zhang and Sennrich, 2019 (arXiv:1910.07467).

    Args:
        hidden_size: size of the last dimension.
        elementwise_affine: whether there is a `weight`. Default: True.
        eps: added to the mean square. Default: 1e-5.
        dtype: dtype of the weight. Default: torch's default dtype.
    """

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

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def normalize(self, x: Tensor) -> Tensor:
        """The norm of x before it is rounded: fp32, or fp64 for an fp64 input."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        if self._is_one_kernel():
            weight = None if self.weight is None else self.weight.to(x.dtype)
            return F.rms_norm(x, (self.hidden_size,), weight, self.eps)
        # No product that autocast would run in a shorter dtype.
        mean_square = x.square().mean(-1, keepdim=True)
        x = x * torch.rsqrt(mean_square + self.eps)
        return x if self.weight is None else x * self.weight

    def forward(self, x: Tensor) -> Tensor:
        fits = self.weight is None or self.weight.dtype == x.dtype
        if fits and self._is_one_kernel():
            return F.rms_norm(x, (self.hidden_size,), self.weight, self.eps)
        return self.normalize(x).to(x.dtype)

    def _is_one_kernel(self) -> bool:
        # Checkpointing computes again with grad mode on what it computed with grad mode off.
        return not (self.training or torch.is_grad_enabled() or torch.compiler.is_compiling())

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


class GatedRMSNorm(RMSNorm):
    """RMS norm times the swish of a gate, `norm(x) * gate * sigmoid(gate)`, rounded once.

    Args: those of `RMSNorm`; forward takes x and gate of one shape `[..., hidden_size]` and
    returns that shape in x's dtype.
    """

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        y = self.normalize(x)
        return (y * F.silu(gate.to(y.dtype))).to(x.dtype)
