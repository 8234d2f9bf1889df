"""`chunk_gla` away from the shapes of BASELINES: other head sizes and lengths, packed sequences,
fp32 gates, one gate a head, and gates of other strengths. Parts of `check_gpu.py`.
"""

import dataclasses
import random

import torch
from shared import operator as bench

# Lengths of packed sequences, 65,536 tokens together; none is a multiple of 64.
MIXED = (
    *(12106, 9171, 7001, 5557, 4423, 3517, 3001, 2557, 2203, 1907, 1709, 1511, 1361, 1231, 1103),
    *(991, 887, 797, 701, 607, 523, 443, 367, 293, 227, 173, 131, 97, 71, 43, 17, 5, 805),
)
SHUFFLED = tuple(random.Random(1).sample(MIXED, len(MIXED)))
UNEVEN = (32771, 1055, *(1057,) * 30)


@dataclasses.dataclass(frozen=True)
class Case:
    """Inputs of a call; g is logsigmoid(N(0, 1)) / n."""

    B: int
    T: int
    H: int
    K: int
    V: int
    n: float = 16
    gate_dtype: torch.dtype = torch.bfloat16
    lengths: tuple[int, ...] | None = None  # of packed sequences
    head_gates: bool = False  # one gate a head, g [B, T, H]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.B, self.T, self.H, self.K, self.V

    def draw(self):
        """The inputs, drawn on the GPU."""
        x = bench.draw(self.shape, 1 / self.n, self.lengths)
        g = x.g[..., 0].contiguous() if self.head_gates else x.g
        return dataclasses.replace(x, g=g.to(self.gate_dtype))

    def of(self, lengths: tuple[int, ...]) -> "Case":
        """The same tokens as packed sequences."""
        return dataclasses.replace(self, lengths=lengths)


PACKED = Case(1, 65536, 4, 128, 256)
BY_HEADS = {"gate_dtype": torch.float32, "head_gates": True}
OTHERS = {
    "8x2048x4x128x256": Case(8, 2048, 4, 128, 256),
    "8x1999x4x128x256": Case(8, 1999, 4, 128, 256),
    "8x2048x4x128x256, g in fp32": Case(8, 2048, 4, 128, 256, gate_dtype=torch.float32),
    "1x65536x4x128x256, packed, 32 of 2,048": PACKED.of((2048,) * 32),
    "1x65536x4x128x256, packed, 33 of 5 to 12,106": PACKED.of(MIXED),
    "1x65536x4x128x256, packed, these in a random order": PACKED.of(SHUFFLED),
    "1x65536x4x128x256, packed, one of 32,771, 31 of some 1,057": PACKED.of(UNEVEN),
    "8x2048x4x96x192": Case(8, 2048, 4, 96, 192),
    "8x2048x4x160x320": Case(8, 2048, 4, 160, 320),
    "8x2048x8x72x136": Case(8, 2048, 8, 72, 136),
    "8x2048x8x64x128": Case(8, 2048, 8, 64, 128),
    "8x2048x8x64x128, g in fp32": Case(8, 2048, 8, 64, 128, gate_dtype=torch.float32),
    "32x2048x16x64x64, g in fp32": Case(32, 2048, 16, 64, 64, gate_dtype=torch.float32),
    "8x2048x4x192x384": Case(8, 2048, 4, 192, 384),
    "32x2048x4x128x256, one gate a head": Case(32, 2048, 4, 128, 256, **BY_HEADS),
    "8x2048x16x128x128, one gate a head": Case(8, 2048, 16, 128, 128, **BY_HEADS),
}
STRENGTHS = (16.0, 4.0, 1.0, 0.25)  # n
STRENGTH_SHAPES = (
    (32, 2048, 4, 128, 256),
    (1, 32768, 4, 128, 256),
    (8, 2048, 4, 256, 512),
    (8, 2048, 16, 128, 128),
    (32, 2048, 16, 64, 64),
)


def strengths() -> dict[str, dict[float, Case]]:
    """By shape and n."""
    return {
        bench.name_of(shape): {n: Case(*shape, n=n) for n in STRENGTHS} for shape in STRENGTH_SHAPES
    }
