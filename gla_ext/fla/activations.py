"""Replacements for the activations that FLA's GLA layers hold.

A layer stores the bound `apply` of an autograd function, which `torch.compile` cannot trace,
instead of the name that it was made from. Therefore the activations of existing layers are
replaced, and new layers find the replacements in the table from which they take activations.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from gla_ext.layers.activations import ACTIVATIONS
from gla_ext.ops._door import in_graphs

_ATTRIBUTES = ("gate_fn", "feature_map_fn")


# Whether FLA's Triton kernels cannot process a tensor, or would break a graph.
needs_torch: Callable[[Tensor], bool] = in_graphs(lambda x: True, lambda x: x.device.type == "cpu")


class Activation:
    """FLA's activation of that name, in plain torch where FLA's kernels cannot run.

    It is a class, so that `put_back` recognizes it in a copied or unpickled layer too.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, x: Tensor) -> Tensor:
        return ACTIVATIONS[self.name](x) if needs_torch(x) else _flas(self.name)(x)


def table(layers: ModuleType) -> dict[str, Callable]:
    """The table that replaces the table of activations in `fla.layers.gla`."""
    return {
        name: Activation(name) if name in ACTIVATIONS else function
        for name, function in layers.ACT2FN.items()
    }


def replace(layers: ModuleType) -> None:
    """Replaces the activations of all existing layers of `fla.layers.gla`."""
    for layer, attribute, function in _held(layers):
        name = next((name for name in ACTIVATIONS if _flas(name) == function), None)
        if name is not None:
            setattr(layer, attribute, Activation(name))


def put_back(layers: ModuleType) -> None:
    """Undoes `replace`, also in layers made afterwards."""
    for layer, attribute, function in _held(layers):
        if isinstance(function, Activation):
            setattr(layer, attribute, _flas(function.name))


def _flas(name: str) -> Callable:
    return importlib.import_module("fla.modules.activations").ACT2FN[name]


def _held(layers: ModuleType) -> Iterator[tuple[nn.Module, str, Any]]:
    """Each layer, the name of an attribute that may be an activation, and its value."""
    for layer in gc.get_objects():
        # Not isinstance: an object's __class__ may be a property that imports something.
        if issubclass(type(layer), layers.GatedLinearAttention):
            for name in _ATTRIBUTES:
                if vars(layer).get(name) is not None:
                    yield layer, name, vars(layer)[name]
