"""Whether two small sets of scores differ: Welch's t-test."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def p_value(a: Sequence[float], b: Sequence[float]) -> str:
    """The two-sided p of Welch's test, as a table shows it; '' of fewer than two scores."""
    if min(len(a), len(b)) < 2:
        return ""
    p = welch(a, b)
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
