"""Time over T at H 4, K 128, V 256, beside the floor, and its picture."""

from pathlib import Path

import bench_cuda as bench

HEADS = (4, 128, 256)
LENGTHS = tuple(2**n for n in range(10, 18))
BATCHES = (1, 32)
MAX_TOKENS = 2**20  # B * T; inputs, gradients and FLA's intermediates then take 50 GiB
COLORS = {1: "tab:blue", 32: "tab:red"}
STYLES = {"gla_ext": "-", "steps": "--", "FLA": "-.", "floor": ":"}


def shapes() -> dict[str, tuple[int, ...]]:
    """Shapes by name; those of a batch follow one another."""
    found = [(B, T, *HEADS) for B in BATCHES for T in LENGTHS if B * T <= MAX_TOKENS]
    return {"x".join(map(str, shape)): shape for shape in found}


def timed(shapes_timed: dict[str, dict]) -> dict[str, dict]:
    """Speed of those of the picture's shapes that were timed for another part."""
    rows = {name: shapes_timed.get(name, {}) for name in shapes()}
    return {name: row["speed"] for name, row in rows.items() if "speed" in row}


def lines(results: dict, mode: str) -> dict[tuple[int, str], dict[int, float]]:
    """Milliseconds by T of every line of the picture, which are (B, name)."""
    found: dict[tuple[int, str], dict[int, float]] = {}
    for name, row in results["lengths"].items():
        B, T, *_ = shape = bench.parse_shape(name)
        times = {who: timing.median for who, timing in row[mode].items()}
        floor = bench.floor_ms(shape, mode == bench.MODES[1], results["copy_bytes_per_s"])
        for who, ms in (times | {"floor": floor}).items():
            found.setdefault((B, who), {})[T] = ms
    return found


def plot(results: dict, path: Path) -> bool:
    """Draws the picture; False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(11, 5), sharey=True, layout="constrained")
    for mode, axes in zip(bench.MODES, panels, strict=True):
        for (B, who), times in lines(results, mode).items():
            axes.plot(
                list(times),
                list(times.values()),
                STYLES[who],
                marker="" if who == "floor" else ".",
                color=COLORS[B],
                label=f"{who}, B {B}",
            )
        axes.set(xscale="log", yscale="log", xlabel="T", title=mode)
        axes.set_xticks(LENGTHS, [str(T) for T in LENGTHS], rotation=45)
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("ms")
    panels[0].legend()
    figure.suptitle(f"H {HEADS[0]}, K {HEADS[1]}, V {HEADS[2]}, bf16")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
