"""Recall with the whole of Zoology's budget, for what has not learned it in less (`mqar`).

A task is an experiment: seed 0 at all rates, width after width, so that a width is a complete
column of the table; then the best rate of each layer and width with the other seeds. Width 256
comes first: with two heads and half as many key channels, a head has 64, one for each pair of the
hardest task.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.comparisons import mqar
from experiments.comparisons.figures import figure, table
from experiments.recall import SOLVED
from experiments.runs import Result, Results, Run, Sweep, how_many_at_edges, spread

BORROWED = ("hyena", "mamba", "rwkv")
LAYERS = ("attention", "gla", "gla, convolution", "retnet", "head gate", *BORROWED)
RATES = {"tiny": (1e-3, 1e-2), "full": (4.6e-4, 2.2e-3, 1e-4, 1e-2)}
PASSES = {"tiny": 0.4, "full": 64}
FIRST_WIDTH = 256


def _in_order(widths: Iterable[int]) -> list[int]:
    return sorted(widths, key=lambda width: width != FIRST_WIDTH)


def _curve(runs: Sequence[Sequence[tuple[int, float]]]) -> dict[float, list[float]]:
    """Accuracies of all runs at each evaluation; a run that has solved the task stays as it is."""
    places = sorted({update for run in runs for update, _ in run})
    return {u: [[score for at, score in run if at <= u][-1] for run in runs] for u in places}


@dataclass(frozen=True)
class Budget:
    """One task of `mqar`.

    place: from its hardest, 0, on which every layer gets the whole budget.
    """

    place: int

    def runs(self, scale: str, results: Results, text: str) -> Iterator[Run]:
        """Of each width the sweeps, then the other seeds; none of a scale with fewer tasks."""
        if self.place >= len(mqar.SCALES[scale].difficulties):
            return
        for width in _in_order(mqar.SCALES[scale].widths):
            layers = [x for x in LAYERS if self._is_open(scale, x, width, results)]
            yield from self._sweep(scale, width, results).runs(layers)

    def _is_open(self, scale: str, layer: str, width: int, results: Results) -> bool:
        """Whether the updates of `mqar` were too few, or were not tried."""
        size = mqar.SCALES[scale]
        if self.place == 0 or layer in BORROWED:
            return True
        task = size.difficulties[-1 - self.place]
        done = results.of(mqar._chosen(size, task, width, layer, results, whole=False))
        return not done or any(result.score < SOLVED for result in done)

    def _sweep(self, scale: str, width: int, results: Results) -> Sweep:
        size = mqar.SCALES[scale]
        seq_len, pairs, batch_size = size.difficulties[-1 - self.place]
        steps = round(PASSES[scale] * size.examples / batch_size)
        task = {"seq_len": seq_len, "pairs": pairs, "batch_size": batch_size, "steps": steps}
        sizes = {"width": width, "layers": 2, "heads": 2, "tied": True, "examples": size.examples}

        def make(layer: str, lr: float) -> Run:
            return Run("recall", layer=layer, lr=lr, **sizes, **task)

        return Sweep(make, RATES[scale], size.seeds, results, SOLVED)

    def done(self, scale: str, results: Results) -> dict[str, dict[int, list[Result]]]:
        """What is done at the best rates so far, one a seed, of each layer and width."""
        size = mqar.SCALES[scale]
        if self.place >= len(size.difficulties):
            return {}
        sweeps = {width: self._sweep(scale, width, results) for width in size.widths}
        return {
            layer: {w: results.of(sweep.chosen(layer, whole=False)) for w, sweep in sweeps.items()}
            for layer in LAYERS
        }

    def report(self, scale: str, results: Results, text: str, folder: Path) -> str:
        """Draws accuracy over updates at the first width, and over widths once two of them are
        complete; returns a table of accuracies and rates.
        """
        size, found = mqar.SCALES[scale], self.done(scale, results)
        drawn = {layer: of for layer, of in found.items() if any(of.values())}
        if not drawn:
            return ""
        seq_len, pairs, _ = size.difficulties[-1 - self.place]
        sweeps = {width: self._sweep(scale, width, results) for width in size.widths}
        name, rows = f"experiments_budget_{seq_len}.png", []
        widths = [w for w in _in_order(size.widths) if any(of[w] for of in drawn.values())]
        complete = [
            w
            for w in widths
            if all(found[x][w] for x in LAYERS if self._is_open(scale, x, w, results))
        ]
        with figure(folder / name, min(2, len(complete)) or 1) as (over_updates, *over_widths):
            for layer, of in drawn.items():
                curve = _curve([result.details["accuracies"] for result in of[widths[0]]])
                points = {w: [result.score for result in done] for w, done in of.items() if done}
                for axis, what in zip((over_updates, *over_widths), (curve, points), strict=False):
                    mqar.draw(axis, layer, what)
                cells = [spread([result.score for result in done]) for done in of.values()]
                rates = [f" at {sweep.rate_of(layer)}" for sweep in sweeps.values()]
                rows.append(
                    [mqar.LABELS[layer]]
                    + [c + r if c else "" for c, r in zip(cells, rates, strict=True)]
                )
            task = f"{pairs} pairs in {seq_len} tokens"
            over_updates.set(
                title=f"{task}, width {widths[0]}", xlabel="updates", ylabel="accuracy"
            )
            over_updates.set_ylim(-0.02, 1.02)
            for axis in over_widths:
                axis.set_xscale("log", base=2)
                axis.set(title=task, xlabel="width")
                axis.set_xticks(size.widths, [str(width) for width in size.widths])
                axis.set_xlim(size.widths[0] / 1.25, size.widths[-1] * 1.25)
            lines: dict[str, Any] = {}  # a layer may have run at other widths alone
            for axis in (over_updates, *over_widths):
                handles, names = axis.get_legend_handles_labels()
                lines |= dict(zip(names, handles, strict=True))
            over_updates.figure.legend(lines.values(), lines, loc="outside lower center", ncols=4)
        head = ["layer", *(f"width {width}" for width in size.widths)]
        parts = [f"![accuracy over updates]({name})", table(head, rows)]
        edges = how_many_at_edges((sweep, x) for sweep in sweeps.values() for x in drawn)
        return "\n\n".join(part for part in (*parts, edges) if part)
