"""Multi-query associative recall: accuracy against a model's width (the paper's Figure 4)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from experiments.figures import figure, line, table
from experiments.runs import Result, Results, Run, chosen, spread, swept

LAYERS = ("attention", "gla", "retnet", "head gate", "no gate")
# After all others, and not where a run of theirs would take more than eight minutes.
SLOW_LAYERS = ("mamba", "rwkv")


@dataclass(frozen=True)
class Scale:
    """Sizes of the experiment: (seq_len, pairs, batch_size) of each difficulty, the hardest last;
    rates are swept at swept_width on the hardest.
    """

    difficulties: tuple[tuple[int, int, int], ...]
    widths: tuple[int, ...]
    swept_width: int
    rates: tuple[float, ...]
    seeds: int
    steps: int


SCALES = {
    "tiny": Scale(((16, 2, 4), (32, 4, 4)), (16, 32), 16, (1e-3, 1e-2), 2, 2),
    # Zoology's difficulties, and its rates without the lowest, which was best for none.
    "full": Scale(
        ((64, 4, 512), (128, 8, 256), (256, 16, 256), (512, 64, 128)),
        (64, 128, 256, 512),
        128,
        (4.6e-4, 2.2e-3, 1e-2),
        3,
        4000,
    ),
}


def runs(scale: str, results: Results, text: str) -> Iterator[Run]:
    """The sweep; then every difficulty and width at each layer's best rate, seed after seed."""
    size = SCALES[scale]
    hardest = size.difficulties[-1]
    yield from swept(
        LAYERS, lambda *of: _run(size, hardest, size.swept_width, *of), size.rates, 1, results
    )
    for seed in range(size.seeds):
        for difficulty in reversed(size.difficulties):
            for width in size.widths:
                for layer in LAYERS:
                    yield from _chosen(size, difficulty, width, layer, results)[seed : seed + 1]


def _chosen(
    size: Scale, difficulty: tuple[int, int, int], width: int, layer: str, results: Results
) -> list[Run]:
    """The runs, one a seed, at the rate that is best at the swept size."""
    hardest = size.difficulties[-1]
    swept_at_best = chosen(
        layer,
        lambda *of: _run(size, hardest, size.swept_width, *of),
        size.rates,
        size.seeds,
        results,
    )
    return [
        _run(size, difficulty, width, layer, run.lr, seed) for seed, run in enumerate(swept_at_best)
    ]


def _run(
    size: Scale, difficulty: tuple[int, int, int], width: int, layer: str, lr: float, seed: int = 0
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
        steps=size.steps,
        lr=lr,
        seed=seed,
        pairs=pairs,
    )


def report(scale: str, results: Results, text: str, folder: Path) -> str:
    """Draws mqar.png and returns the table."""
    size = SCALES[scale]
    done = {
        (difficulty, layer, width): results.of(_chosen(size, difficulty, width, layer, results))
        for difficulty in size.difficulties
        for layer in LAYERS
        for width in size.widths
    }
    if not any(done.values()):
        return ""
    with figure(folder / "experiments_mqar.png", len(size.difficulties)) as axes:
        for axis, difficulty in zip(axes, size.difficulties, strict=True):
            for layer in LAYERS:
                found: dict[float, list[Result]] = {
                    w: done[difficulty, layer, w] for w in size.widths
                }
                line(axis, layer, {w: [r.score for r in rs] for w, rs in found.items() if rs})
            axis.set_xscale("log", base=2)
            axis.set_xticks(size.widths, [str(width) for width in size.widths])
            axis.set(title=f"{difficulty[0]} tokens, {difficulty[1]} pairs", xlabel="width")
            axis.set_ylim(-0.02, 1.02)
        axes[0].set_ylabel("accuracy")
        axes[-1].legend()
    rows = []
    for difficulty in reversed(size.difficulties):
        for layer in LAYERS:
            cells = [spread(done[difficulty, layer, width], 3) for width in size.widths]
            if any(cells):
                rate = next(r.run.lr for w in size.widths for r in done[difficulty, layer, w])
                rows.append([f"{difficulty[0]}, {difficulty[1]}", layer, f"{rate:g}", *cells])
    head = ["tokens, pairs", "layer", "rate", *(f"width {width}" for width in size.widths)]
    return f"![accuracy against width](experiments_mqar.png)\n\n{table(head, rows)}"
