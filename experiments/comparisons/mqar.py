"""Multi-query associative recall: accuracy against a model's width (the paper's Figure 4)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from experiments.comparisons.figures import figure, line, table
from experiments.runs import Result, Results, Run, chosen, spread, swept

LAYERS = ("attention", "gla", "retnet", "head gate", "no gate", "gla, convolution")
SLOW_LAYERS = ("mamba", "rwkv")  # on the easiest task alone, half as long, after all others
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
    """The sweep of each task; then every task and width at its best rate, seed after seed."""
    size = SCALES[scale]
    for layers in (LAYERS, SLOW_LAYERS):
        tasks = size.difficulties if layers is LAYERS else size.difficulties[:1]
        for task in tasks:
            yield from swept(layers, _swept_run(size, task), size.rates, 1, results)
        for seed in range(size.seeds):
            for task in tasks:
                for width in size.widths:
                    for layer in layers:
                        found = _chosen(size, task, width, layer, results)
                        yield from found[seed : seed + 1]


def _swept_run(size: Scale, task: Difficulty):
    def make(layer: str, lr: float) -> Run:
        return _run(size, task, size.swept_width, layer, lr)

    return make


def _chosen(size: Scale, task: Difficulty, width: int, layer: str, results: Results) -> list[Run]:
    """The runs, one a seed, at the rate that is best at the swept width."""
    at_best = chosen(layer, _swept_run(size, task), size.rates, size.seeds, results)
    return [_run(size, task, width, layer, run.lr, run.seed) for run in at_best]


def _run(
    size: Scale, difficulty: Difficulty, width: int, layer: str, lr: float, seed: int = 0
) -> Run:
    seq_len, pairs, batch_size = difficulty
    return Run(
        task="recall",
        layer=layer,
        width=width,
        layers=2,
        heads=2,
        seq_len=seq_len,
        batch_size=batch_size,
        steps=size.steps // 2 if layer in SLOW_LAYERS else size.steps,
        lr=lr,
        seed=seed,
        pairs=pairs,
        examples=size.examples,
        tied=True,
    )


def report(scale: str, results: Results, text: str, folder: Path) -> str:
    """Draws experiments_mqar.png and returns the table."""
    size = SCALES[scale]
    layers = (*LAYERS, *SLOW_LAYERS)
    done = {
        (difficulty, layer, width): results.of(_chosen(size, difficulty, width, layer, results))
        for difficulty in size.difficulties
        for layer in layers
        for width in size.widths
    }
    if not any(done.values()):
        return ""
    with figure(folder / "experiments_mqar.png", len(size.difficulties)) as axes:
        for axis, difficulty in zip(axes, size.difficulties, strict=True):
            for layer in layers:
                found: dict[float, list[Result]] = {
                    width: done[difficulty, layer, width] for width in size.widths
                }
                line(axis, layer, {w: [r.score for r in rs] for w, rs in found.items() if rs})
            axis.set_xscale("log", base=2)
            axis.set_xticks(size.widths, [str(width) for width in size.widths])
            axis.set(title=f"{difficulty[0]} tokens, {difficulty[1]} pairs", xlabel="width")
            axis.set_ylim(-0.02, 1.02)
        axes[0].set_ylabel("accuracy")
        axes[0].legend()
    rows = []
    for difficulty in reversed(size.difficulties):
        for layer in layers:
            cells = [spread(done[difficulty, layer, width]) for width in size.widths]
            if any(cells):
                rate = next(r.run.lr for w in size.widths for r in done[difficulty, layer, w])
                rows.append([f"{difficulty[0]}, {difficulty[1]}", layer, f"{rate:g}", *cells])
    head = ["tokens, pairs", "layer", "rate", *(f"width {width}" for width in size.widths)]
    return f"![accuracy against width](experiments_mqar.png)\n\n{table(head, rows)}"
