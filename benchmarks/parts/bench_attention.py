"""Causal attention and `chunk_gla` of one model width, 1024, over T."""

import itertools
import math
from collections.abc import Callable

import torch
from shared import operator as bench
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

BATCH = 32
LENGTHS = (1024, 2048, 4096, 8192)
GLA_HEADS = (4, 128, 256)  # H, K, V: keys take half of the width, values all of it
ATTENTION_HEADS = (16, 64)
BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "FlashAttention-2": SDPBackend.FLASH_ATTENTION,
}


def shapes() -> list[tuple[int, ...]]:
    return [(BATCH, T, *GLA_HEADS) for T in LENGTHS]


def call(backend: SDPBackend, T: int, backward: bool, B: int = BATCH) -> Callable[[], object]:
    """One forward, or forward + backward. q, k and v have the strides that a projection's output
    has: tokens before heads.
    """
    H, D = ATTENTION_HEADS
    q, k, v, do = (
        torch.randn(B, T, H, D, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
        for _ in range(4)
    )
    leaves = [t.requires_grad_(backward) for t in (q, k, v)]

    def run():
        with sdpa_kernel(backend):
            o = scaled_dot_product_attention(*leaves, is_causal=True)
            return torch.autograd.grad(o, leaves, do) if backward else o

    return run


def measure(functions: dict[str, Callable], x) -> bench.Times:
    """Times `functions` on inputs x of `chunk_gla`, and attention on equally long sequences."""

    def calls(backward: bool) -> dict[str, Callable]:
        attention = {name: call(b, x.q.shape[1], backward) for name, b in BACKENDS.items()}
        return {name: bench.call(f, x, backward) for name, f in functions.items()} | attention

    return bench.time_both_ways(calls)


def break_even(ours: dict[int, float], theirs: dict[int, float]) -> str:
    """From which T on ours takes less time: by a line through logarithms between two lengths.

    Args:
        ours, theirs: milliseconds by T, ascending.
    """
    gain = {T: math.log(theirs[T] / ours[T]) for T in ours}
    first, last = min(gain), max(gain)
    if gain[first] >= 0:
        return f"below {first}" if min(gain.values()) >= 0 else "more than one"
    for a, b in itertools.pairwise(gain):
        if gain[b] >= 0:
            share = gain[a] / (gain[a] - gain[b])
            return f"{math.exp(math.log(a) + share * math.log(b / a)):.0f}"
    return f"above {last}"
