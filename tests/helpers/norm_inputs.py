"""Inputs of the norm in different layouts, and its results against fp64 plain torch."""

import torch
from models import FUNCTIONS
from torch.utils._python_dispatch import TorchDispatchMode

from gla_ext.layers.norms import rms_norm

EPS = 1e-3
# Rounding a result once; fp32 and fp64 add up squares before.
BOUND = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 0.0025, torch.float16: 3e-4}
LAYOUTS = ("contiguous", "heads of a projection", "sliced", "transposed", "misaligned")


def normal(*shape, seed, device="cpu", dtype=torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """x `[B, T, H, V]`, differently in memory."""
    H, V = x.shape[2:]
    if layout == "heads of a projection":  # among what other projections of the token gave
        return torch.cat([x.flatten(2)] * 2, -1)[..., H * V :].unflatten(-1, (H, V))
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


def check(x, weight, gate, dy, activation="swish", factor=1.0):
    """Values and gradients of the operator, and that its results are contiguous."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in (x, weight, gate)]
    doubles = [None if t is None else t.detach().double().requires_grad_() for t in leaves]
    found = rms_norm(*leaves[:2], EPS, leaves[2], activation)
    expected = exact(*doubles, activation)
    there = [t for t in leaves if t is not None]
    gradients = torch.autograd.grad(found, there, dy)
    wanted = torch.autograd.grad(expected, [t for t in doubles if t is not None], dy.double())
    assert found.is_contiguous()
    for of, got, want in zip([x, *there], [found, *gradients], [expected, *wanted], strict=True):
        assert got.dtype == of.dtype
        assert got.shape == of.shape
        bound = max(BOUND[of.dtype], 0 if of is not weight else BOUND[torch.float32])
        error = (got.double() - want).norm() / want.norm().clamp_min(1e-300)
        assert error < factor * bound, f"{error:.1e} of {tuple(of.shape)}"


def make(shape, device, dtype, layout="contiguous", weight_dtype=None):
    inputs = (laid_out(normal(*shape, seed=i, device=device, dtype=dtype), layout) for i in (1, 2))
    x, gate = inputs
    weight = normal(shape[-1], seed=3, device=device, dtype=weight_dtype or dtype)
    return x, weight, gate, normal(*shape, seed=4, device=device, dtype=dtype)


class MadeAgain(TorchDispatchMode):
    """Whether the norm's backward makes its output again, call by call."""

    def __init__(self):
        super().__init__()
        self.again = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.gla_ext.rms_norm_gate_bwd.default:
            self.again.append(args[6:] == (True,))  # not there where it is the default
        return function(*args, **(kwargs or {}))
