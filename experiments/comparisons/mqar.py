"""Multi-query associative recall: accuracy against a model's width (the paper's Figure 4)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.comparisons.figures import MARKERS, figure, line, table
from experiments.runs import Result, Results, Run, Sweep, how_many_at_edges, spread

LAYERS = ("attention", "gla", "retnet", "head gate", "no gate", "gla, convolution")
# What figures and tables call the layers, here and in `budget`.
LABELS = {
    "attention": "attention",
    "gla": "GLA",
    "retnet": "RetNet",
    "head gate": "one gate a head",
    "no gate": "no gate",
    "gla, convolution": "GLA, convolution",
    "hyena": "Hyena",
    "mamba": "Mamba",
    "rwkv": "RWKV-4",
}
Difficulty = tuple[int, int, int]  # seq_len, pairs, batch_size


@dataclass(frozen=True)
class Scale:
    """Sizes of the experiment: difficulties, the hardest last, and widths.

    Rates are swept at swept_width, on each difficulty.
    """

    difficulties: tuple[Difficulty, ...]
    widths: tuple[int, ...]
    swept_width: int
    rates: tuple[float, ...]
    seeds: int
    steps: int
    examples: int


SCALES = {
    "tiny": Scale(((16, 2, 4), (32, 4, 4)), (16,), 16, (1e-3, 1e-2), 2, 2, 20),
    # Zoology's tasks, sizes of batches and number of examples; its rates lie between 1e-4 and 1e-2.
    "full": Scale(
        ((64, 4, 512), (128, 8, 512), (256, 16, 256), (512, 64, 128)),
        (64, 128, 256, 512),
        128,
        (3.2e-3, 1e-3, 1e-2),
        3,
        5_000,
        100_000,
    ),
}


def runs(scale: str, results: Results, text: str) -> Iterator[Run]:
    """Of each task the sweep, then all widths at the best rate; then all again, seed after seed."""
    size = SCALES[scale]
    for seed in range(size.seeds):
        for task in size.difficulties:
            if seed == 0:
                yield from _sweep(size, task, results, seeds=1).runs(LAYERS)
            for width in size.widths:
                for layer in LAYERS:
                    found = _chosen(size, task, width, layer, results)
                    yield from found[seed : seed + 1]


def _sweep(size: Scale, task: Difficulty, results: Results, seeds: int | None = None) -> Sweep:
    """At the swept width."""

    def make(layer: str, lr: float) -> Run:
        return _run(size, task, size.swept_width, layer, lr)

    return Sweep(make, size.rates, size.seeds if seeds is None else seeds, results)


def _chosen(
    size: Scale, task: Difficulty, width: int, layer: str, results: Results, whole: bool = True
) -> list[Run]:
    """The runs, one a seed, at the rate that is best at the swept width."""
    at_best = _sweep(size, task, results).chosen(layer, whole)
    return [_run(size, task, width, layer, run.lr, run.seed) for run in at_best]


def _run(
    size: Scale, difficulty: Difficulty, width: int, layer: str, lr: float, seed: int = 0
) -> Run:
    seq_len, pairs, batch_size = difficulty
    task = {"seq_len": seq_len, "pairs": pairs, "batch_size": batch_size}
    model = {"layer": layer, "width": width, "layers": 2, "heads": 2, "tied": True}
    sizes = {"steps": size.steps, "examples": size.examples}
    return Run("recall", **model, **task, **sizes, lr=lr, seed=seed)


def done(scale: str, results: Results) -> dict[Difficulty, dict[str, dict[int, list[Result]]]]:
    """What is done, one a seed, of each task, layer and width."""
    size = SCALES[scale]
    return {
        task: {
            layer: {
                width: results.of(_chosen(size, task, width, layer, results, whole=False))
                for width in size.widths
            }
            for layer in LAYERS
        }
        for task in size.difficulties
    }


def draw(axis: Any, layer: str, points: dict[float, list[float]]) -> None:
    """A layer's line, which has the same color and marker in every figure."""
    place = list(LABELS).index(layer)
    line(axis, LABELS[layer], points, f"C{place}", MARKERS[place])


def report(scale: str, results: Results, text: str, folder: Path) -> str:
    """Draws experiments_mqar.png, of the tasks that are begun, and returns the table."""
    size, found = SCALES[scale], done(scale, results)
    begun = [task for task in found if any(any(of.values()) for of in found[task].values())]
    if not begun:
        return ""
    with figure(folder / "experiments_mqar.png", len(begun)) as axes:
        for axis, task in zip(axes, begun, strict=True):
            for place, (layer, of) in enumerate(found[task].items()):
                beside = 1.02 ** (place - len(LAYERS) / 2)  # or many would lie on one at 1
                points = {w * beside: [r.score for r in own] for w, own in of.items() if own}
                draw(axis, layer, points)
            axis.set_xscale("log", base=2)
            axis.set_xticks(size.widths, [str(width) for width in size.widths])
            axis.set_xlim(size.widths[0] / 1.25, size.widths[-1] * 1.25)
            axis.set(title=f"{task[0]} tokens, {task[1]} pairs", xlabel="width")
            axis.set_ylim(-0.02, 1.02)
        axes[0].set_ylabel("accuracy")
        drawn = axes[0].get_legend_handles_labels()
        axes[0].figure.legend(*drawn, loc="outside lower center", ncols=len(LAYERS))
    rows = []
    for task in reversed(begun):
        for layer, of in found[task].items():
            if any(of.values()):
                rate = _sweep(size, task, results).rate_of(layer)
                cells = [spread([r.score for r in of[width]]) for width in size.widths]
                rows.append([f"{task[0]}, {task[1]}", LABELS[layer], rate, *cells])
    head = ["tokens, pairs", "layer", "rate", *(f"width {width}" for width in size.widths)]
    parts = ["![accuracy against width](experiments_mqar.png)", table(head, rows)]
    edges = how_many_at_edges((_sweep(size, task, results), x) for task in begun for x in LAYERS)
    return "\n\n".join(part for part in (*parts, edges) if part)
