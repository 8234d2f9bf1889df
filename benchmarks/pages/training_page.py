"""Tables and the picture of what `bench_training.py` has measured."""

from pathlib import Path

from parts.training_rows import ROWS


def table(results: list[dict]) -> list[str]:
    lines = [
        "| row | build | tokens/s | ms a step | peak GiB | launches | host ms of 1 x 64 tokens |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for r in results:
        if "failed" in r:
            lines.append(f"| {r['row']} | {r['build']} | {r['failed']} | | | | |")
            continue
        host = f"{r['host_ms']:.1f}" if "host_ms" in r else ""
        lines.append(
            f"| {r['row']} | {r['build']} | {r['tokens_per_s']:,.0f} | {r['ms']:.1f} | "
            f"{r['peak_gib']:.1f} | {r.get('launches', '')} | {host} |"
        )
    return lines


def kinds_table(results: list[dict]) -> list[str]:
    rows = [r for r in results if "kinds" in r]
    if not rows:
        return []
    names = {kind: None for r in rows for kind in r["kinds"]}
    lines = ["", f"| ms of a step | {' | '.join(r['row'] + ', ' + r['build'] for r in rows)} |"]
    lines.append("|---|" + "--:|" * len(rows))
    for kind in names:
        cells = " | ".join(f"{r['kinds'].get(kind, 0):.1f}" for r in rows)
        lines.append(f"| {kind} | {cells} |")
    return lines


def draw(results: list[dict], path: Path) -> None:
    """Tokens/s and peak memory against the length of a sequence, as the paper's Figure 6."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    lines: dict[str, dict[int, dict]] = {}
    for r in results:
        row = ROWS[r["row"]]
        if "failed" in r or row.size != "374 M" or row.B * row.T != 32768 or row.autocast:
            continue
        name = f"{row.model}{', compiled' if row.compiled else ''}"
        if row.model == "Transformer++":
            name += ", FlashAttention-2" if row.attention == "FLASH_ATTENTION" else ", cuDNN"
        if row.loss:
            continue
        lines.setdefault(f"{name} ({r['build']})", {})[row.T] = r
    for name, points in lines.items():
        order = sorted(points)
        for axes, key in zip(panels, ("tokens_per_s", "peak_gib"), strict=True):
            axes.plot(order, [points[T][key] for T in order], marker=".", label=name)
    for axes, label in zip(panels, ("tokens/s", "peak memory, GiB"), strict=True):
        axes.set(xscale="log", xlabel="T (32,768 tokens a step)", ylabel=label, ylim=(0, None))
        axes.set_xticks([2048, 8192, 32768], ["2048", "8192", "32768"])
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
