"""Gates on keys, on values, on both and on none (version 1 of the paper, Table 2), on text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from experiments.comparisons.ablations import SCALES, Scale, compared, text_run
from experiments.comparisons.figures import table
from experiments.comparisons.significance import verdict
from experiments.runs import Results, Run, at_edges, swept

# Name: layer. Keys alone and none are ablations' runs too, which are trained once.
VARIANTS = {
    "α and β, keys and values": "gla, values too",
    "α, keys": "gla",
    "β, values": "values alone",
    "none": "no gate",
}


def runs(scale: str, results: Results, text: str) -> Iterator[Run]:
    """Each variant at all rates, then its best rate with the other seeds."""
    size = SCALES[scale]
    yield from swept(VARIANTS, _make(size, text), size.rates, size.seeds, results)


def _make(size: Scale, text: str):
    def make(name: str, lr: float) -> Run:
        return text_run(size, text, VARIANTS[name], 4, lr)

    return make


def report(scale: str, results: Results, text: str, folder: Path) -> str:
    """The table, with the probability that a variant is no other than gates on keys, and what may
    be said.
    """
    size, beside = SCALES[scale], "α, keys"
    cells, scores = compared(VARIANTS, _make(size, text), size, results, beside)
    rows = [[name, *of] for name, of in cells.items()]
    head = ["gates", "here, bits a byte", "p, against keys", "rate", "size"]
    edges = at_edges(VARIANTS, _make(size, text), size.rates, results)
    said = " ".join(filter(None, (verdict(scores, beside), edges)))
    return f"{table(head, rows)}\n\n{said}" if rows else ""
