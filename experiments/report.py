"""`python -m experiments.report`: draws figures and tables from the results; nothing is trained.

The tables stand in docs/experiments.md between marks `<!-- begin NAME -->` and `<!-- end NAME -->`,
the figures beside that page.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import sys
import textwrap
from collections import Counter
from functools import partial
from pathlib import Path

from experiments.comparisons import claims
from experiments.run import EXPERIMENTS, Texts, vocabulary
from experiments.runs import RESULTS, Results, foreseen
from gla_ext.model.files import write_text

PAGE = Path(__file__).parents[1] / "docs" / "experiments.md"
NOTHING = "No run of it is done."


def most_frequent_texts(results: Results) -> Texts:
    """The text that most results on bytes, and on tokens of each vocabulary, are of."""
    counts: dict[int, Counter[str]] = {}
    for result in results:
        if result.run.text:
            counts.setdefault(result.run.vocabulary, Counter())[result.run.text] += 1
    return {of: count.most_common(1)[0][0] for of, count in counts.items()}


def summary(results: Results, texts: Texts) -> str:
    """What the results ran on, and how long; how many are of another text than that."""
    devices: dict[str, list[float]] = {}
    for result in results:
        devices.setdefault(result.details["device"], []).append(result.details["seconds"])
    ran = "; ".join(
        f"{len(seconds)} runs on {name}, {sum(seconds) / 3600:.1f} hours of them added up"
        for name, seconds in devices.items()
    )
    others = sum(result.run.text not in ("", *texts.values()) for result in results)
    if others:
        ran += f"; {others} of them read another text and are in no table"
    return f"{ran}.{repeated(results, texts)}"


def repeated(results: Results, texts: Texts) -> str:
    """A sentence on runs on bytes that were performed again: how far their scores are apart."""
    apart = {
        first.run: abs(first.score - again.score)
        for first, again in results.repeats
        if first.run.text == texts.get(0)
        and not first.run.vocabulary
        and math.isfinite(first.score - again.score)
    }
    if not apart:
        return ""
    return (
        f" {len(apart)} runs on text were performed again, with the same seed: their scores are "
        f"{statistics.fmean(apart.values()):.3f} bits a byte apart on average, "
        f"{max(apart.values()):.3f} at most."
    )


def progress(name: str, scale: str, results: Results, text: str) -> str:
    """How many of an experiment's runs are done, and how long they took."""
    done, left = foreseen(partial(EXPERIMENTS[name].runs, scale, text=text), results)
    hours = sum(results[run].details["seconds"] for run in done) / 3600
    many = f"{len(done)} of {len(done) + len(left)}" if left else f"All {len(done)}"
    return f"{many} runs are done, {hours:.2f} hours added up."


def wrapped(text: str) -> str:
    """The text with its long lines of prose broken; rows of tables stay whole."""
    fill = partial(textwrap.fill, width=138, break_long_words=False, break_on_hyphens=False)
    lines = text.splitlines()
    return "\n".join(line if line.startswith("|") else fill(line) for line in lines)


def filled(content: str, name: str, section: str, page: Path) -> str:
    """The content of a page with that section between the marks of its name.

    Raises:
        ValueError: if the page has no such marks.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    pattern = re.compile(f"{begin}.*?{end}", re.DOTALL)
    if not pattern.search(content):
        raise ValueError(f"expected {page} to have a part from {begin} to {end}")
    return pattern.sub(lambda _: f"{begin}\n{section}\n{end}", content)


def write(page: Path, scale: str, results: Results) -> None:
    """Puts figures and tables into the page and its folder."""
    texts = most_frequent_texts(results)
    sections = {}
    for name, module in EXPERIMENTS.items():
        text = texts.get(vocabulary(name, scale), "")
        if section := module.report(scale, results, text, page.parent):
            section = f"{section}\n\n{progress(name, scale, results, text)}"
        sections[name] = section
    sections["claims"] = claims.report(scale, results, texts, EXPERIMENTS)
    sections["summary"] = summary(results, texts)
    content = page.read_text(encoding="utf-8")
    for name, section in sections.items():
        content = filled(content, name, wrapped(section) or NOTHING, page)
    write_text(page, content)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line: 0, or 2 if a file is not as expected."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.report", description="draws figures and tables from results."
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: %(default)s")
    parser.add_argument("--page", type=Path, default=PAGE, help="default: %(default)s")
    parser.add_argument("--scale", choices=("tiny", "full"), default="full")
    options = parser.parse_args(argv)
    try:
        if not options.results.is_dir():
            raise FileNotFoundError(f"expected --results to be a folder, got {options.results}")
        write(options.page, options.scale, Results([options.results]))
    except (OSError, ValueError) as error:
        print(f"experiments.report: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
