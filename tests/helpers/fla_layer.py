"""FLA's layer as a class, for tests and benchmarks."""

import importlib
import sys
import types

import torch


def layer_class() -> type[torch.nn.Module]:
    """FLA's GatedLinearAttention, also where its package of layers cannot be imported as a whole:
    other layers in it need transformers.
    """
    try:
        return importlib.import_module("fla.layers").GatedLinearAttention
    except ModuleNotFoundError:
        folders = importlib.import_module("fla").__path__
        package = types.ModuleType("fla.layers")
        package.__path__ = [f"{folder}/layers" for folder in folders]
        sys.modules["fla.layers"] = package
        package.GatedLinearAttention = importlib.import_module(
            "fla.layers.gla"
        ).GatedLinearAttention
        return package.GatedLinearAttention
