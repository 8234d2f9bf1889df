"""GLA beside a Transformer++ within the length of training, and what might bring it nearer.

A Transformer++ knows no text beyond its length of training, so all are compared on the first bytes
of the long held-out documents, as many as a sequence of training has.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

from experiments.comparisons.ablations import SCALES, Scale, text_run
from experiments.comparisons.figures import table
from experiments.comparisons.significance import p_value, verdict
from experiments.runs import Result, Results, Run, at_edges, chosen, mean_of, rate_of, swept

# Name: layer and heads. The first three are also lengths' runs, which are trained once.
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
    curve = result.details["by_position"]
    ends = [start for start, _ in curve[1:]]  # of all stretches but the last
    seen = [bits for (_, bits), end in zip(curve, ends, strict=False) if end <= result.run.seq_len]
    return statistics.fmean(seen or [bits for _, bits in curve[:1]])


def report(scale: str, results: Results, text: str, folder: Path) -> str:
    """The table, with the probability that a variant is no other than GLA, and what may be said."""
    size, beside = SCALES[scale], "GLA"
    make = _make(size, text)
    found = {
        name: results.of(chosen(name, make, size.rates, size.seeds, results, whole=False))
        for name in VARIANTS
    }
    scores = {
        name: [within(result) for result in done if result.details["by_position"]]
        for name, done in found.items()
        if done
    }
    rows = []
    for name, of in scores.items():
        p = "" if name == beside else p_value(of, scores.get(beside, ()))
        parameters = f"{found[name][0].details['parameters'] / 1e6:.2f} M"
        rows.append([name, mean_of(of, 4), p, rate_of(name, make, size.rates, results), parameters])
    if not rows:
        return ""
    head = ["model", "here, bits a byte", "p, against GLA", "rate", "size"]
    edges = at_edges(VARIANTS, make, size.rates, results)
    said = " ".join(filter(None, (verdict(scores, beside), edges)))
    return f"{table(head, rows)}\n\n{said}"
