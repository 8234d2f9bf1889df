"""Gates on keys, on values, on both and on none (version 1 of the paper, Table 2), on text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from experiments.comparisons.ablations import SCALES, comparison, maker
from experiments.runs import Results, Run, swept

# Name: layer and heads. Keys alone and none are ablations' runs too, which are trained once.
VARIANTS = {
    "α and β, keys and values": ("gla, values too", 4),
    "α, keys": ("gla", 4),
    "β, values": ("values alone", 4),
    "none": ("no gate", 4),
}


def runs(scale: str, results: Results, text: str) -> Iterator[Run]:
    """Each variant at all rates, then its best rate with the other seeds."""
    size = SCALES[scale]
    yield from swept(VARIANTS, maker(VARIANTS, size, text), size.rates, size.seeds, results)


def report(scale: str, results: Results, text: str, folder: Path) -> str:
    """The table, with the probability that a variant is no other than gates on keys, and what may
    be said.
    """
    heads = ("gates", "p, against keys")
    return comparison(VARIANTS, SCALES[scale], text, results, "α, keys", heads)
