"""Modules that moved into packages, under the names that they had before.

`import gla_ext.generate` gives the module `gla_ext.decode.generate`, the same object, and imports
it only then. So does what names it in a pickle or after `python -m`. New programs should use the
new names: type checkers and editors know no others.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import CodeType, ModuleType

MOVED = {
    "gla_ext.activations": "gla_ext.layers.activations",
    "gla_ext.checkpoint": "gla_ext.model.checkpoint",
    "gla_ext.config": "gla_ext.model.config",
    "gla_ext.data": "gla_ext.train.data",
    "gla_ext.devices": "gla_ext.train.devices",
    "gla_ext.files": "gla_ext.model.files",
    "gla_ext.generate": "gla_ext.decode.generate",
    "gla_ext.inputs": "gla_ext.ops.inputs",
    "gla_ext.multihead": "gla_ext.layers.multihead",
    "gla_ext.norms": "gla_ext.layers.norms",
    "gla_ext.plot": "gla_ext.train.plot",
    "gla_ext.presets": "gla_ext.train.presets",
    "gla_ext.recurrent": "gla_ext.ops.recurrent",
    "gla_ext.run_folder": "gla_ext.train.run_folder",
    "gla_ext.sampling": "gla_ext.decode.sampling",
    "gla_ext.short_conv": "gla_ext.layers.short_convolution",
    "gla_ext.swiglu": "gla_ext.layers.swiglu",
    "gla_ext.trainer": "gla_ext.train.trainer",
    # Private ones, which a pickle of a whole module may name.
    "gla_ext._checks": "gla_ext.ops._checks",
    "gla_ext._cross_entropy": "gla_ext.model.loss",
    "gla_ext._decode_loop": "gla_ext.decode._loop",
    "gla_ext._fla_activations": "gla_ext.fla.activations",
    "gla_ext._fla_layers": "gla_ext.fla.layers",
    "gla_ext._graphs": "gla_ext.ops._door",
    "gla_ext._layer_options": "gla_ext.layers._options",
    "gla_ext._padding": "gla_ext.layers._padding",
    "gla_ext._projections": "gla_ext.layers._projections",
    "gla_ext._prompts": "gla_ext.decode._prompts",
}


class _Finder(MetaPathFinder):
    """Finds the names of the table. Asked first: an older gla_ext on the path has such files."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return spec_from_loader(name, _Loader()) if name in MOVED else None


class _Loader(InspectLoader):
    """Puts the module itself in the place of the empty one that the import system made."""

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        sys.modules[name] = importlib.import_module(MOVED[name])

    def get_code(self, name: str) -> CodeType | None:
        """For `python -m`."""
        return find_spec(MOVED[name]).loader.get_code(MOVED[name])

    def get_source(self, name: str) -> str | None:
        return find_spec(MOVED[name]).loader.get_source(MOVED[name])


def install() -> None:
    """Makes the names of the table known to `import`."""
    sys.meta_path.insert(0, _Finder())


def attribute(name: str) -> ModuleType:
    """What `gla_ext.<name>` is where no import has set it."""
    if f"gla_ext.{name}" not in MOVED:
        raise AttributeError(f"module 'gla_ext' has no attribute {name!r}")
    return importlib.import_module(f"gla_ext.{name}")
