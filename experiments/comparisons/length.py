"""The loss by position far beyond the length of training (the paper's Figure 5), on text."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from experiments.comparisons.ablations import SCALES, Scale, text_run
from experiments.comparisons.figures import figure, line, table
from experiments.runs import Results, Run, at_edges, chosen, rate_of, swept

# Name: layer and heads, K = V = 64 a head of attention.
LAYERS = {"GLA": ("gla", 4), "RetNet": ("retnet", 4), "Transformer++": ("attention", 8)}
LONGER, SEGMENTS = 4, 12  # 8K, and 12 segments of 2K


def runs(scale: str, results: Results, text: str) -> Iterator[Run]:
    """Each layer at 2K at all rates; then, at its best rate, all lengths, seed after seed."""
    size = SCALES[scale]
    make = _make(size, text)
    yield from swept(LAYERS, make, size.rates, 1, results)
    for seed in range(size.seeds):
        for name in LAYERS:
            for run in _lengths(name, size, text, results).values():
                yield replace(run, seed=seed)


def _make(size: Scale, text: str):
    def make(name: str, lr: float) -> Run:
        return text_run(size, text, *LAYERS[name], lr)

    return make


def _lengths(
    name: str, size: Scale, text: str, results: Results, whole: bool = True
) -> dict[str, Run]:
    """The runs with seed 0 of one layer, of the same number of tokens a step.

    Args:
        name, size, text, results: what is asked for, and what is done.
        whole: before the layer's sweep is done, there are none; else those at the best rate so far.
            Default: True.
    """
    first = chosen(name, _make(size, text), size.rates, 1, results, whole)
    if not first:
        return {}
    (short,) = first
    T = short.seq_len
    batch_size = max(1, short.batch_size // LONGER)
    lengths = {
        f"{_kilo(T)}": short,
        f"{_kilo(LONGER * T)}": replace(short, seq_len=LONGER * T, batch_size=batch_size),
    }
    if name != "Transformer++":
        lengths[f"{SEGMENTS} x {_kilo(T)}"] = replace(short, segments=SEGMENTS)
    return lengths


def _kilo(length: int) -> str:
    return f"{length // 1024}K" if length % 1024 == 0 else str(length)


def report(scale: str, results: Results, text: str, folder: Path) -> str:
    """Draws experiments_length.png and returns the table of bits a byte at some positions."""
    size = SCALES[scale]
    done, diverged = {}, 0
    for name in LAYERS:
        for length, run in _lengths(name, size, text, results, whole=False).items():
            found = results.of(replace(run, seed=seed) for seed in range(size.seeds))
            curves = [result.details["by_position"] for result in found]
            diverged += curves.count([])
            if any(curves):
                done[name, length] = [curve for curve in curves if curve]
    if not done:
        return ""
    lengths = list(dict.fromkeys(length for _, length in done))
    with figure(folder / "experiments_length.png", len(lengths)) as axes:
        for axis, length in zip(axes, lengths, strict=True):
            for place, name in enumerate(LAYERS):
                points: dict[float, list[float]] = {}
                for curve in done.get((name, length), ()):
                    for position, bits in curve:
                        points.setdefault(position, []).append(bits)
                line(axis, name, points, f"C{place}")
            axis.set(title=f"trained at {length}", xlabel="position, bytes")
        low = min(bits for curves in done.values() for curve in curves for _, bits in curve)
        axes[0].set(ylabel="bits a byte", ylim=(low - 0.1, low + 2.5))
        axes[0].legend()
    rows = []
    for (name, length), curves in done.items():
        n = len(curves[0])
        # Of 64 stretches: the first eight, that is 4K of 32K, and so on.
        edges = [0, n // 8, n // 4, n // 2, n]
        cells = [
            _of_part([[bits for _, bits in curve[a:e]] for curve in curves])
            for a, e in itertools.pairwise(edges)
        ]
        rate = rate_of(name, _make(size, text), size.rates, results)
        rows.append([name, length, *cells, rate, str(len(curves))])
    head = ["model", "trained at", "first 8th", "second 8th", "second quarter", "second half"]
    page = table([*head, "rate", "seeds"], rows)
    parts = ["![bits a byte by position](experiments_length.png)", page]
    if edges := at_edges(LAYERS, _make(size, text), size.rates, results):
        parts.append(edges)
    if diverged:
        parts.append(f"Runs that diverged, which are in no row: {diverged}.")
    return "\n\n".join(parts)


def _of_part(parts: list[list[float]]) -> str:
    """The mean over a part of the positions, and its standard deviation over seeds."""
    means = [statistics.fmean(part) for part in parts if part]
    if not means:
        return ""
    mean = f"{statistics.fmean(means):.3f}"
    return mean if len(means) == 1 else f"{mean} ± {statistics.stdev(means):.3f}"
