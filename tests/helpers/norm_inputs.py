"""Inputs of the norm in different layouts, and the truth."""

import torch
from models import FUNCTIONS

EPS = 1e-3
# Rounding a result once; fp32 and fp64 add up squares before.
BOUND = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 0.0025, torch.float16: 3e-4}
LAYOUTS = ("contiguous", "part of a projection", "sliced", "transposed", "misaligned")


def normal(*shape, seed, device="cpu", dtype=torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """x `[B, T, H, V]` or `[B, T, D]`, differently in memory."""
    if layout == "part of a projection":  # among what other projections of the token gave
        flat = x.flatten(2)
        return torch.cat([flat] * 2, -1)[..., flat.shape[-1] :].unflatten(-1, x.shape[2:])
    if layout == "tokens first":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "sliced":  # no row contiguous
        return torch.stack([x, x], -1)[..., 1]
    if layout == "transposed":  # more strides than two
        return x.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3)
    if layout == "misaligned":
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)
    return x


def exact(x, weight, gate, activation="swish"):
    """In fp64, by the definitions."""
    y = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
    y = y if weight is None else y * weight
    return y if gate is None else y * FUNCTIONS[activation](gate)


def make(shape, device, dtype, layout="contiguous", weight_dtype=None):
    inputs = (laid_out(normal(*shape, seed=i, device=device, dtype=dtype), layout) for i in (1, 2))
    x, gate = inputs
    weight = normal(shape[-1], seed=3, device=device, dtype=weight_dtype or dtype)
    return x, weight, gate, normal(*shape, seed=4, device=device, dtype=dtype)
