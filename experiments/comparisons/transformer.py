"""GLA beside a Transformer++ within the length of training, and what might bring it nearer.

A Transformer++ knows no text beyond its length of training, so all are compared on the first bytes
of the long held-out documents, as many as a sequence of training has.
"""

from __future__ import annotations

import math

from experiments.comparisons.ablations import Comparison
from experiments.language import bits_of_first
from experiments.runs import Result

# Name: layer and heads. The first three are other comparisons' runs too, which are trained once.
VARIANTS = {
    "Transformer++": ("attention", 8),
    "GLA": ("gla", 4),
    "RetNet": ("retnet", 4),
    "GLA, slower gates": ("gla, slower gates", 4),
    "GLA, convolution": ("gla, convolution", 4),
}


def within(result: Result) -> float:
    """Bits a byte of the long documents' first bytes, as many as the run's sequences have."""
    by_position = result.details["by_position"]
    return bits_of_first(by_position, result.run.seq_len) if by_position else math.nan


comparison = Comparison(VARIANTS, "GLA", ("model", "p, against GLA"), measure=within)
runs, report = comparison.runs, comparison.report
