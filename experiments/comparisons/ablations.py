"""What the gate of GLA is worth, and its heads (the paper's Table 4), on text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path

from experiments.comparisons.figures import table
from experiments.comparisons.significance import order, p_value, verdict
from experiments.runs import Result, Results, Run, Sweep, finite, spread

# Name: layer, heads, and the paper's perplexity at 340 M parameters and 7 B tokens.
VARIANTS = {
    "GLA, 4 heads": ("gla", 4, 14.77),
    "no gate": ("no gate", 4, 23.21),
    "constant scalar decay": ("constant", 4, 16.55),
    "data-dependent scalar gate": ("head gate", 4, 15.56),
    "GLA, 8 heads": ("gla", 8, 15.29),
    "GLA, 1 head": ("gla", 1, 14.61),
}


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
    vocabulary: int = 0


SCALES = {
    "tiny": Scale(16, 1, 32, 2, 2, (1e-3, 4e-3), 2),
    # 14 M parameters, 105 M bytes.
    "full": Scale(512, 4, 2048, 32, 1600, (2e-3, 1e-3, 4e-3, 8e-3, 1.6e-2), 3),
}


def text_run(size: Scale, text: str, layer: str, heads: int, lr: float) -> Run:
    """A run on text, with seed 0."""
    sizes = {name: value for name, value in vars(size).items() if name not in ("rates", "seeds")}
    return Run(task="text", layer=layer, heads=heads, lr=lr, text=text, **sizes)


@dataclass(frozen=True)
class Comparison:
    """Variants beside one of them, on text.

    Attributes:
        variants: a layer and its heads, by a name; or these and the paper's perplexity, which then
            makes a column and orders the rows.
        beside: the variant that the others are compared with.
        heads: of the columns of names and of probabilities.
        measure: what is compared of a result, NaN of a run that diverged. Default: the score.
        unit: of what is compared.
        sizes: of the runs.
    """

    variants: Mapping[str, tuple]
    beside: str
    heads: tuple[str, str]
    measure: Callable[[Result], float] = attrgetter("score")
    unit: str = "bits a byte"
    sizes: Mapping[str, Scale] = field(default_factory=lambda: SCALES)

    def runs(self, scale: str, results: Results, text: str) -> Iterator[Run]:
        """Each variant at all rates, then its best rate with the other seeds."""
        return self._sweep(scale, results, text).runs(self.variants)

    def report(self, scale: str, results: Results, text: str, folder: Path) -> str:
        """A table of variants, with the probability that each is no other than `beside`, and what
        may be said; '' while there are no results.
        """
        sweep, scores = self._sweep(scale, results, text), self.scores(scale, results, text)
        papers = {name: of[2] for name, of in self.variants.items() if len(of) > 2}
        names = sorted(self.variants, key=lambda name: papers.get(name, 0))
        scores = {name: scores[name] for name in names if name in scores}
        found = {name: results.of(sweep.chosen(name, whole=False)) for name in names}
        measured = {name: [self.measure(x) for x in done] for name, done in found.items() if done}
        rows = []
        for name, of in measured.items():
            beside = (scores.get(name, ()), scores.get(self.beside, ()))
            p = "" if name == self.beside else p_value(*beside)
            paper = [f"{papers[name]:.2f}" if name in papers else ""] if papers else []
            size = _parameters(found[name][0])
            rows.append([name, *paper, spread(of, 4), p, sweep.rate_of(name), size])
        column = ["paper, perplexity"] if papers else []
        head = [self.heads[0], *column, f"here, {self.unit}", self.heads[1], "rate", "size"]
        ordered = order(scores, [name for name in names if name in papers]) if papers else ""
        edges = sweep.at_edges(names)
        said = " ".join(filter(None, (verdict(scores, self.beside), ordered, edges)))
        return f"{table(head, rows)}\n\n{said}" if rows else ""

    def scores(self, scale: str, results: Results, text: str) -> dict[str, list[float]]:
        """Of each variant what is compared of its seeds at the best rate so far, but of runs that
        diverged.
        """
        sweep = self._sweep(scale, results, text)
        found = {name: results.of(sweep.chosen(name, whole=False)) for name in self.variants}
        scores = {name: finite(map(self.measure, of)) for name, of in found.items()}
        return {name: of for name, of in scores.items() if of}

    def _sweep(self, scale: str, results: Results, text: str) -> Sweep:
        size = self.sizes[scale]

        def make(name: str, lr: float) -> Run:
            return text_run(size, text, *self.variants[name][:2], lr)

        return Sweep(make, size.rates, size.seeds, results)


def _parameters(result: Result) -> str:
    """How many; of tokens, also without embeddings and output matrix."""
    run, parameters = result.run, result.details["parameters"]
    without = parameters - 2 * run.vocabulary * run.width
    note = f" ({without / 1e6:.2f} M without embeddings)" if run.vocabulary else ""
    return f"{parameters / 1e6:.2f} M{note}"


comparison = Comparison(VARIANTS, "GLA, 4 heads", ("variant", "p, against GLA"))
runs, report = comparison.runs, comparison.report
