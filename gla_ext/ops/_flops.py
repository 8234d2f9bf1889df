"""How many floating-point operations the operators count for in torch's `FlopCounterMode`.

As torch does, products are counted, 2 a multiply-add, by the shapes alone: those of the chunkwise
algorithm (csrc/README.md) with C = 64, a chunk's C x C scores whole as attention's are, no padding
of the last chunk; not gates, norms and activations, nor what a kernel computes again for itself.
A packed row counts as one sequence. With n the sum of the chunks' squared lengths, C T where C
divides T, a head's multiply-adds are

    forward     n (K + V) + 2 T K V
    backward    n (3 K + 2 V) + 5 T K V

and of the recurrence 2 T K V and 5 T K V. Backward counts the scores and states that it computes
again, as torch's count of attention does.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from types import ModuleType
from typing import Any

import torch

CHUNK = 64  # tokens

Formula = Callable[..., int]  # of the shapes of an operator's arguments
FORMULAS: dict[str, Formula] = {}  # of each declared operator that has one


def register(counter: ModuleType) -> None:
    """Gives the formulas to torch.utils.flop_counter."""
    for name, formula in FORMULAS.items():
        counter.register_flop_formula(getattr(torch.ops.gla_ext, name))(formula)


def product(x: int, weight: int, times: int = 1, dim: int = 0) -> Formula:
    """So many multiply-adds of each element of argument number x with each of the weight, argument
    number `weight`, of an output: as many as that dimension of it has.
    """

    def formula(*args: Any, **kwargs: Any) -> int:
        return 2 * times * prod(args[x]) * args[weight][dim]

    return formula


def chunks(
    q: int, v: int, keys: int = 0, values: int = 0, states: int = 0, length: int = CHUNK
) -> Formula:
    """`keys` times K and `values` times V multiply-adds a pair of tokens of a chunk, and `states`
    times K V a token; of arguments number q and v.
    """

    def formula(*args: Any, **kwargs: Any) -> int:
        (B, T, H, K), V = args[q], args[v][-1]
        pairs = T // length * length**2 + (T % length) ** 2
        return 2 * B * H * (pairs * (keys * K + values * V) + T * states * K * V)

    return formula
