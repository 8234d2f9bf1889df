"""Inputs too large for `make_inputs`, which draws in fp64 on the CPU; benchmarks use them too."""

import itertools

import torch
from common import Inputs
from torch.nn.functional import logsigmoid


def large_inputs(
    B: int,
    T: int,
    H: int,
    K: int,
    V: int,
    dtype: torch.dtype = torch.bfloat16,
    gate: float | str = 1 / 16,
    states: bool = False,
    lengths: tuple[int, ...] | None = None,
    device: str = "cuda",
    gate_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Inputs:
    """As `make_inputs`, drawn on the device, in the dtype, and always the same there."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape, dtype=dtype):
        return torch.randn(*shape, dtype=dtype, device=device, generator=generator)

    q, k, v, do = (normal(B, T, H, D) for D in (K, K, V, V))
    g = logsigmoid(normal(B, T, H, K, dtype=gate_dtype or dtype))
    if gate == "reset":
        g.masked_fill_(torch.rand(g.shape, generator=generator, device=device) < 0.3, -torch.inf)
    else:
        g.mul_(gate)
    N = B if lengths is None else len(lengths)
    h0, dht = (normal(N, H, K, V, dtype=torch.float32) if states else None for _ in range(2))
    cu_seqlens = None
    if lengths is not None:
        cu_seqlens = torch.tensor([*itertools.accumulate(lengths, initial=0)], device=device)
    return Inputs(q, k, v, g, do, h0, dht, cu_seqlens)
