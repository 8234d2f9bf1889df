"""Tables and the picture of what `bench_training.py` has measured."""

from pathlib import Path

from parts.training_rows import ROWS, Row
from shared.picture import over_lengths, panels
from shared.utilisation import mfu


def table(results: list[dict]) -> list[str]:
    lines = [
        "| row | build | tokens/s | MFU | ms a step | cool | peak GiB | launches | host ms "
        "| layer, host µs |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for r in results:
        if "failed" in r:
            lines.append(f"| {r['row']} | {r['build']} | {r['failed']} | | | | | | | |")
            continue
        host, layer = (f"{r[key]:.1f}" if key in r else "" for key in ("host_ms", "layer_host_us"))
        used = mfu(r.get("product_parameters"), r["tokens_per_s"], r.get("device", ""))
        lines.append(
            f"| {r['row']} | {r['build']} | {r['tokens_per_s']:,.0f} | {used} | {r['ms']:.1f} | "
            f"{r['cool_ms']:.1f} | {r['peak_gib']:.1f} | {r.get('launches', '')} | {host} | "
            f"{layer} |"
        )
    return lines


def kinds_table(results: list[dict]) -> list[str]:
    rows = [r for r in results if "kinds" in r]
    heads = " | ".join(f"{r['row']}, {r['build']}" for r in rows)
    lines = ["", f"| ms of a step | {heads} |", "|---|" + "--:|" * len(rows)]
    for kind in dict.fromkeys(kind for r in rows for kind in r["kinds"]):
        cells = " | ".join(f"{r['kinds'].get(kind, 0):.1f}" for r in rows)
        lines.append(f"| {kind} | {cells} |")
    return lines if rows else []


def line_of(row: Row, size: str) -> str | None:
    """The name of the line of a size's picture that a row is a point of, or None."""
    if row.size != size or row.B * row.T != 32768 or row.autocast or row.loss:
        return None
    if row.model == "Transformer++":
        kernel = "FlashAttention-2" if row.attention == "FLASH_ATTENTION" else "cuDNN"
        whole = "model" if size == "374 M" else "blocks"
        return f"Transformer++, {kernel}" if row.compiled == whole else None
    if row.accelerated or row.apart or row.hybrid or row.compiled == "blocks":
        return None
    return (
        row.model
        + (", steps, states in memory" if row.steps else "")
        + (", compiled" if row.compiled else "")
    )


def lines(results: list[dict], size: str = "374 M") -> dict[str, dict[int, dict]]:
    """Results by line and length; the last counts of a row that was run again."""
    found: dict[str, dict[int, dict]] = {}
    several = len({r["build"] for r in results}) > 1
    for r in results:
        row = ROWS[r["row"]]
        if "failed" not in r and (name := line_of(row, size)) is not None:
            name += f" ({r['build']})" if several and row.model == "gla_ext" else ""
            found.setdefault(name, {})[row.T] = r
    return found


def draw(results: list[dict], path: Path, size: str = "374 M") -> None:
    """Tokens/s and peak memory against the length of a sequence, as the paper's Figure 6."""
    labels = {"tokens_per_s": "tokens/s, sustained", "peak_gib": "peak memory, GiB"}
    found = lines(results, size)
    lengths = sorted({T for points in found.values() for T in points})
    with panels(path, 2, (11, 4.5)) as (_, axes):
        for axis, (key, label) in zip(axes, labels.items(), strict=True):
            for name, points in found.items():
                order = sorted(points)
                axis.plot(order, [points[T][key] for T in order], marker=".", label=name)
            over_lengths(axis, lengths, xlabel="T (32,768 tokens a step)", ylabel=label)
            axis.set_ylim(bottom=0)
        axes[1].legend(fontsize=8)
