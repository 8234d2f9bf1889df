"""GLA beside a Transformer++ within the length of training, and what might bring it nearer.

A Transformer++ knows no text beyond its length of training, so all are compared on the first bytes
of the long held-out documents, as many as a sequence of training has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from experiments.comparisons.ablations import SCALES, Scale, compared, text_run
from experiments.comparisons.figures import table
from experiments.comparisons.significance import verdict
from experiments.language import bits_of_first
from experiments.runs import Result, Results, Run, at_edges, swept

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
    yield from swept(VARIANTS, _make(size, text), size.rates, size.seeds, results)


def _make(size: Scale, text: str):
    def make(name: str, lr: float) -> Run:
        return text_run(size, text, *VARIANTS[name], lr)

    return make


def within(result: Result) -> float:
    """Bits a byte of the long documents' first bytes, as many as the run's sequences have."""
    by_position = result.details["by_position"]
    return bits_of_first(by_position, result.run.seq_len) if by_position else math.nan


def report(scale: str, results: Results, text: str, folder: Path) -> str:
    """The table, with the probability that a variant is no other than GLA, and what may be said."""
    size, beside = SCALES[scale], "GLA"
    make = _make(size, text)
    cells, scores = compared(VARIANTS, make, size, results, beside, within)
    rows = [[name, *of] for name, of in cells.items()]
    head = ["model", "here, bits a byte", "p, against GLA", "rate", "size"]
    edges = at_edges(VARIANTS, make, size.rates, results)
    said = " ".join(filter(None, (verdict(scores, beside), edges)))
    return f"{table(head, rows)}\n\n{said}" if rows else ""
