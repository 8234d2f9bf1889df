"""The activations of a gate, elementwise: those of FLA 0.6.0, in plain torch."""

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
