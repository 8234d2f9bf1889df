"""Counters of an engine's work, in the text format of Prometheus."""

from __future__ import annotations

import bisect
import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gla_ext.serve.sequence import Sequence

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_HISTOGRAMS = ("time_to_first_token_seconds", "time_between_tokens_seconds", "request_seconds")
_COUNTERS = ("prompt_tokens", "cached_prompt_tokens", "generated_tokens", "nonfinite_logits")


class Histogram:
    """Numbers of values up to each of some bounds."""

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str) -> Iterable[str]:
        totals = list(itertools.accumulate(self._counts))
        for bound, total in zip([*self._bounds, "+Inf"], totals, strict=True):
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self._sum:.9g}"
        yield f"{name}_count {totals[-1]}"


class Metrics:
    """Counters that the engine's thread increases and other threads read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._histograms = {name: Histogram() for name in _HISTOGRAMS}

    def _add(self, name: str, count: int) -> None:
        with self._lock:
            self._counts[f"{name}_total"] += count

    def began(self, sequence: Sequence) -> None:
        """Counts a sequence whose prompt has begun to be read."""
        self._add("prompt_tokens", len(sequence.request.tokens))

    def skipped(self, count: int) -> None:
        """Counts tokens of a prompt that need not be read, as the prefix cache has their state."""
        self._add("cached_prompt_tokens", count)

    def drew(self, sequence: Sequence) -> None:
        """Counts a token that a sequence got."""
        now = time.monotonic()
        with self._lock:
            self._counts["generated_tokens_total"] += 1
            if sequence.new == 1:
                sequence.first = now
                self._histograms["time_to_first_token_seconds"].add(now - sequence.arrived)
            else:
                self._histograms["time_between_tokens_seconds"].add(now - sequence.last)
        sequence.last = now

    def met_nonfinite_logits(self) -> None:
        """Counts a sequence that ended because its logits were not finite."""
        self._add("nonfinite_logits", 1)

    def finished(self, sequence: Sequence, reason: str) -> None:
        """Counts a sequence that has ended."""
        with self._lock:
            self._reasons[reason] += 1
            self._histograms["request_seconds"].add(time.monotonic() - sequence.arrived)

    def count(self, name: str) -> int:
        """A counter's value."""
        with self._lock:
            return self._counts[name]

    def reasons(self) -> dict[str, int]:
        """Number of finished sequences, by finish_reason."""
        with self._lock:
            return dict(self._reasons)

    def text(self, gauges: dict[str, float]) -> str:
        """All counters as text, and the given gauges by name."""
        lines: list[str] = []
        with self._lock:
            for name in _COUNTERS:
                full = f"gla_ext_{name}_total"
                lines += [f"# TYPE {full} counter", f"{full} {self._counts[f'{name}_total']}"]
            lines.append("# TYPE gla_ext_requests_total counter")
            for reason in ("stop", "length", "cancelled", "refresh", "error"):
                label = f'gla_ext_requests_total{{reason="{reason}"}}'
                lines.append(f"{label} {self._reasons[reason]}")
            for name, histogram in self._histograms.items():
                lines.append(f"# TYPE gla_ext_{name} histogram")
                lines += histogram.lines(f"gla_ext_{name}")
        for name, value in gauges.items():
            lines += [f"# TYPE gla_ext_{name} gauge", f"gla_ext_{name} {value}"]
        return "\n".join(lines) + "\n"
