"""Claims of the paper, one row each: its number, ours, whether they agree, and of which runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

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
                cells = beside(a, b, apart, claim.alike)
                rows.append([claim.text, claim.paper, *cells, f"`{experiment}`, {what}"])
    rows += _of_recall(scale, results, experiments)
    rows += _of_length(scale, results, texts)
    return table(["claim", "paper", "here", "", "runs"], [*rows, _NOT_REPEATED]) if rows else ""


def beside(
    a: list[float], b: list[float], apart: bool, alike: bool, test: Test = welch
) -> list[str]:
    """Two cells: the means of two sets of losses with p, and what they say to a claim.

    Args:
        a, b: the losses.
        apart: whether they differ.
        alike: whether the claim is that they do not; else it is that the first are lower.
        test: of the two. Default: Welch's.
    """
    lower = fmean(a) < fmean(b)
    if apart:
        found = "agree" if lower and not alike else "differ"
        found += (", better" if lower else ", worse") if alike else ""
    else:
        # The correction for many comparisons alone proves no likeness.
        claimed = alike and test(a, b) >= LEVEL
        found = "not told apart, as claimed" if claimed else "not told apart"
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
    """A claim on two sets of losses, a and b, and where these are from."""

    claim: str
    paper: str
    where: str
    a: list[float]
    b: list[float]
    alike: bool = False
    test: Test = welch


def _of_length(scale: str, results: Results, texts: dict[int, str]) -> Iterator[list[str]]:
    """The claims on the length of training, and on GLA beside Mamba, which ran in these experiments
    alone.
    """
    for runs, of in LENGTHS.items():
        short, longer, segments = of.lengths(scale)
        first, last = of.ends(scale, results, texts.get(of.sizes[scale].vocabulary, ""))
        pairs = [
            _Pair(
                f"{name}'s loss {'rises' if name in _LOSS_RISES else 'does not rise'} beyond its "
                "length (Figure 5)",
                "figure",
                f"first 8th and second half, {name} at {short}",
                first.get(f"{name} at {short}", []),
                last.get(f"{name} at {short}", []),
                name not in _LOSS_RISES,
                paired,
            )
            for name in of.layers
        ]
        pairs += [
            _Pair(
                f"{name} is better trained at {longer} than at {short} (Figure 5)",
                "better",
                "second half",
                last.get(f"{name} at {longer}", []),
                last.get(f"{name} at {short}", []),
            )
            for name in of.layers
            if name != "Transformer++"
        ]
        pairs += [
            _Pair(
                f"GLA is as good trained at {segments} as at {longer} (Figure 5)",
                "about the same",
                "second half",
                last.get(f"GLA at {segments}", []),
                last.get(f"GLA at {longer}", []),
                alike=True,
            ),
            _Pair(
                "GLA is as good as Mamba (Table 2)",
                "about the same",
                f"first 8th, at {short}",
                first.get(f"GLA at {short}", []),
                first.get(f"Mamba at {short}", []),
                alike=True,
            ),
        ]
        pairs = [of for of in pairs if min(len(of.a), len(of.b)) > 1]
        apart = holm({of.claim: of.test(of.a, of.b) for of in pairs})
        for of in pairs:
            ours, found = beside(of.a, of.b, of.claim in apart, of.alike, of.test)
            if of.alike and of.test is paired:  # a loss may fall
                found = {"differ, better": "differ", "differ, worse": "agree"}.get(found, found)
            yield [of.claim, of.paper, ours, found, f"`{runs}`, {of.where}"]
