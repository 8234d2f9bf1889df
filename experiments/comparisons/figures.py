"""Figures and tables of results."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gla_ext.model.files import replacing


@contextlib.contextmanager
def figure(path: Path, panels: int = 1) -> Iterator[Sequence[Any]]:
    """Gives axes side by side, which are saved as PNG at the end."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    width = 4.2 * panels if panels > 1 else 7.5
    drawn, axes = plt.subplots(
        1, panels, figsize=(width, 4), layout="constrained", sharey=True, squeeze=False
    )
    try:
        for axis in axes[0]:
            axis.grid(alpha=0.3)
        yield axes[0]
        with replacing(path) as file:
            # Nothing in it says when, so that the same results make the same file.
            drawn.savefig(file, dpi=110, metadata={"Software": None})
    finally:
        plt.close(drawn)


MARKERS = "osv^DPX*h"  # of lines that lie on each other


def line(
    axis: Any, label: str, points: dict[float, list[float]], color: str, marker: str = ""
) -> None:
    """Means over seeds, and a band from the lowest to the highest."""
    if not points:
        return
    x = sorted(points)
    means = [statistics.fmean(points[place]) for place in x]
    axis.plot(x, means, marker=marker, ms=5, color=color, label=label)
    low, high = ([edge(points[place]) for place in x] for edge in (min, max))
    axis.fill_between(x, low, high, color=color, alpha=0.15, lw=0)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, its first column to the left."""
    rule = ["---", *("--:" for _ in head[1:])]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))
