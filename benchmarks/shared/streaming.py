"""What the benchmarks of memory-bound operators share: both modes, the floor, the table."""

from collections.abc import Callable

import torch
from shared.timing import Timing, cold
from torch import Tensor

MODES = ("forward", "forward + backward")


def time_modes(
    functions: dict[str, Callable], leaves: list[Tensor | None], dy: Tensor
) -> dict[str, dict[str, Timing]]:
    """Timings by mode and name of functions of the leaves, of which absent ones are None."""
    there = [t for t in leaves if t is not None]
    calls = {
        "forward": lambda f: lambda: f(*leaves),
        "forward + backward": lambda f: lambda: torch.autograd.grad(f(*leaves), there, dy),
    }
    return {
        mode: cold({name: calls[mode](function) for name, function in functions.items()})
        for mode in MODES
    }


def gradients_of(
    function: Callable, leaves: dict[str, Tensor | None], dy: Tensor
) -> dict[str, Tensor]:
    """y, and the gradients of the leaves that are there by their names."""
    there = {f"d{name}": t for name, t in leaves.items() if t is not None}
    y = function(*leaves.values())
    gradients = torch.autograd.grad(y, list(there.values()), dy)
    return {"y": y.detach(), **dict(zip(there, gradients, strict=True))}


def add_floor(row: dict[str, Timing], moved_bytes: int, bytes_per_s: float) -> None:
    """Adds the time that a copy takes to move as much."""
    floor = 1e3 * moved_bytes / bytes_per_s
    row["floor"] = Timing(floor, floor, floor, 0)


def print_table(shapes: str, names: tuple[str, ...], table: dict[str, dict]) -> None:
    """Milliseconds by shape, mode and name; `shapes` says what a shape's numbers are."""
    print(f"| ms, {shapes} | | {' | '.join(names)} |")
    print("|---|---|" + "--:|" * len(names))
    for shape, timings in table.items():
        for mode, row in timings.items():
            cells = (str(row[name]) if name in row else "" for name in names)
            print(f"| {shape} | {mode} | {' | '.join(cells)} |")
