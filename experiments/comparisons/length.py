"""The loss by position far beyond the length of training (the paper's Figure 5), on text."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.comparisons.ablations import SCALES, Scale, text_run
from experiments.comparisons.figures import figure, line, table
from experiments.comparisons.tokens import AT_32K
from experiments.models import has_state
from experiments.runs import Results, Run, Sweep

LONGER, SEGMENTS = 4, 12  # 8K, and 12 segments of 2K
NEAR = f"{LONGER} in a row"  # rows of a batch: as few places of the text as at 8K, at 2K


@dataclass(frozen=True)
class Lengths:
    """Layers at several lengths of training.

    Attributes:
        layers: a layer and its heads, by a name; attention has K = V = 64 a head.
        sizes: of the runs, at the shortest length.
        figure: the name of its file.
    """

    layers: Mapping[str, tuple[str, int]]
    sizes: Mapping[str, Scale]
    figure: str

    def runs(self, scale: str, results: Results, text: str) -> Iterator[Run]:
        """Each layer at each length at all rates, then its best rate there with the other seeds."""
        yield from self._sweep(scale, results, text).runs(self._trained(scale))

    def _trained(self, scale: str) -> dict[str, tuple[str, str, dict[str, int]]]:
        """What is trained, by a name such as "GLA at 8K": the layer, the length, and the settings
        of a run that the length changes. The number of tokens a step is always the same. What has
        no state to pass to the next segment is not trained in segments. GLA alone is also trained
        on the batches of the longer length in parts, each from no state.
        """
        size = self.sizes[scale]
        short, longer, segments = self.lengths(scale)
        few = max(1, size.batch_size // LONGER)
        lengths = {
            short: {},
            longer: {"seq_len": LONGER * size.seq_len, "batch_size": few},
            segments: {"segments": SEGMENTS},
            f"{short}, {NEAR}": {"consecutive": min(LONGER, size.batch_size)},
        }
        return {
            f"{layer} at {length}": (layer, length, changes)
            for layer in self.layers
            for length, changes in lengths.items()
            if not ("segments" in changes and not has_state(self.layers[layer][0]))
            if not (layer != "GLA" and "consecutive" in changes)
        }

    def _sweep(self, scale: str, results: Results, text: str) -> Sweep:
        size = self.sizes[scale]
        trained = self._trained(scale)

        def make(name: str, lr: float) -> Run:
            layer, _, changes = trained[name]
            return replace(text_run(size, text, *self.layers[layer], lr), **changes)

        return Sweep(make, size.rates, size.seeds, results)

    def report(self, scale: str, results: Results, text: str, folder: Path) -> str:
        """Draws the figure and returns the table of bits a byte at some positions."""
        sweep = self._sweep(scale, results, text)
        trained, done = self._trained(scale), {}
        every = set(sweep.runs(trained))
        for name in trained:
            asked = sweep.chosen(name, whole=False)
            every |= set(asked)
            curves = [result.details["by_position"] for result in results.of(asked)]
            if any(curves):
                done[name] = [curve for curve in curves if curve]
        if not done:
            return ""
        unit = "tokens" if self.sizes[scale].vocabulary else "bytes"
        lengths = list(dict.fromkeys(trained[name][1] for name in done))
        with figure(folder / self.figure, len(lengths)) as axes:
            for axis, length in zip(axes, lengths, strict=True):
                for place, layer in enumerate(self.layers):
                    points: dict[float, list[float]] = {}
                    for curve in done.get(f"{layer} at {length}", ()):
                        for position, bits in curve:
                            points.setdefault(position, []).append(bits)
                    line(axis, layer, points, f"C{place}")
                axis.set(title=f"trained at {length}", xlabel=f"position, {unit}")
                axis.locator_params("x", nbins=5)
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
        parts = [f"![bits a byte by position]({self.figure})", page]
        if edges := sweep.at_edges(trained):
            parts.append(edges)
        if diverged := sum(not result.details["by_position"] for result in results.of(every)):
            parts.append(f"Runs that diverged, which are in no row: {diverged}.")
        return "\n\n".join(parts)

    def lengths(self, scale: str) -> tuple[str, str, str]:
        """The names of the shortest length of training, of a longer one, and of segments."""
        size = self.sizes[scale].seq_len
        return _kilo(size), _kilo(LONGER * size), f"{SEGMENTS} x {_kilo(size)}"

    def ends(
        self, scale: str, results: Results, text: str
    ) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
        """Mean bits a byte of the first 8th and the second half, by what is trained, one a seed;
        none of what is not done.
        """
        sweep = self._sweep(scale, results, text)
        found = defaultdict(list), defaultdict(list)
        for name in self._trained(scale):
            for result in results.of(sweep.chosen(name, whole=False)):
                bits = [bits for _, bits in result.details["by_position"]]
                parts = (bits[: max(1, len(bits) // 8)], bits[len(bits) // 2 :])
                for of, part in zip(found, parts, strict=True):
                    if bits:
                        of[name].append(statistics.fmean(part))
        return found


def _kilo(length: int) -> str:
    return f"{length // 1024}K" if length % 1024 == 0 else str(length)


def _of_part(parts: list[list[float]]) -> str:
    """The mean over a part of the positions, and its standard deviation over seeds."""
    means = [statistics.fmean(part) for part in parts if part]
    if not means:
        return ""
    mean = f"{statistics.fmean(means):.3f}"
    return mean if len(means) == 1 else f"{mean} ± {statistics.stdev(means):.3f}"


LAYERS = {"GLA": ("gla", 4), "RetNet": ("retnet", 4), "Transformer++": ("attention", 8)}
comparison = Lengths(LAYERS, SCALES, "experiments_length.png")
runs, report = comparison.runs, comparison.report
_AND_MAMBA = LAYERS | {"Mamba": ("mamba", 1)}
ON_TOKENS = Lengths(_AND_MAMBA, AT_32K.sizes, "experiments_length_tokens.png")
