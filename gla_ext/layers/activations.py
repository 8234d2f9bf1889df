"""The activations that an option of a layer may name: those of FLA 0.6.0, in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def squared_relu(x: Tensor) -> Tensor:
    """`max(x, 0)^2`, rounded once (So et al., 2021, arXiv:2109.08668)."""
    return F.relu(x).square()


def tanh_gelu(x: Tensor) -> Tensor:
    """GELU by its tanh approximation (Hendrycks and Gimpel, 2016, arXiv:1606.08415)."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "logsigmoid": F.logsigmoid,
    "silu": F.silu,
    "swish": F.silu,
    "sqrelu": squared_relu,
    "gelu": tanh_gelu,
}


def activation(name: str, option: str) -> Callable[[Tensor], Tensor]:
    """The activation called `name`, elementwise and of its input's dtype.

    Args:
        name: one of `ACTIVATIONS`.
        option: the argument that names it, for the errors.

    Raises:
        NotImplementedError: for 'bias_gelu', which FLA lists too.
        ValueError: for any other name.
    """
    if name == "bias_gelu":
        raise NotImplementedError(
            f"GatedLinearAttention: {option} = 'bias_gelu' is not implemented: it adds a bias, and "
            "the layer has none to give it"
        )
    if name not in ACTIVATIONS:
        raise ValueError(
            f"GatedLinearAttention: expected {option} to be one of {', '.join(ACTIVATIONS)}, got "
            f"{name!r}"
        )
    return ACTIVATIONS[name]
