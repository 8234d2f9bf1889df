"""The loss by position far beyond the length of training (the paper's Figure 5), on text."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from experiments.comparisons.ablations import SCALES, Scale, text_run
from experiments.comparisons.figures import figure, line, table
from experiments.runs import Results, Run, Sweep

# Name: layer and heads, K = V = 64 a head of attention.
LAYERS = {"GLA": ("gla", 4), "RetNet": ("retnet", 4), "Transformer++": ("attention", 8)}
LONGER, SEGMENTS = 4, 12  # 8K, and 12 segments of 2K
NEAR = f"{LONGER} in a row"  # rows of a batch: as few places of the text as at 8K, at 2K


def runs(scale: str, results: Results, text: str) -> Iterator[Run]:
    """Each layer at each length at all rates, then its best rate there with the other seeds."""
    yield from _sweep(scale, results, text).runs(_trained(SCALES[scale]))


def _trained(size: Scale) -> dict[str, tuple[str, str, dict[str, int]]]:
    """What is trained, by a name such as "GLA at 8K": the layer, the length, and the settings of a
    run that the length changes. The number of tokens a step is always the same. There is no
    Transformer++ in segments, because it has no state to pass to the next segment. GLA alone is
    also trained on the batches of the longer length in parts, each from no state.
    """
    T, longer = size.seq_len, LONGER * size.seq_len
    lengths = {
        _kilo(T): {},
        _kilo(longer): {"seq_len": longer, "batch_size": max(1, size.batch_size // LONGER)},
        f"{SEGMENTS} x {_kilo(T)}": {"segments": SEGMENTS},
        f"{_kilo(T)}, {NEAR}": {"consecutive": min(LONGER, size.batch_size)},
    }
    return {
        f"{layer} at {length}": (layer, length, changes)
        for layer in LAYERS
        for length, changes in lengths.items()
        if not (layer == "Transformer++" and "segments" in changes)
        if not (layer != "GLA" and "consecutive" in changes)
    }


def _sweep(scale: str, results: Results, text: str) -> Sweep:
    size = SCALES[scale]
    trained = _trained(size)

    def make(name: str, lr: float) -> Run:
        layer, _, changes = trained[name]
        return replace(text_run(size, text, *LAYERS[layer], lr), **changes)

    return Sweep(make, size.rates, size.seeds, results)


def _kilo(length: int) -> str:
    return f"{length // 1024}K" if length % 1024 == 0 else str(length)


def report(scale: str, results: Results, text: str, folder: Path) -> str:
    """Draws experiments_length.png and returns the table of bits a byte at some positions."""
    sweep = _sweep(scale, results, text)
    trained, done = _trained(SCALES[scale]), {}
    every = set(sweep.runs(trained))
    for name in trained:
        asked = sweep.chosen(name, whole=False)
        every |= set(asked)
        curves = [result.details["by_position"] for result in results.of(asked)]
        if any(curves):
            done[name] = [curve for curve in curves if curve]
    if not done:
        return ""
    lengths = list(dict.fromkeys(trained[name][1] for name in done))
    with figure(folder / "experiments_length.png", len(lengths)) as axes:
        for axis, length in zip(axes, lengths, strict=True):
            for place, layer in enumerate(LAYERS):
                points: dict[float, list[float]] = {}
                for curve in done.get(f"{layer} at {length}", ()):
                    for position, bits in curve:
                        points.setdefault(position, []).append(bits)
                line(axis, layer, points, f"C{place}")
            axis.set(title=f"trained at {length}", xlabel="position, bytes")
        low = min(bits for curves in done.values() for curve in curves for _, bits in curve)
        axes[0].set(ylabel="bits a byte", ylim=(low - 0.1, low + 2.5))
        axes[0].legend()
    rows = []
    for name, curves in done.items():
        n = len(curves[0])
        # Of 64 stretches: the first eight, that is 4K of 32K, and so on.
        edges = [0, n // 8, n // 4, n // 2, n]
        cells = [
            _of_part([[bits for _, bits in curve[a:e]] for curve in curves])
            for a, e in itertools.pairwise(edges)
        ]
        rows.append([*trained[name][:2], *cells, sweep.rate_of(name), str(len(curves))])
    head = ["model", "trained at", "first 8th", "second 8th", "second quarter", "second half"]
    page = table([*head, "rate", "seeds"], rows)
    parts = ["![bits a byte by position](experiments_length.png)", page]
    if edges := sweep.at_edges(trained):
        parts.append(edges)
    if diverged := sum(not result.details["by_position"] for result in results.of(every)):
        parts.append(f"Runs that diverged, which are in no row: {diverged}.")
    return "\n\n".join(parts)


def _of_part(parts: list[list[float]]) -> str:
    """The mean over a part of the positions, and its standard deviation over seeds."""
    means = [statistics.fmean(part) for part in parts if part]
    if not means:
        return ""
    mean = f"{statistics.fmean(means):.3f}"
    return mean if len(means) == 1 else f"{mean} ± {statistics.stdev(means):.3f}"


def shortest(scale: str) -> str:
    """The name of the shortest length of training."""
    return _kilo(SCALES[scale].seq_len)


def ends(
    scale: str, results: Results, text: str
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Of what is trained, one a seed: mean bits a byte of the first 8th, and of the second half."""
    sweep = _sweep(scale, results, text)
    found: tuple[dict[str, list[float]], dict[str, list[float]]] = ({}, {})
    for name in _trained(SCALES[scale]):
        for result in results.of(sweep.chosen(name, whole=False)):
            bits = [bits for _, bits in result.details["by_position"]]
            parts = (bits[: max(1, len(bits) // 8)], bits[len(bits) // 2 :])
            for of, part in zip(found, parts, strict=True):
                if bits:
                    of.setdefault(name, []).append(statistics.fmean(part))
    return found
