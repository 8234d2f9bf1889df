"""Time over T at H 4, K 128, V 256, beside the floor and attention, and its picture."""

from pathlib import Path

from parts import bench_attention
from shared import operator as bench
from shared.picture import over_lengths, panels

HEADS = (4, 128, 256)
LENGTHS = tuple(2**n for n in range(10, 18))
BATCHES = (1, 32)
MAX_TOKENS = 2**20  # B * T; inputs, gradients and FLA's intermediates then take 50 GiB
COLORS = {1: "tab:blue", 32: "tab:red"}
STYLES = {"gla_ext": "-", "steps": "--", "FLA": "-.", "floor": ":"}
ATTENTION_COLORS = dict(zip(bench_attention.BACKENDS, ("tab:green", "tab:olive"), strict=True))


def shapes() -> list[tuple[int, ...]]:
    """Those of a batch follow one another."""
    return [(B, T, *HEADS) for B in BATCHES for T in LENGTHS if B * T <= MAX_TOKENS]


def timed(rows: dict[str, dict]) -> dict[str, bench.Times]:
    """Speed of those of the picture's shapes that were timed for another part."""
    found = {name: rows.get(name, {}) for name in map(bench.name_of, shapes())}
    return {name: row["speed"] for name, row in found.items() if "speed" in row}


def lines(results: dict, mode: str) -> dict[tuple[int, str], dict[int, float]]:
    """Milliseconds by T of every line of the picture, which are (B, name)."""
    found: dict[tuple[int, str], dict[int, float]] = {}
    for name, row in results["plot"].items():
        B, T, *_ = shape = bench.parse_shape(name)
        times = {who: timing.median for who, timing in row[mode].items()}
        floor = bench.floor_ms(shape, mode, results["copy_bytes_per_s"])
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


def plot(results: dict, path: Path) -> None:
    """Draws the picture."""
    with panels(path, 2, (13, 5), sharey=True) as (figure, axes):
        for mode, axis in zip(bench.MODES, axes, strict=True):
            for line, times in lines(results, mode).items():
                order = sorted(times)
                axis.plot(order, [times[T] for T in order], **look(*line))
            over_lengths(axis, LENGTHS, yscale="log", xlabel="T", title=mode)
            axis.tick_params(axis="x", rotation=45)
        axes[0].set_ylabel("ms")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper")
        H, D = bench_attention.ATTENTION_HEADS
        attention = f"; attention: {H} heads of {D}" if results.get("attention") else ""
        figure.suptitle(f"H {HEADS[0]}, K {HEADS[1]}, V {HEADS[2]}, bf16{attention}")
