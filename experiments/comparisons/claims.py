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

# On recall: layers, and those which they are not behind; without such, they are perfect.
_ON_RECALL: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "attention solves recall at every width": (("attention",), ()),
    "GLA recalls at least as much as RetNet": (("gla",), ("retnet",)),
    "GLA, RetNet and Mamba recall at least as much as Hyena and RWKV-4": (
        ("gla", "retnet", "mamba"),
        ("hyena", "rwkv"),
    ),
}
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
    rows += _of_two_lengths(scale, results, texts)
    return table(["claim", "paper", "here", "", "runs"], [*rows, _NOT_REPEATED]) if rows else ""


def beside(a: list[float], b: list[float], apart: bool, alike: bool) -> tuple[str, str]:
    """Means of two sets of losses, and what they say to a claim on them; see `judged`."""
    found = judged(a, b, apart, alike)
    if alike and apart:
        found += ", better" if fmean(a) < fmean(b) else ", worse"
    return f"{fmean(a):.3f}, {fmean(b):.3f}{in_brackets(a, b)}", found


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
    """The claims on recall, in cells of two seeds or more; without such cells, of one seed."""
    tasks = {"`mqar`": [*mqar.done(scale, results).values()]}
    tasks |= {
        f"`{name}`": [of.done(scale, results)]
        for name, of in experiments.items()
        if isinstance(of, Budget)
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
            if held:
                failed = len(held) - sum(held)
                said = f"agree but for {failed}" if 0 < failed < len(held) else ""
                said = said or ("differ" if failed else "agree")
                ours = f"{sum(held)} of {len(held)} cells"
                if not several:
                    said = "not as claimed, not proved" if failed else "as claimed, not proved"
                    ours += f", one seed; {len(cells) - len(held)} not run"
                yield [f"{text} (Figure 4)", "all cells", ours, said, name]


def _counted(done: list[Result]) -> list[float]:
    """Accuracies, up to that at which a run ends; without runs that diverged."""
    return [min(score, SOLVED) for score in finite(result.score for result in done)]


def _holds(better: list[list[float]], worse: list[list[float]]) -> bool:
    """Whether each of some layers is at least as accurate as others, or has solved a task."""
    if not worse:
        return min(map(min, better)) >= SOLVED
    return min(map(fmean, better)) >= max(map(fmean, worse))


def _of_length(scale: str, results: Results, texts: dict[int, str]) -> Iterator[list[str]]:
    """On the loss beyond the length of training: of the same runs at two places of a document."""
    for runs, of in LENGTHS.items():
        first, last = of.ends(scale, results, texts.get(of.sizes[scale].vocabulary, ""))
        names = {f"{name} at {of.lengths(scale)[0]}": name for name in of.layers}
        tested = [at for at in names if len(first.get(at, [])) > 1]
        apart = holm({at: paired(first[at], last[at]) for at in tested})
        for at in tested:
            a, b = first[at], last[at]
            rises = names[at] in _LOSS_RISES
            found = judged(a, b, at in apart, alike=not rises, test=paired)
            if not rises and at in apart and fmean(b) < fmean(a):
                found = "agree"
            said = "rises" if rises else "does not rise"
            claim = f"{names[at]}'s loss {said} beyond its length (Figure 5)"
            ours = f"{fmean(a):.3f}, then {fmean(b):.3f}{in_brackets(a, b, paired)}"
            where = f"`{runs}`, first 8th and second half, {at}"
            yield [claim, "figure", ours, found, where]


def _of_two_lengths(scale: str, results: Results, texts: dict[int, str]) -> Iterator[list[str]]:
    """On training at one length or another; and on GLA beside Mamba, which has run there alone."""
    for runs, of in LENGTHS.items():
        short, longer, segments = of.lengths(scale)[:3]
        first, last = of.ends(scale, results, texts.get(of.sizes[scale].vocabulary, ""))
        mamba = "GLA is as good as Mamba (Table 2)"
        pairs = {mamba: (first.get(f"GLA at {short}", []), first.get(f"Mamba at {short}", []))}
        for name in [name for name in of.layers if name != "Transformer++"]:
            claim = f"{name} is better trained at {longer} than at {short} (Figure 5)"
            pairs[claim] = last.get(f"{name} at {longer}", []), last.get(f"{name} at {short}", [])
        claim = f"GLA is as good trained at {segments} as at {longer} (Figure 5)"
        pairs[claim] = last.get(f"GLA at {segments}", []), last.get(f"GLA at {longer}", [])
        pairs = {claim: pair for claim, pair in pairs.items() if min(map(len, pair)) > 1}
        apart = holm({claim: welch(*pair) for claim, pair in pairs.items()})
        for claim, pair in pairs.items():
            cells = beside(*pair, claim in apart, alike=" as good " in claim)
            part = f"first 8th, at {short}" if claim == mamba else "second half"
            paper = "about the same" if claim == mamba else "figure"
            yield [claim, paper, *cells, f"`{runs}`, {part}"]
