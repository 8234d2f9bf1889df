"""Claims of the paper, one row each: its number, ours, whether they agree, and of which runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal, NamedTuple

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
from experiments.runs import Result, Results, finite

TOKENS = {"tokens_8k": 8_000, "tokens_32k": 32_000}
LENGTHS = {"length": length.comparison, "tokens_length": length.ON_TOKENS}
Claimed = Literal["lower", "not lower", "alike"]


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
        "GLA is as good as a Transformer++ (Table 2)",
        "about the same",
        ("transformer", "GLA", "Transformer++"),
        names_on_tokens=(_GLA, "Transformer++"),
        alike=True,
    ),
    Claim(
        "GLA is better than RetNet (Table 2)",
        "better",
        ("transformer", "GLA", "RetNet"),
        names_on_tokens=(_GLA, "RetNet"),
    ),
    Claim(
        "a gate a channel is better than one a head (Table 4)",
        "14.77, 15.56",
        ("ablations", _GLA, "data-dependent scalar gate"),
    ),
    Claim(
        "a gate a channel is better than a constant decay (Table 4)",
        "14.77, 16.55",
        ("ablations", _GLA, "constant scalar decay"),
    ),
    Claim(
        "gates are better than none (Table 4)",
        "14.77, 23.21",
        ("ablations", _GLA, "no gate"),
    ),
    Claim(
        "4 heads are better than 8 (Table 4)",
        "14.77, 15.29",
        ("ablations", _GLA, "GLA, 8 heads"),
    ),
    Claim(
        "1 head is better than 4 (Table 4)",
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

# On recall: layers, and those that they are more accurate than; without such, they solve it.
_ON_RECALL: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "attention solves recall at every width": (("attention",), ()),
    "GLA recalls more than RetNet": (("gla",), ("retnet",)),
    "GLA, RetNet and Mamba recall more than Hyena and RWKV-4": (
        ("gla", "retnet", "mamba"),
        ("hyena", "rwkv"),
    ),
}
_LEARNED = 0.05  # an accuracy below which nothing is compared
# The paper finds that Mamba hardly works beyond 4K.
_LOSS_RISES = ("Transformer++", "Mamba")
_NOT_REPEATED = [
    "GLA is competitive in benchmarks of reasoning, reading and recall (Tables 2 and 3)",
    "tables",
    "",
    "not comparable",
    "none, they need larger models",
]


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
                apart = not {*pair}.isdisjoint(differing(scores, of.beside))
                cells = beside(a, b, apart, "alike" if claim.alike else "lower")
                rows.append([claim.text, claim.paper, *cells, f"`{experiment}`, {what}"])
    rows += _of_recall(scale, results, experiments)
    rows += _of_length(scale, results, texts)
    return table(["claim", "paper", "here", "", "runs"], [*rows, _NOT_REPEATED]) if rows else ""


def beside(
    a: list[float], b: list[float], apart: bool, claimed: Claimed, test: Test = welch
) -> list[str]:
    """Two cells: the means of two sets of losses with p, and what they say to a claim.

    Args:
        a, b: the losses.
        apart: whether they differ.
        claimed: what the first are beside the second, by the claim.
        test: of the two. Default: Welch's.
    """
    lower = fmean(a) < fmean(b)
    if not apart:
        # The correction for many comparisons alone proves no likeness.
        likely = claimed != "lower" and test(a, b) >= LEVEL
        found = "not told apart, as claimed" if likely else "not told apart"
    elif claimed == "alike":
        found = "differ, better" if lower else "differ, worse"
    else:
        found = "agree" if lower == (claimed == "lower") else "differ"
    return [f"{fmean(a):.3f}, {fmean(b):.3f}{in_brackets(a, b, test)}", found]


def _of_recall(scale: str, results: Results, experiments: dict[str, Any]) -> Iterator[list[str]]:
    """The claims on recall, in cells of two seeds or more; without such cells, of one seed. Of the
    whole budgets the hardest task alone: the others' cells are those that `mqar` has not solved.
    """
    tasks = {"`mqar`": [*mqar.done(scale, results).values()]}
    tasks |= {
        f"`{name}`": [of.done(scale, results)]
        for name, of in experiments.items()
        if isinstance(of, Budget) and of.place == 0
    }
    for name, done in tasks.items():
        cells = [
            {layer: _counted(found[w]) for layer, found in of.items()}
            for of in done
            for w in mqar.SCALES[scale].widths
        ]
        for text, (better, worse) in _ON_RECALL.items():
            sides = [[of.get(layer, []) for layer in (*better, *worse)] for of in cells]
            several = [of for of in sides if min(map(len, of)) > 1]
            found = several or [[scores[:1] for scores in of] for of in sides if all(of)]
            held = [_holds(of[: len(better)], of[len(better) :]) for of in found]
            decided = [one for one in held if one is not None]
            if decided:
                failed = len(decided) - sum(decided)
                said = f"as claimed, but for {failed}" if failed else "as claimed"
                said = "not as claimed" if failed == len(decided) else said
                ours = f"{sum(decided)} of {len(decided)} cells{'' if several else ', one seed'}"
                if level := len(held) - len(decided):
                    ours += f"; {level} say nothing"
                if incomplete := len(cells) - len(held):
                    ours += f"; {incomplete} not complete"
                said += " so far" if incomplete or not several else ""
                yield [f"{text} (Figure 4)", "all cells", ours, said, name]


def _counted(done: list[Result]) -> list[float]:
    """Accuracies, up to that at which a run ends; without runs that diverged."""
    return [min(score, SOLVED) for score in finite(result.score for result in done)]


def _holds(better: list[list[float]], worse: list[list[float]]) -> bool | None:
    """Whether each of some layers is more accurate than others, None if all solve the task or none
    learns it; without others, whether they solve it.
    """
    if not worse:
        return min(map(min, better)) >= SOLVED
    every = [*better, *worse]
    if min(map(min, every)) >= SOLVED or max(map(fmean, every)) < _LEARNED:
        return None
    return min(map(fmean, better)) > max(map(fmean, worse))


class _Pair(NamedTuple):
    """A claim on two sets of losses, which `beside` compares, and where these are from."""

    claim: str
    paper: str
    claimed: Claimed
    a: list[float]
    b: list[float]
    where: str
    test: Test = welch


def _of_length(scale: str, results: Results, texts: dict[int, str]) -> Iterator[list[str]]:
    """The claims on the length of training, and on GLA beside Mamba, which ran in these experiments
    alone.
    """
    for runs, lengths in LENGTHS.items():
        text = texts.get(lengths.sizes[scale].vocabulary, "")
        first, last = lengths.ends(scale, results, text)
        short, longer, segments = lengths.lengths(scale)
        pairs = []
        for layer in lengths.layers:
            rises, at = layer in _LOSS_RISES, f"{layer} at {short}"
            said = "rises" if rises else "does not rise"
            claimed: Claimed = "lower" if rises else "not lower"
            claim = f"{layer}'s loss {said} beyond its length (Figure 5)"
            where = f"first 8th and second half, {at}"
            pairs.append(_Pair(claim, "figure", claimed, first[at], last[at], where, paired))
        for layer in [layer for layer in lengths.layers if layer != "Transformer++"]:
            claim = f"{layer} is better trained at {longer} than at {short} (Figure 5)"
            sides = last[f"{layer} at {longer}"], last[f"{layer} at {short}"]
            pairs.append(_Pair(claim, "better", "lower", *sides, "second half"))
        claim = f"GLA is as good trained at {segments} as at {longer} (Figure 5)"
        sides = last[f"GLA at {segments}"], last[f"GLA at {longer}"]
        pairs.append(_Pair(claim, "about the same", "alike", *sides, "second half"))
        claim, where = "GLA is as good as Mamba (Table 2)", f"first 8th, at {short}"
        sides = first[f"GLA at {short}"], first[f"Mamba at {short}"]
        pairs.append(_Pair(claim, "about the same", "alike", *sides, where))
        tested = [pair for pair in pairs if min(len(pair.a), len(pair.b)) > 1]
        apart = holm({pair.claim: pair.test(pair.a, pair.b) for pair in tested})
        for claim, paper, claimed, a, b, where, test in tested:
            cells = beside(a, b, claim in apart, claimed, test)
            yield [claim, paper, *cells, f"`{runs}`, {where}"]
