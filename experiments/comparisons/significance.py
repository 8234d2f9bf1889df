"""Whether small sets of scores differ, by t-tests, and what may be said of several of them."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence

LEVEL = 0.05
Test = Callable[[Sequence[float], Sequence[float]], float]  # of two sets of scores, to p


def verdict(scores: dict[str, list[float]], beside: str) -> str:
    """Sentences that compare the losses of each name with those of `beside`.

    A difference counts if it holds at LEVEL by Welch's test with Holm's correction (1979) for the
    number of names. Nothing is concluded about a name with one score.

    Args:
        scores: of each name, one a seed, lower is better.
        beside: the name that the others are compared with.
    """
    own = scores.get(beside, [])
    named = [name for name in scores if name != beside]
    tested = [name for name in named if min(len(scores[name]), len(own)) > 1]
    if not tested:
        return "Of fewer than two seeds nothing is concluded."
    differ = differing(scores, beside)
    level = statistics.fmean(own)
    better = [name for name in differ if statistics.fmean(scores[name]) < level]
    groups = {
        "worse": [name for name in differ if name not in better],
        "better": better,
        "not told apart": [name for name in tested if name not in differ],
    }
    said = f"Beside {beside}, at {LEVEL:.0%} after Holm's correction (comparisons: {len(tested)})"
    parts = [f"{what} ({'; '.join(names)})" for what, names in groups.items() if names]
    sentences = [f"{said}: {', '.join(parts)}."]
    if few := [name for name in named if name not in tested]:
        sentences.append(f"Of one seed, so nothing is concluded: {'; '.join(few)}.")
    return " ".join(sentences)


def differing(scores: dict[str, list[float]], beside: str) -> list[str]:
    """The names whose scores differ from those of `beside`; see `verdict`."""
    own = scores.get(beside, [])
    others = {name: x for name, x in scores.items() if name != beside}
    return holm({n: welch(x, own) for n, x in others.items() if min(len(x), len(own)) > 1})


def order(scores: dict[str, list[float]], expected: Sequence[str]) -> str:
    """Whether means of losses are in an expected order, best first: a sentence on what is not.

    Names with one score are left out.
    """
    known = [name for name in expected if len(scores.get(name, ())) > 1]
    turned = [
        f"{worse} before {better}{in_brackets(scores[better], scores[worse])}"
        for better, worse in itertools.combinations(known, 2)
        if statistics.fmean(scores[worse]) < statistics.fmean(scores[better])
    ]
    if turned:
        return f"Other than in the paper's order, by the means: {'; '.join(turned)}."
    return "The order of the means is the paper's." if len(known) == len(expected) else ""


def in_brackets(a: Sequence[float], b: Sequence[float], test: Test | None = None) -> str:
    """' (p = 0.123)' of two sets of scores, of two or more each, by a test; default: `welch`."""
    p = p_value(a, b, test)
    return f" (p {p})" if p.startswith("<") else f" (p = {p})"


def holm(ps: dict[str, float]) -> list[str]:
    """The names whose p is significant at LEVEL, in the order of the names."""
    found = set()
    for place, name in enumerate(sorted(ps, key=ps.__getitem__)):
        if ps[name] * (len(ps) - place) >= LEVEL:
            break
        found.add(name)
    return [name for name in ps if name in found]


def p_value(a: Sequence[float], b: Sequence[float], test: Test | None = None) -> str:
    """The two-sided p of a test, as a table shows it; '' of fewer than two scores.

    Args:
        a, b: scores.
        test: `welch` or `paired`. Default: `welch`.
    """
    if min(len(a), len(b)) < 2:
        return ""
    p = (test or welch)(a, b)
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def welch(a: Sequence[float], b: Sequence[float]) -> float:
    """The probability of means at least so far apart where there is no difference (Welch, 1947)."""
    errors = [statistics.variance(x) / len(x) for x in (a, b)]
    error = sum(errors)
    distance = abs(statistics.fmean(a) - statistics.fmean(b))
    if error == 0:
        return 1.0 if distance == 0 else 0.0
    freedom = error**2 / sum(e**2 / (len(x) - 1) for e, x in zip(errors, (a, b), strict=True))
    return _tails(distance / math.sqrt(error), freedom)


def paired(a: Sequence[float], b: Sequence[float]) -> float:
    """As `welch`, of two scores of each run, in the same order: Student's test of differences."""
    differences = [y - x for x, y in zip(a, b, strict=True)]
    error = statistics.variance(differences) / len(differences)
    distance = abs(statistics.fmean(differences))
    if error == 0:
        return 1.0 if distance == 0 else 0.0
    return _tails(distance / math.sqrt(error), len(differences) - 1)


def _tails(t: float, freedom: float, parts: int = 2000) -> float:
    """Both tails of Student's distribution beyond t, by Simpson's rule.

    With `t = sqrt(freedom) tan(x)` the density is `cos(x)^(freedom - 1)`, up to its integral.
    """
    width = math.pi / 2 - math.atan(t / math.sqrt(freedom))
    weights = [1 if i in (0, parts) else 4 if i % 2 else 2 for i in range(parts + 1)]
    # sin(y)^(freedom - 1) with y = pi / 2 - x, from 0, where the tail ends.
    steps = (w * math.sin(i * width / parts) ** (freedom - 1) for i, w in enumerate(weights))
    tail = width / parts / 3 * sum(steps)
    log_whole = math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2) + math.log(math.pi) / 2
    return 2 * tail / math.exp(log_whole)
