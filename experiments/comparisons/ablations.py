"""What the gate of GLA is worth, and its heads (the paper's Table 2), on text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from experiments.comparisons.figures import table
from experiments.comparisons.significance import order, p_value, verdict
from experiments.runs import (
    Result,
    Results,
    Run,
    at_edges,
    chosen,
    finite,
    rate_of,
    spread,
    swept,
)

# Name: layer, heads, and the paper's perplexity at 340 M parameters and 7 B tokens.
VARIANTS = {
    "GLA, 4 heads": ("gla", 4, 14.77),
    "no gate": ("no gate", 4, 23.21),
    "constant scalar decay": ("constant", 4, 16.55),
    "data-dependent scalar gate": ("head gate", 4, 15.56),
    "GLA, 8 heads": ("gla", 8, 15.29),
    "GLA, 1 head": ("gla", 1, 14.61),
}
LAYERS = {name: (layer, heads) for name, (layer, heads, _) in VARIANTS.items()}
PAPERS = {name: perplexity for name, (*_, perplexity) in VARIANTS.items()}


@dataclass(frozen=True)
class Scale:
    """Sizes of the runs on text."""

    width: int
    layers: int
    seq_len: int
    batch_size: int
    steps: int
    rates: tuple[float, ...]
    seeds: int


SCALES = {
    "tiny": Scale(16, 1, 32, 2, 2, (1e-3, 4e-3), 2),
    # 14 M parameters, 105 M bytes.
    "full": Scale(512, 4, 2048, 32, 1600, (2e-3, 1e-3, 4e-3, 8e-3, 1.6e-2), 3),
}


def text_run(size: Scale, text: str, layer: str, heads: int, lr: float) -> Run:
    """A run on text, with seed 0."""
    return Run(
        task="text",
        layer=layer,
        width=size.width,
        layers=size.layers,
        heads=heads,
        seq_len=size.seq_len,
        batch_size=size.batch_size,
        steps=size.steps,
        lr=lr,
        text=text,
    )


def maker(
    variants: Mapping[str, tuple[str, int]], size: Scale, text: str
) -> Callable[[str, float], Run]:
    """What makes the run of a variant, a layer and its heads by a name, at a learning rate."""
    return lambda name, lr: text_run(size, text, *variants[name], lr)


def runs(scale: str, results: Results, text: str) -> Iterator[Run]:
    """Each variant at all rates, then its best rate with the other seeds."""
    size = SCALES[scale]
    yield from swept(LAYERS, maker(LAYERS, size, text), size.rates, size.seeds, results)


def compared(
    names: Iterable[str],
    make: Callable[[str, float], Run],
    size: Scale,
    results: Results,
    beside: str,
    measure: Callable[[Result], float] = attrgetter("score"),
) -> tuple[dict[str, list[str]], dict[str, list[float]]]:
    """Of each variant that has results its cells, which are bits a byte, the probability that it is
    no other than `beside`, its rate, and its parameters; and its scores.

    Args:
        names, make: the variants, as `swept`'s.
        size, results: what is asked for, and what is done.
        beside: the variant that the others are compared with.
        measure: bits a byte of a result, NaN of a run that diverged. Default: the score.
    """
    found = {
        name: results.of(chosen(name, make, size.rates, size.seeds, results, whole=False))
        for name in names
    }
    measured = {name: [measure(result) for result in done] for name, done in found.items()}
    scores = {name: finite(of) for name, of in measured.items() if finite(of)}
    cells = {}
    for name, done in found.items():
        if done:
            p = "" if name == beside else p_value(scores.get(name, ()), scores.get(beside, ()))
            parameters = f"{done[0].details['parameters'] / 1e6:.2f} M"
            rate = rate_of(name, make, size.rates, results)
            cells[name] = [spread(measured[name], 4), p, rate, parameters]
    return cells, scores


def comparison(
    variants: Mapping[str, tuple[str, int]],
    size: Scale,
    text: str,
    results: Results,
    beside: str,
    heads: tuple[str, str],
    measure: Callable[[Result], float] = attrgetter("score"),
    papers: Mapping[str, float] | None = None,
) -> str:
    """A table of variants, with the probability that each is no other than `beside`, and what may
    be said; '' while there are no results.

    Args:
        variants, text: as `maker`'s.
        size, results, beside, measure: as `compared`'s.
        heads: of the columns of names and of probabilities.
        papers: the paper's perplexity of each variant, which makes a column and orders the rows.
            Default: None (no column).
    """
    make = maker(variants, size, text)
    names = sorted(variants, key=papers.__getitem__) if papers else variants
    cells, scores = compared(names, make, size, results, beside, measure)
    rows = [[name, *([f"{papers[name]:.2f}"] if papers else []), *of] for name, of in cells.items()]
    column = ["paper, perplexity"] if papers else []
    head = [heads[0], *column, "here, bits a byte", heads[1], "rate", "size"]
    ordered = order(scores, list(names)) if papers else ""
    edges = at_edges(names, make, size.rates, results)
    said = " ".join(filter(None, (verdict(scores, beside), ordered, edges)))
    return f"{table(head, rows)}\n\n{said}" if rows else ""


def report(scale: str, results: Results, text: str, folder: Path) -> str:
    """The table, with the probability that a variant is no other than GLA, and what may be said."""
    heads = ("variant", "p, against GLA")
    size = SCALES[scale]
    return comparison(LAYERS, size, text, results, "GLA, 4 heads", heads, papers=PAPERS)
