"""Pictures of the pages of results."""

import contextlib
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


def can_be_drawn() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


@contextlib.contextmanager
def panels(path: Path, count: int, size: tuple[float, float], **options: Any) -> Iterator[tuple]:
    """A figure and its axes, side by side, which are saved as PNG at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, count, figsize=size, layout="constrained", squeeze=False, **options
    )
    for axis in axes[0]:
        axis.grid(alpha=0.3)
    yield figure, axes[0]
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def over_lengths(axis: Any, lengths: Sequence[int], **labels: Any) -> None:
    """A logarithmic axis of lengths, with those as its ticks."""
    axis.set(xscale="log", **labels)
    axis.set_xticks(lengths, [str(T) for T in lengths])
    axis.set_xticks([], minor=True)
