"""The low-rank gate of a GLA layer: its second linear map and what is done to its result."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gla_ext import _C  # noqa: F401  loading it registers torch.ops.gla_ext
from gla_ext.ops._checks import check_tensors
from gla_ext.ops._tracing import have_no_rule

MOST_RANK_ON_CUDA = 16

_fwd = torch.ops.gla_ext.gate_projection_fwd.default


def gate_projection(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    normalizer: float = 16,
    clamp_min: float | None = None,
) -> Tensor:
    """`max(logsigmoid(h @ weight.T + bias) / normalizer, clamp_min)`.

    One kernel forward and, but for the last sum of the parameters' gradients, one backward, each of
    which reads and writes everything once; fp32 between (fp64 for fp64 inputs), rounded once.
    Autograd keeps h, weight and bias. On CUDA in bfloat16 and float16 with R up to 16; of other
    dtypes and ranks there, torch.func transforms, forward-mode AD and in ONNX the same is done by
    torch's operations.

    Args:
        h: `[..., R]`; bfloat16, float16, float32 or float64. Rows of a wider tensor are read where
            they lie. Autocast casts h, weight and bias.
        weight: `[K, R]`, of h's dtype.
        bias: `[K]`, likewise. Default: None (0).
        normalizer: above 0. Default: 16.
        clamp_min: lower bound of the result. Default: None.

    Returns:
        `[..., K]` in h's dtype, contiguous.

    Raises:
        TypeError: for other dtypes.
        ValueError: for shapes or devices that do not fit, or a normalizer not above 0.
        NotImplementedError: double backward.
    """
    check_tensors("gate_projection", "h weight bias", h, weight, bias)
    tensors = [h, weight] if bias is None else [h, weight, bias]
    sparse = any(t.layout != torch.strided for t in tensors)
    if sparse or have_no_rule(*tensors) or not _has_kernel(h):
        return plain_gate_projection(h, weight, bias, normalizer, clamp_min)
    clamp = None if clamp_min is None else float(clamp_min)
    return _fwd(h, weight, bias, float(normalizer), clamp)


def plain_gate_projection(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    normalizer: float = 16,
    clamp_min: float | None = None,
) -> Tensor:
    """`gate_projection` as torch's operations."""
    g = F.logsigmoid(F.linear(h, weight, bias)) / normalizer
    return g if clamp_min is None else g.clamp_min(clamp_min)


def _has_kernel(h: Tensor) -> bool:
    if not h.is_cuda:
        return True
    dtype = h.dtype
    if torch.is_autocast_enabled("cuda") and dtype != torch.float64:
        dtype = torch.get_autocast_dtype("cuda")
    return dtype in (torch.bfloat16, torch.float16) and h.shape[-1] <= MOST_RANK_ON_CUDA


__all__ = ["gate_projection", "plain_gate_projection"]
