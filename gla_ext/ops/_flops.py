"""The number of floating-point operations of each operator in torch's `FlopCounterMode`.

As in torch, only products count, 2 for each multiply-add, and only shapes matter. The formulas are
those of the chunkwise algorithm (csrc/README.md) with C = 64. All C x C scores of a chunk count, as
in torch's count of attention; the last chunk is not padded. Gates, norms, activations and results
that a kernel computes again for itself do not count. A packed row counts as one sequence. With n
the sum of the chunks' squared lengths (C T if C divides T), the multiply-adds of a head are

    forward     n (K + V) + 2 T K V
    backward    n (3 K + 2 V) + 5 T K V

and for the recurrence 2 T K V and 5 T K V. Backward includes the scores and states that it computes
again, as in torch's count of attention.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from types import ModuleType
from typing import Any

import torch

CHUNK = 64  # tokens

Formula = Callable[..., int]  # takes the shapes of an operator's arguments
FORMULAS: dict[str, Formula] = {}  # for each declared operator with a formula


def register(counter: ModuleType) -> None:
    """Gives the formulas to torch.utils.flop_counter."""
    for name, formula in FORMULAS.items():
        counter.register_flop_formula(getattr(torch.ops.gla_ext, name))(formula)


def product(x: int, weight: int, times: int = 1, dim: int = 0) -> Formula:
    """The formula of `times` linear maps: 2 times the product of `times`, the number of elements of
    argument x, and the size of dimension `dim` of argument `weight`. x and weight are positions of
    arguments.
    """

    def formula(*args: Any, **kwargs: Any) -> int:
        return 2 * times * prod(args[x]) * args[weight][dim]

    return formula


def chunks(
    q: int, v: int, keys: int = 0, values: int = 0, states: int = 0, length: int = CHUNK
) -> Formula:
    """The formula of a chunkwise operator: `keys` K + `values` V multiply-adds for each pair of
    tokens of a chunk, and `states` K V for each token. q and v are the positions of these
    arguments.
    """

    def formula(*args: Any, **kwargs: Any) -> int:
        (B, T, H, K), V = args[q], args[v][-1]
        pairs = T // length * length**2 + (T % length) ** 2
        return 2 * B * H * (pairs * (keys * K + values * V) + T * states * K * V)

    return formula
