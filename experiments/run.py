"""`python -m experiments.run`: performs the runs that are not done yet, as many as time allows.

Results are lines of JSON in the folder --out. A run is done once one of its lines is there or in
experiments/results; one that is cut off is only started again, and loses nothing but itself. Runs
that follow from others, as from a sweep of learning rates, are found as these end.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path

from experiments.comparisons import ablations, length, mqar, value_gates
from experiments.comparisons.mqar import SLOW_LAYERS
from experiments.perform import Worker, text_digest
from experiments.runs import RESULTS, Result, Results, Run, keep
from experiments.text import PACK
from gla_ext.train.devices import check_device, default_device

EXPERIMENTS = {
    "mqar": mqar,
    "ablations": ablations,
    "length": length,
    "value_gates": value_gates,
}
_START_SECONDS = 20.0  # of a worker: imports, text, the first kernels


def pending(names: list[str], scale: str, results: Results, text: str) -> Iterator[Run]:
    """The runs that are not done, each once, in the order of the experiments' names."""
    seen = set()
    for name in names:
        for run in EXPERIMENTS[name].runs(scale, results, text):
            if run not in results and run not in seen:
                seen.add(run)
                yield run


def share(run: Run) -> float:
    """The part of a GPU that a run is taken to fill."""
    if run.task == "text":
        return 1.0
    return 0.5 if run.width > 256 else 0.25


def estimated_seconds(run: Run, results: Results) -> float:
    """How long a run takes on a GPU: as the done ones of its kind, else a guess for an H100."""

    def kind(of: Run) -> tuple:
        return of.task, of.layer, of.width, of.layers, of.seq_len, of.segments, of.steps

    alike = [r.details["seconds"] for r in results if kind(r.run) == kind(run)]
    if alike:
        return max(statistics.median(alike), alike[-1])
    if run.layer in SLOW_LAYERS:
        return 10 + 1.2e-3 * run.steps * run.seq_len  # a loop over tokens
    tokens_per_second = 1e6 if run.task == "text" else 4e6
    return 10 + run.tokens / tokens_per_second * (1.5 if "value" in run.layer else 1)


class Session:
    """Workers on one device until a deadline."""

    def __init__(self, options: argparse.Namespace, pack: Path | None, results: Results) -> None:
        self.options, self.pack, self.results = options, pack, results
        self.deadline = time.monotonic() + 60 * options.minutes
        self.workers: list[Worker] = []
        self.failed: set[Run] = set()
        self.text = text_digest(pack)

    def perform(self) -> tuple[int, int]:
        """Numbers of results kept and of runs that failed."""
        kept = 0
        try:
            while True:
                self._start()
                busy = {w.connection: w for w in self.workers if w.run is not None}
                if not busy:
                    return kept, len(self.failed)
                ready = wait(busy, timeout=max(0, self.deadline - time.monotonic()))
                if not ready:
                    for worker in busy.values():
                        print(f"cut off: {worker.run}", flush=True)
                    return kept, len(self.failed)
                kept += sum(self._end(busy[connection]) for connection in ready)
        finally:
            for worker in self.workers:
                worker.end()

    def _start(self) -> None:
        """Starts what fits on the device beside what runs, and into the time that is left."""
        running = {worker.run for worker in self.workers if worker.run is not None}
        free = 1.0 - sum(share(run) for run in running)
        for run in pending(self.options.only, self.options.scale, self.results, self.text):
            if run in running or run in self.failed:
                continue
            if len(running) >= self.options.jobs or share(run) > free + 1e-9:
                return
            idle = next((worker for worker in self.workers if worker.run is None), None)
            seconds = estimated_seconds(run, self.results) + (0 if idle else _START_SECONDS)
            if time.monotonic() + seconds > self.deadline:
                continue
            if idle is None:
                idle = Worker(self.pack, self.options.device)
                self.workers.append(idle)
            idle.start(run)
            running.add(run)
            free -= share(run)

    def _end(self, worker: Worker) -> int:
        """Keeps a worker's result; returns how many there were."""
        run = worker.run
        result = worker.result()
        if not worker.alive:
            self.workers.remove(worker)
        if not isinstance(result, Result):
            self.failed.add(run)
            print(f"failed: {run}\n{result}", file=sys.stderr, flush=True)
            return 0
        keep(result, self.options.out)
        self.results.add(result)
        print(f"{result.score:.4f} after {result.details['seconds']:.0f} s: {run}", flush=True)
        return 1


def main(argv: list[str] | None = None) -> int:
    """Runs the command line: 0, or 1 if runs failed, or 2 if it could not start."""
    options = _command_line().parse_args(argv)
    options.only = options.only or list(EXPERIMENTS)
    try:
        if unknown := set(options.only) - set(EXPERIMENTS):
            raise ValueError(f"expected experiments of {', '.join(EXPERIMENTS)}, got {unknown}")
        options.device = default_device() if options.device == "auto" else options.device
        check_device(options.device)
        results = Results({RESULTS, options.out})
        on_text = set(options.only) - {"mqar"}
        pack = options.text if options.scale == "full" and on_text else None
        if pack is not None and not pack.is_file():
            raise FileNotFoundError(
                f"expected --text to be a pack, got {pack}, which is not there; "
                "`python -m experiments.text` makes one"
            )
        session = Session(options, pack, results)
        if options.list:
            for run in pending(options.only, options.scale, results, session.text):
                print(f"{estimated_seconds(run, results):5.0f} s  {run}")
            return 0
        kept, failed = session.perform()
    except (OSError, ValueError) as error:
        print(f"experiments.run: {error}", file=sys.stderr)
        return 2
    left = sum(1 for _ in pending(options.only, options.scale, results, session.text))
    print(f"{kept} results in {options.out}; {failed} failed; {left} runs are still to be done")
    return 1 if failed else 0


def _command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.run",
        description="performs the runs that are not done yet, as many as time allows.",
    )
    add = parser.add_argument
    names, default = list(EXPERIMENTS), "default: %(default)s"
    add("only", nargs="*", metavar="EXPERIMENT", help=f"in this order, of {names}; default: all")
    add("--scale", choices=("tiny", "full"), default="full", help=default)
    add("--minutes", type=float, default=8.0, help=f"ends after so many; {default}")
    add("--jobs", type=int, default=4, help=f"runs at a time, if they are small; {default}")
    add("--device", default="auto", help=default)
    add("--text", type=Path, default=PACK, help=f"what experiments.text packed; {default}")
    add("--out", type=Path, default=RESULTS, help=f"folder for new results; {default}")
    add("--list", action="store_true", help="only say what is to be done, and for how long")
    return parser


if __name__ == "__main__":
    sys.exit(main())
