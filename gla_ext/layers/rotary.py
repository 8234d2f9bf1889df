"""Rotary position embeddings (Su et al., 2021, arXiv:2104.09864)."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_embedding(x: Tensor, positions: Tensor, theta: float = 10000.0) -> Tensor:
    """Turns channel i of a head's first half and channel i of its second half, as one complex
    number, by the angle `position * theta ** (-2 i / D)`.

    Angles are fp32, fp64 for fp64 inputs; the result is rounded once.

    Args:
        x: `[..., T, H, D]`, D even.
        positions: `[T]`, or any shape that fits x's before H.
        theta: base of the frequencies. Default: 10000.

    Returns:
        As x.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    half = x.shape[-1] // 2
    channels = torch.arange(half, device=x.device, dtype=dtype)
    frequencies = theta ** (channels * (-1 / half))  # [D / 2]
    angles = (positions.to(dtype).unsqueeze(-1) * frequencies).unsqueeze(-2)  # [.., T, 1, D / 2]
    cos, sin = angles.cos(), angles.sin()
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
