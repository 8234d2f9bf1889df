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

from gla_ext._when_imported import when_imported

COUNTER = "torch.utils.flop_counter"
CHUNK, SUB_CHUNK = 64, 16  # tokens

Shape = tuple[int, ...]


def register_when_counted() -> None:
    """Gives torch's counter the formulas, now or when it is imported.

    It imports Triton, which is too much for all who count nothing.
    """
    when_imported(COUNTER, _register)


def _register(counter: ModuleType) -> None:
    for name, formula in _FORMULAS.items():
        counter.register_flop_formula(getattr(torch.ops.gla_ext, name))(formula)


def _squares(T: int, length: int = CHUNK) -> int:
    """The sum of the squared lengths of a sequence's chunks."""
    return T // length * length**2 + (T % length) ** 2


def _by_chunks(
    q: Shape, v: Shape, per_pair: Callable[[int, int], int], states: int, length: int = CHUNK
) -> int:
    """per_pair(K, V) multiply-adds a pair of tokens of a chunk, and `states` times K V a token."""
    B, T, H, K = q
    V = v[-1]
    return 2 * B * H * (_squares(T, length) * per_pair(K, V) + T * states * K * V)


def _chunk_gla_fwd(q: Shape, k: Shape, v: Shape, *args: Any, **kwargs: Any) -> int:
    return _by_chunks(q, v, lambda K, V: K + V, 2)


def _chunk_gla_bwd(
    do: Shape, dht: Shape | None, q: Shape, k: Shape, v: Shape, *args: Any, **kwargs: Any
) -> int:
    return _by_chunks(q, v, lambda K, V: 3 * K + 2 * V, 5)


def _chunk_gla_summary(q: Shape, k: Shape, v: Shape, *args: Any, **kwargs: Any) -> int:
    return _by_chunks(q, v, lambda K, V: 0, 1)


def _chunk_gla_summary_bwd(
    do: Shape, dht: Shape | None, q: Shape, k: Shape, v: Shape, *args: Any, **kwargs: Any
) -> int:
    return _chunk_gla_summary(q, k, v)


def _recurrence(products: int) -> Callable[..., int]:
    def formula(q: Shape, k: Shape, v: Shape, *args: Any, **kwargs: Any) -> int:
        return 2 * products * prod(q) * v[-1]

    return formula


def _recurrent_gla_bwd(
    do: Shape, dht: Shape | None, q: Shape, k: Shape, v: Shape, *args: Any, **kwargs: Any
) -> int:
    return 2 * 5 * prod(q) * v[-1]


def _recurrent_gla_commit_(
    k: Shape, v: Shape, gk: Shape | None, gv: Shape | None, state: Shape, *args: Any, **kwargs: Any
) -> int:
    return 2 * prod(k[:2]) * prod(state[1:])


def _short_convolution_fwd(x: Shape, weight: Shape, *args: Any, **kwargs: Any) -> int:
    return 2 * prod(x) * weight[-1]


def _short_convolution_bwd(
    dy: Shape, dstate: Shape | None, x: Shape, weight: Shape, *args: Any, **kwargs: Any
) -> int:
    # The gradients of input and weight, and the sums before SiLU again.
    return 3 * 2 * prod(x) * weight[-1]


def _swiglu_linear(gate: Shape, up: Shape, weight: Shape, *args: Any, **kwargs: Any) -> int:
    # Seen in inference mode alone; else the product is torch's own, and counts as such.
    return 2 * prod(gate) * weight[0]


def _norm_gate_linear(o: Shape, gate: Shape, weight: Shape, *args: Any, **kwargs: Any) -> int:
    return 2 * prod(o) * weight[0]  # as swiglu_linear


# The steps, of which forward and backward are the sums.


def _chunk_states(k: Shape, v: Shape, *args: Any, **kwargs: Any) -> int:
    return _by_chunks(k, v, lambda K, V: 0, 1)


def _scores_off_diagonal(q: Shape, *args: Any, **kwargs: Any) -> int:
    return _by_chunks(q, q, lambda K, V: K, 0) - _scores_diagonal(q)


def _scores_diagonal(q: Shape, *args: Any, **kwargs: Any) -> int:
    return _by_chunks(q, q, lambda K, V: K, 0, SUB_CHUNK)


def _output(q: Shape, v: Shape, *args: Any, **kwargs: Any) -> int:
    return _by_chunks(q, v, lambda K, V: V, 1)


def _score_grads(do: Shape, v: Shape, *args: Any, **kwargs: Any) -> int:
    return _by_chunks(do, v, lambda K, V: V, 0)


def _intra_grads(q: Shape, *args: Any, **kwargs: Any) -> int:
    return _by_chunks(q, q, lambda K, V: 2 * K, 0)


def _merge_grads(q: Shape, k: Shape, v: Shape, *args: Any, **kwargs: Any) -> int:
    return _by_chunks(q, v, lambda K, V: 0, 2)


def _gate_projection(products: int) -> Callable[..., int]:
    def formula(*args: Any, **kwargs: Any) -> int:
        h, weight = args[products - 1 : products + 1]  # behind dg in backward
        return 2 * products * prod(h) * weight[0]

    return formula


def _linear_cross_entropy_fwd(x: Shape, weight: Shape, *args: Any, **kwargs: Any) -> int:
    return 2 * prod(x) * weight[0] * (1 + sum(args[-2:]))  # with dx, with dweight


_FORMULAS: dict[str, Callable[..., int]] = {
    "chunk_gla_fwd": _chunk_gla_fwd,
    "chunk_gla_bwd": _chunk_gla_bwd,
    "chunk_gla_": _chunk_gla_fwd,
    "chunk_gla_summary": _chunk_gla_summary,
    "chunk_gla_apply": _chunk_gla_fwd,
    "chunk_gla_summary_bwd": _chunk_gla_summary_bwd,
    "chunk_gla_apply_bwd": _chunk_gla_bwd,
    "recurrent_gla_fwd": _recurrence(2),
    "recurrent_gla_bwd": _recurrent_gla_bwd,
    "recurrent_gla_step_": _recurrence(2),
    "recurrent_gla_verify": _recurrence(2),
    "recurrent_gla_commit_": _recurrent_gla_commit_,
    "short_convolution_fwd": _short_convolution_fwd,
    "short_convolution_bwd": _short_convolution_bwd,
    "short_convolution_": _short_convolution_fwd,
    "swiglu_linear": _swiglu_linear,
    "norm_gate_linear": _norm_gate_linear,
    "gate_projection_fwd": _gate_projection(1),
    "gate_projection_bwd": _gate_projection(2),
    "linear_cross_entropy_fwd": _linear_cross_entropy_fwd,
    "_chunk_states": _chunk_states,
    "_scores_off_diagonal": _scores_off_diagonal,
    "_scores_diagonal": _scores_diagonal,
    "_output": _output,
    "_state_grads": _chunk_states,  # q and do in place of k and v
    "_value_grads": _output,  # k and do in place of q and v
    "_score_grads": _score_grads,
    "_intra_grads": _intra_grads,
    "_merge_grads": _merge_grads,
}
