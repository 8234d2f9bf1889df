"""GLA beside a Transformer++ within the length of training, and what might bring it nearer.

A Transformer++ knows no text beyond its length of training, so all are compared on the first bytes
of the long held-out documents, as many as a sequence of training has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from experiments.comparisons.ablations import SCALES, comparison, maker
from experiments.language import bits_of_first
from experiments.runs import Result, Results, Run, swept

# Name: layer and heads. The first three are other comparisons' runs too, which are trained once.
VARIANTS = {
    "Transformer++": ("attention", 8),
    "GLA": ("gla", 4),
    "RetNet": ("retnet", 4),
    "GLA, slower gates": ("gla, slower gates", 4),
    "GLA, convolution": ("gla, convolution", 4),
}


def runs(scale: str, results: Results, text: str) -> Iterator[Run]:
    """Each variant at all rates, then its best rate with the other seeds."""
    size = SCALES[scale]
    yield from swept(VARIANTS, maker(VARIANTS, size, text), size.rates, size.seeds, results)


def within(result: Result) -> float:
    """Bits a byte of the long documents' first bytes, as many as the run's sequences have."""
    by_position = result.details["by_position"]
    return bits_of_first(by_position, result.run.seq_len) if by_position else math.nan


def report(scale: str, results: Results, text: str, folder: Path) -> str:
    """The table, with the probability that a variant is no other than GLA, and what may be said."""
    heads = ("model", "p, against GLA")
    return comparison(VARIANTS, SCALES[scale], text, results, "GLA", heads, within)
