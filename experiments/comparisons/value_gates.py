"""Gates on keys, on values, on both and on none (v3 of the paper, Table 2), on text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from experiments.comparisons.ablations import SCALES, comparison, maker
from experiments.runs import Results, Run, swept

# Name: layer, heads, and v3's perplexity at 340 M parameters and 7 B tokens. Keys alone and none
# are ablations' runs too, which are trained once.
VARIANTS = {
    "α and β, keys and values": ("gla, values too", 4, 14.86),
    "α, keys": ("gla", 4, 14.73),
    "β, values": ("values alone", 4, 15.15),
    "none": ("no gate", 4, 23.21),
}
LAYERS = {name: (layer, heads) for name, (layer, heads, _) in VARIANTS.items()}
PAPERS = {name: perplexity for name, (*_, perplexity) in VARIANTS.items()}


def runs(scale: str, results: Results, text: str) -> Iterator[Run]:
    """Each variant at all rates, then its best rate with the other seeds."""
    size = SCALES[scale]
    yield from swept(LAYERS, maker(LAYERS, size, text), size.rates, size.seeds, results)


def report(scale: str, results: Results, text: str, folder: Path) -> str:
    """The table, with the probability that a variant is no other than gates on keys, and what may
    be said.
    """
    heads = ("gates", "p, against keys")
    return comparison(LAYERS, SCALES[scale], text, results, "α, keys", heads, papers=PAPERS)
