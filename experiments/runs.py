"""Runs and their results: a run is a value, its result one line of JSON, kept once and for all."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Run:
    """A training run: all that its numbers follow from, beside the text and the device.

    task: 'text' or 'recall'.
    layer: which layer the model has, of `experiments.models.LAYERS`.
    width, layers, heads: the model's.
    seq_len, batch_size, segments, steps, lr, seed: as in `gla_ext.train`.
    pairs: of keys and values in an example of 'recall'.
    examples: of 'recall' to train on, in passes; 0 only in old results, of others at every step.
    tied: whether the output matrix is the embeddings.
    text: digest of the text, '' of 'recall', which has none.
    vocabulary: tokens of the text's tokenizer; 0: its bytes.
    consecutive: rows of a batch that lie in a row in the text, each from no state.
    """

    task: str
    layer: str
    width: int
    layers: int
    heads: int
    seq_len: int
    batch_size: int
    steps: int
    lr: float
    seed: int = 0
    segments: int = 1
    pairs: int = 0
    examples: int = 0
    tied: bool = False
    text: str = ""
    vocabulary: int = 0
    consecutive: int = 1

    @property
    def key(self) -> str:
        """What a result is found by."""
        return " ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))

    @property
    def tokens(self) -> int:
        """Tokens trained on."""
        return self.steps * self.batch_size * self.seq_len

    def __str__(self) -> str:
        long = f"{self.segments}x{self.seq_len}" if self.segments > 1 else self.seq_len
        size = f"width {self.width}, {self.heads} heads, {long} tokens"
        return f"{self.task} {self.layer}, {size}, lr {self.lr:g}, seed {self.seed}"


@dataclass(frozen=True)
class Result:
    """What came of a run.

    score: held-out bits a byte of 'text', the accuracy of 'recall'.
    details: the rest of the line: curves, parameters, seconds, device, versions, command.
    """

    run: Run
    score: float
    details: dict[str, Any]

    def line(self) -> str:
        """The result as a line of JSON; a score that is not a number is null."""
        score = self.score if math.isfinite(self.score) else None
        return json.dumps({"run": asdict(self.run), "score": score, **self.details}) + "\n"


class Results:
    """Results by their run's key, read from every `*.jsonl` of some folders.

    repeats: pairs of results of one run, the one that counts and a later one.
    """

    def __init__(self, folders: Iterable[Path] = (RESULTS,)) -> None:
        self._found: dict[str, Result] = {}
        self.repeats: list[tuple[Result, Result]] = []
        for folder in folders:
            for file in sorted(folder.glob("*.jsonl")):
                for line in file.read_text(encoding="utf-8").splitlines():
                    self.add(read_line(line))

    def add(self, result: Result) -> None:
        """Takes a result; the first of a run stays."""
        first = self._found.setdefault(result.run.key, result)
        if first is not result:
            self.repeats.append((first, result))

    def __contains__(self, run: Run) -> bool:
        return run.key in self._found

    def __getitem__(self, run: Run) -> Result:
        return self._found[run.key]

    def __iter__(self) -> Iterator[Result]:
        return iter(self._found.values())

    def of(self, runs: Iterable[Run]) -> list[Result]:
        """The results there are of some runs."""
        return [self._found[run.key] for run in runs if run in self]


def read_line(line: str) -> Result:
    """The result that `Result.line` wrote."""
    details = json.loads(line)
    run, score = Run(**details.pop("run")), details.pop("score")
    return Result(run, math.nan if score is None else score, details)


def keep(result: Result, folder: Path) -> None:
    """Appends a result to its task's file, in one write."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{result.run.task}.jsonl").open("a", encoding="utf-8") as file:
        file.write(result.line())


def best(candidates: list[Run], results: Results, solved: float = math.inf) -> Run | None:
    """The run with the best score, once all of them are done; of runs without a number, none.

    Args:
        candidates: the runs.
        results: what is done.
        solved: a score at which runs end; of those that reach it the one with the fewest steps is
            best. Default: none.
    """
    if not candidates or not all(run in results for run in candidates):
        return None
    sign = -1 if candidates[0].task == "text" else 1

    def rank(run: Run) -> tuple[float, int]:
        score = sign * results[run].score
        return (score, 0) if score < solved else (solved, -results[run].details["steps_done"])

    scored = [run for run in candidates if math.isfinite(results[run].score)]
    return max(scored, key=rank, default=None)


