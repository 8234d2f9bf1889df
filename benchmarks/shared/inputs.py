"""What the benchmarks share with the tests: inputs by named shapes, the truth in fp64, the steps.

The one door from here to tests/helpers. It imports gla_ext, so what times that imports this late.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "helpers"))
from common import SHAPES, exact, exact_by_chunks, make_inputs, ours
from fla_layer import layer_class
from large import large_inputs
from steps import STEPS, compose_steps

__all__ = [
    "SHAPES",
    "STEPS",
    "compose_steps",
    "exact",
    "exact_by_chunks",
    "large_inputs",
    "layer_class",
    "make_inputs",
    "ours",
]
