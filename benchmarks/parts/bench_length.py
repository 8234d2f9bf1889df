"""Time over T at H 4, K 128, V 256, beside the floor and attention, and its picture."""

from pathlib import Path

import bench_cuda as bench
from parts import bench_attention

HEADS = (4, 128, 256)
LENGTHS = tuple(2**n for n in range(10, 18))
BATCHES = (1, 32)
MAX_TOKENS = 2**20  # B * T; inputs, gradients and FLA's intermediates then take 50 GiB
COLORS = {1: "tab:blue", 32: "tab:red"}
STYLES = {"gla_ext": "-", "steps": "--", "FLA": "-.", "floor": ":"}
ATTENTION_COLORS = dict(zip(bench_attention.BACKENDS, ("tab:green", "tab:olive"), strict=True))


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
    for T, row in results.get("attention", {}).items():
        for who in bench_attention.BACKENDS:
            found.setdefault((bench_attention.BATCH, who), {})[int(T)] = row[mode][who].median
    return found


def look(B: int, who: str) -> dict:
    """How a line is drawn."""
    if who in ATTENTION_COLORS:
        name = f"attention, {who}, B {B}"
        return {"color": ATTENTION_COLORS[who], "marker": "x", "label": name}
    marker = "" if who == "floor" else "."
    return {"color": COLORS[B], "ls": STYLES[who], "marker": marker, "label": f"{who}, B {B}"}


def plot(results: dict, path: Path) -> bool:
    """Draws the picture; False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(13, 5), sharey=True, layout="constrained")
    for mode, axes in zip(bench.MODES, panels, strict=True):
        for line, times in lines(results, mode).items():
            order = sorted(times)
            axes.plot(order, [times[T] for T in order], **look(*line))
        axes.set(xscale="log", yscale="log", xlabel="T", title=mode)
        axes.set_xticks(LENGTHS, [str(T) for T in LENGTHS], rotation=45)
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("ms")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper")
    H, D = bench_attention.ATTENTION_HEADS
    attention = f"; attention: {H} heads of {D}" if results.get("attention") else ""
    figure.suptitle(f"H {HEADS[0]}, K {HEADS[1]}, V {HEADS[2]}, bf16{attention}")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