@dataclass(frozen=True)
class Sweep:
    """Runs of names, each at the same learning rates and at its best one with several seeds.

    make: the run of a name at a learning rate, with seed 0.
    rates: learning rates.
    seeds: number of seeds.
    results: what is done; runs that depend on what is not yet done are left out.
    solved: see `best`.
    """

    make: Callable[[str, float], Run]
    rates: tuple[float, ...]
    seeds: int
    results: Results
    solved: float = math.inf

    def of(self, name: str) -> list[Run]:
        """A name's runs at all rates."""
        return [self.make(name, rate) for rate in self.rates]

    def best(self, name: str, whole: bool = True) -> Run | None:
        """A name's best run: once its sweep is done, or with whole=False of what is done."""
        runs = [run for run in self.of(name) if whole or run in self.results]
        return best(runs, self.results, self.solved)

    def runs(self, names: Iterable[str]) -> Iterator[Run]:
        """The runs of each name: all rates with seed 0, then the best rate with the other seeds."""
        names = list(names)
        for at_a_rate in zip(*map(self.of, names), strict=True):
            yield from at_a_rate
        for seed in range(1, self.seeds):
            for name in names:
                if (first := self.best(name)) is not None:
                    yield replace(first, seed=seed)

    def chosen(self, name: str, whole: bool = True) -> list[Run]:
        """The runs of a name at its best rate, one a seed.

        Args:
            name: the name.
            whole: before its sweep is done, there are none; else those at the best rate so far.
                Default: True.
        """
        first = self.best(name, whole)
        return [] if first is None else [replace(first, seed=n) for n in range(self.seeds)]

    def rate_of(self, name: str) -> str:
        """The best rate, as a table shows it: of a sweep that is not done, with how much of it
        is.
        """
        first = self.best(name, whole=False)
        rate = "" if first is None else f"{first.lr:g}"
        done = len(self.results.of(self.of(name)))
        return rate if done == len(self.rates) else f"{rate} (best of {done})"

    def at_edges(self, names: Iterable[str]) -> str:
        """A sentence on the names whose best rate is the lowest or the highest of a whole sweep."""
        ends = min(self.rates), max(self.rates)
        found = {name: self.best(name) for name in names}
        named = [f"{name} ({run.lr:g})" for name, run in found.items() if run and run.lr in ends]
        if not named:
            return ""
        return f"At an end of the sweep, beyond which a rate might be better: {'; '.join(named)}."


def how_many_at_edges(of: Iterable[tuple[Sweep, str]]) -> str:
    """A sentence on whole sweeps of some names, or '' where the best rate is at an end of none."""
    found = [(sweep.rates, sweep.best(name)) for sweep, name in of]
    whole = [(rates, first.lr) for rates, first in found if first is not None]
    low, high = (sum(lr == end(rates) for rates, lr in whole) for end in (min, max))
    if not low + high:
        return ""
    return f"Of {len(whole)} sweeps the best rate is the lowest in {low}, the highest in {high}."


def foreseen(
    runs: Callable[[Results], Iterable[Run]], results: Results
) -> tuple[list[Run], list[Run]]:
    """The runs of an experiment that are done, and all others, those too that follow from others.

    Which rate a sweep will find is not known: what is not done is taken to be worse than what is.

    Args:
        runs: the experiment's runs, given what is done.
        results: what is done.
    """
    supposed = Results([])
    for result in results:
        supposed.add(result)
    while new := [run for run in dict.fromkeys(runs(supposed)) if run not in supposed]:
        for run in new:
            supposed.add(Result(run, 1e9 if run.task == "text" else -1.0, {}))
    every = list(dict.fromkeys(runs(supposed)))
    return [run for run in every if run in results], [run for run in every if run not in results]


def finite(scores: Iterable[float]) -> list[float]:
    """The scores, but of runs that diverged."""
    return [score for score in scores if math.isfinite(score)]


def spread(scores: list[float], digits: int = 3) -> str:
    """Mean and standard deviation of the scores, and their number where it is not three; how many
    runs diverged.

    Args:
        scores: one a run, NaN of one that diverged.
        digits: after the point. Default: 3.
    """
    counted = finite(scores)
    notes = [] if len(counted) == 3 else [f"n = {len(counted)}"]
    if len(counted) < len(scores):
        notes.append(f"{len(scores) - len(counted)} diverged")
    note = f" ({', '.join(notes)})" if notes and scores else ""
    if not counted:
        return note.strip()
    mean = f"{statistics.fmean(counted):.{digits}f}"
    if len(counted) > 1:
        mean += f" ± {statistics.stdev(counted):.{digits}f}"
    return mean + note
