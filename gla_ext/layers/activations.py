"""The activations that an option of a layer may name: those of FLA 0.6.0, in plain torch."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from gla_ext.ops._activations import ACTIVATIONS, squared_relu, tanh_gelu

__all__ = ["ACTIVATIONS", "activation", "squared_relu", "tanh_gelu"]


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
