"""The activations that an option of a layer may name: those of FLA 0.6.0, in plain torch."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from gla_ext.ops._activations import ACTIVATIONS

__all__ = ["ACTIVATIONS", "activation"]


def activation(name: str, option: str) -> Callable[[Tensor], Tensor]:
    """The elementwise activation called `name`, one of `ACTIVATIONS`, which keeps its input's
    dtype. Errors name `option`, the option that chose it.
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
