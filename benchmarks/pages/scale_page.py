"""The picture of what `bench_scale.py` has measured, from its pages."""

import re
from pathlib import Path

from shared.picture import panels

_GPUS = re.compile(r"#+ (\d+) GPUs beside one")
_ROW = re.compile(r"\| ([^|]+) \| [^|]*\| (\d+\.\d+)x")
_PAPER = re.compile(r"(\d+) ranks [\d.]+ ms, (\d+)% of")


def read(page: str) -> tuple[dict[str, dict[int, float]], dict[int, float]]:
    """Of each row the tokens/s over one GPU's, by the number of GPUs; and what the model on paper
    says of more GPUs, as a share of all, from the fewest that were measured.
    """
    rows: dict[str, dict[int, float]] = {}
    paper: dict[int, float] = {}
    gpus = 0
    for line in page.splitlines():
        if found := _GPUS.match(line):
            gpus = int(found[1])
        elif found := _ROW.match(line):
            rows.setdefault(found[1], {})[gpus] = float(found[2])
        elif "on paper" in line and not paper:
            paper = {int(W): float(share) / 100 for W, share in _PAPER.findall(line)}
    return rows, paper


def draw(page: str, path: Path) -> None:
    """Tokens/s over those of as many single GPUs, against the number of GPUs, in even steps."""
    rows, paper = read(page)
    ticks = sorted({W for ratios in (*rows.values(), paper) for W in ratios})
    with panels(path, 1, (8.5, 5)) as (figure, (axis,)):
        for name, ratios in rows.items():
            order = sorted(ratios)
            style = (
                ":" if "shards" in name or "FSDP2" in name else "--" if "training" in name else "-"
            )
            x, y = map(ticks.index, order), [ratios[W] / W for W in order]
            axis.plot([*x], y, style, marker=".", label=name)
        x, y = map(ticks.index, sorted(paper)), [paper[W] for W in sorted(paper)]
        axis.plot([*x], y, "k+:", lw=1, label="chunk_gla, as many tokens a rank, on paper")
        axis.set(xlabel="GPUs", ylabel="tokens/s of each over one GPU's", ylim=(0, 1.1))
        axis.set_xticks(range(len(ticks)), map(str, ticks))
        figure.legend(loc="outside lower center", ncols=3, fontsize=8)
