"""Claims of the paper, one row each: its number, ours, whether they agree, and of which runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from experiments.comparisons import length, mqar
from experiments.comparisons.budget import Budget
from experiments.comparisons.figures import table
from experiments.comparisons.significance import (
    LEVEL,
    Test,
    differing,
    holm,
    in_brackets,
    paired,
    welch,
)
from experiments.recall import SOLVED
from experiments.runs import Results

TOKENS = {"tokens_8k": 8_000, "tokens_32k": 32_000}


@dataclass(frozen=True)
class Claim:
    """Of two models the first has the lower loss, or neither has.

    Attributes:
        text, paper: the claim, and the paper's numbers of the two.
        on_bytes: the experiment on bytes, and its names of the two.
        alike: whether the claim is that neither is better.
        names_on_tokens: their names in the experiments on tokens. Default: those on bytes.
    """

    text: str
    paper: str
    on_bytes: tuple[str, str, str]
    alike: bool = False
    names_on_tokens: tuple[str, str] | None = None

    @property
    def on_tokens(self) -> tuple[str, str]:
        return self.names_on_tokens or self.on_bytes[1:]


_GLA = "GLA, 4 heads"
CLAIMS = (
    Claim(
        "GLA is as good as a Transformer++ (Table 1)",
        "about the same",
        ("transformer", "GLA", "Transformer++"),
        names_on_tokens=(_GLA, "Transformer++"),
        alike=True,
    ),
    Claim(
        "GLA is better than RetNet (Table 1)",
        "better",
        ("transformer", "GLA", "RetNet"),
        names_on_tokens=(_GLA, "RetNet"),
    ),
    Claim(
        "a gate a channel is better than one a head (Table 2)",
        "14.77, 15.56",
        ("ablations", _GLA, "data-dependent scalar gate"),
    ),
    Claim(
        "a gate a channel is better than a constant decay (Table 2)",
        "14.77, 16.55",
        ("ablations", _GLA, "constant scalar decay"),
    ),
    Claim(
        "gates are better than none (Table 2)",
        "14.77, 23.21",
        ("ablations", _GLA, "no gate"),
    ),
    Claim(
        "4 heads are better than 8 (Table 2)",
        "14.77, 15.29",
        ("ablations", _GLA, "GLA, 8 heads"),
    ),
    Claim(
        "1 head is better than 4 (Table 2)",
        "14.61, 14.77",
        ("ablations", "GLA, 1 head", _GLA),
    ),
    Claim(
        "gates on values add nothing to those on keys (v3, Table 2)",
        "14.73, 14.86",
        ("value_gates", "α, keys", "α and β, keys and values"),
        names_on_tokens=(_GLA, "gates on keys and values"),
        alike=True,
    ),
    Claim(
        "gates on keys are better than gates on values (v3, Table 2)",
        "14.73, 15.15",
        ("value_gates", "α, keys", "β, values"),
        names_on_tokens=(_GLA, "gates on values"),
    ),
)

# The layers that each claim on recall is about.
_ON_RECALL = {
    "attention solves recall at every width": ("attention",),
    "GLA recalls at least as much as RetNet": ("gla", "retnet"),
    "GLA recalls at least as much as Hyena": ("gla", "hyena"),
    "GLA recalls at least as much as RWKV-4": ("gla", "rwkv"),
}


def report(scale: str, results: Results, texts: dict[int, str], experiments: dict[str, Any]) -> str:
    """The table of what has two seeds or more, of recall also what has one; '' where nothing has.

    Args:
        scale, results: as an experiment's.
        texts: digests of the texts, by vocabulary.
        experiments: by their names.
    """
    rows = []
    for claim in CLAIMS:
        name, *names = claim.on_bytes
        sides = [(name, "bytes", 0, names)]
        sides += [(of, f"{size:,} tokens", size, claim.on_tokens) for of, size in TOKENS.items()]
        for experiment, what, vocabulary, pair in sides:
            of = getattr(experiments[experiment], "comparison", experiments[experiment])
            scores = of.scores(scale, results, texts.get(vocabulary, ""))
            a, b = (scores.get(one, []) for one in pair)
            if min(len(a), len(b)) > 1:
                ours = f"{fmean(a):.3f}, {fmean(b):.3f}{in_brackets(a, b)}"
                apart = not {*pair}.isdisjoint(differing(scores, of.beside))
                found = judged(a, b, apart, claim.alike)
                if claim.alike and apart:
                    found += ", better" if fmean(a) < fmean(b) else ", worse"
                rows.append([claim.text, claim.paper, ours, found, f"`{experiment}`, {what}"])
    rows += _of_recall(scale, results, experiments)
    rows += _of_length(scale, results, texts)
    return table(["claim", "paper", "here", "", "runs"], rows) if rows else ""


def judged(
    better: list[float], worse: list[float], apart: bool, alike: bool, test: Test = welch
) -> str:
    """What two sets of losses, which differ or not, say to a claim about their order."""
    if alike:
        if apart:
            return "differ"
        # The correction for many comparisons alone proves no likeness.
        return "not told apart" if test(better, worse) < LEVEL else "not told apart, as claimed"
    if not apart:
        return "not told apart"
    return "agree" if fmean(better) < fmean(worse) else "differ"


def _of_recall(scale: str, results: Results, experiments: dict[str, Any]) -> Iterator[list[str]]:
    """What attention solves, and what GLA is not behind in: in cells of two seeds or more, or of
    one where a task has no others.
    """
    tasks = {"`mqar`": [*mqar.done(scale, results).values()]}
    tasks |= {
        f"`{name}`": [of.done(scale, results)]
        for name, of in experiments.items()
        if isinstance(of, Budget)
    }
    for name, done in tasks.items():
        cells = [
            {layer: [min(r.score, SOLVED) for r in found[w]] for layer, found in of.items()}
            for of in done
            for w in mqar.SCALES[scale].widths
        ]
        for text, layers in _ON_RECALL.items():
            sides = [[of.get(layer, []) for layer in layers] for of in cells]
            found = [pair for pair in sides if min(map(len, pair)) > 1]
            seeds = "" if found else ", one seed each"
            held = [_holds(*pair) for pair in found or sides if all(pair)]
            if held:
                missing = len(held) - sum(held)
                said = f"agree but for {missing}" if missing else "agree"
                ours = f"{sum(held)} of {len(held)} cells{seeds}"
                yield [f"{text} (Figure 4)", "all cells", ours, said, name]


def _holds(better: list[float], worse: list[float] | None = None) -> bool:
    """Whether a layer has solved a task, or is at least as accurate as another."""
    return min(better) >= SOLVED if worse is None else fmean(better) >= fmean(worse)


def _of_length(scale: str, results: Results, texts: dict[int, str]) -> Iterator[list[str]]:
    """Whether the loss rises beyond the length of training, of the same runs at two places."""
    for runs, of in (("length", length.comparison), ("tokens_length", length.ON_TOKENS)):
        text = texts.get(of.sizes[scale].vocabulary, "")
        names = {f"{name} at {of.shortest(scale)}": name for name in of.layers}
        first, last = of.ends(scale, results, text)
        tested = [at for at in names if len(first.get(at, [])) > 1]
        apart = holm({at: paired(first[at], last[at]) for at in tested})
        for at in tested:
            a, b = first[at], last[at]
            rises = names[at] == "Transformer++"
            found = judged(a, b, at in apart, alike=not rises, test=paired)
            if not rises and at in apart and fmean(b) < fmean(a):
                found = "agree"
            said = "rises" if rises else "does not rise"
            claim = f"{names[at]}'s loss {said} beyond its length (Figure 5)"
            ours = f"{fmean(a):.3f}, then {fmean(b):.3f}{in_brackets(a, b, paired)}"
            where = f"`{runs}`, first 8th and second half, {at}"
            yield [claim, "figure", ours, found, where]
