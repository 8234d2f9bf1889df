"""`python -m experiments.run`: performs the runs that are not done yet, as many as time allows.

Results are lines of JSON in the folder --out. A run is done once one of its lines is there or in
experiments/results; one that is cut off is only started again, and loses nothing but itself. Runs
that follow from others, as from a sweep of learning rates, are found as these end.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path

import torch

from experiments.comparisons import ablations, length, mqar, tokens, transformer, value_gates
from experiments.comparisons.budget import Budget
from experiments.perform import Worker, text_digest
from experiments.recall import PLAIN_TORCH
from experiments.runs import RESULTS, Result, Results, Run, foreseen, keep
from experiments.text import PACK
from gla_ext.devices import check_device, default_device
from gla_ext.train.graph import check_graph
from gla_ext.train.tokens.corpus import TokenCorpus
from gla_ext.train.tokens.folder import open_folder

EXPERIMENTS = {
    "mqar": mqar,
    "ablations": ablations,
    "length": length,
    "value_gates": value_gates,
    "transformer": transformer,
    # The cell that decides first.
    "budget_512": Budget(0),
    "budget_256": Budget(1),
    "budget_128": Budget(2),
    "budget_64": Budget(3),
    "tokens_8k": tokens.AT_8K,
    "tokens_32k": tokens.AT_32K,
    "tokens_length": length.ON_TOKENS,
}
# How many times as long as GLA a step of recall takes, alone on an H200: at widths 64 and 128, and
# of RWKV, Mamba and Hyena at 256.
SLOWER = {
    "attention": 1.6,
    "gla, convolution": 1.1,
    "retnet": 1.45,
    "hyena": 2.6,
    "rwkv": 2.8,
    "mamba": 4.4,
}
LONGEST_RUN = 450.0  # seconds, which recall has when it shares a GPU, or alone if that is longer
_START_SECONDS = 20.0  # of a worker: imports, text, the first kernels
_COMPILE_SECONDS = 45.0  # at most, with 16 cores


Texts = dict[int, str]  # digests of what is read, by `Run.vocabulary`


def vocabulary(name: str, scale: str) -> int:
    """What an experiment reads: tokens of a vocabulary of so many; 0: bytes, or nothing."""
    sizes = getattr(EXPERIMENTS[name], "sizes", None)
    return sizes[scale].vocabulary if sizes else 0


def of_all(names: list[str], scale: str, texts: Texts, results: Results) -> Iterator[Run]:
    """The experiments' runs, given what is done."""
    for name in names:
        text = texts.get(vocabulary(name, scale), "")
        yield from EXPERIMENTS[name].runs(scale, results, text)


def pending(names: list[str], scale: str, results: Results, texts: Texts) -> list[Run]:
    """The runs that are not done, each once: seed after seed, and of a seed in the order of the
    experiments' names, so that a table of all that is compared comes before its spread.
    """
    runs = dict.fromkeys(of_all(names, scale, texts, results))
    return sorted((run for run in runs if run not in results), key=lambda run: run.seed)


def still_to_be_done(names: list[str], scale: str, results: Results, texts: Texts) -> list[Run]:
    """`pending`, with the runs that follow from it."""
    _, left = foreseen(partial(of_all, names, scale, texts), results)
    return sorted(left, key=lambda run: run.seed)


def share(run: Run) -> float:
    """The part of a GPU that a run is taken to fill."""
    if run.task == "text":
        return 1.0
    return min(1.0, max(0.25 if run.width > 256 else 0.125, _alone(run) / LONGEST_RUN))


def _alone(run: Run) -> float:
    """Seconds of recall on an H200 that nothing else uses, without an early end."""
    step = 1.2e-3 + 1.1e-10 * run.batch_size * run.seq_len * run.width
    return run.steps * step * SLOWER.get(run.layer, 1.0)


def estimated_seconds(run: Run, results: Results) -> float:
    """How long a run takes on a GPU: as the done ones of its kind would have if none had ended
    early, else a guess for an H100.
    """

    def kind(of: Run) -> tuple:
        sizes = of.width, of.layers, of.seq_len, of.segments, of.consecutive
        return of.task, of.layer, *sizes, of.steps, of.vocabulary

    done = [r.details for r in results if kind(r.run) == kind(run)]
    alike = [of["seconds"] * run.steps / of["steps_done"] for of in done]
    if alike:
        return max(statistics.median(alike), alike[-1])
    if run.task == "recall":
        start = 5 + (_COMPILE_SECONDS if run.layer in PLAIN_TORCH else 0)
        return start + _alone(run) / share(run)
    seconds = run.tokens * run.width * (run.layers * run.width / 3.8e12 + run.vocabulary / 6e13)
    if run.layer == "attention":
        seconds *= 1 + run.seq_len / 3e3
    elif "value" in run.layer:
        seconds *= 1.5
    elif run.layer == "mamba":
        seconds *= 3.5
    return 6 + seconds


class Session:
    """A worker on each device until a deadline."""

    def __init__(
        self, options: argparse.Namespace, sources: dict[int, Path | None], results: Results
    ) -> None:
        self.options, self.results = options, results
        self.deadline = time.monotonic() + 60 * options.minutes
        self.workers: dict[str, Worker] = {}
        self.failed: set[Run] = set()
        self.texts = {of: text_digest(source) for of, source in sources.items()}
        self.sources = {self.texts[of]: source for of, source in sources.items()}

    def perform(self) -> tuple[int, int]:
        """Numbers of results kept and of runs that failed."""
        kept = 0
        try:
            while True:
                waiting = pending(self.options.only, self.options.scale, self.results, self.texts)
                for device in self.options.device:
                    self._start(device, waiting)
                running = [worker for worker in self.workers.values() if worker.running]
                if not running:
                    return kept, len(self.failed)
                left = max(0, self.deadline - time.monotonic())
                ready = wait([worker.connection for worker in running], left)
                if not ready:
                    for run in self._running():
                        print(f"cut off: {run}", flush=True)
                    return kept, len(self.failed)
                for worker in running:
                    if worker.connection in ready:
                        kept += sum(self._end(*ended) for ended in worker.results())
                self.workers = {of: worker for of, worker in self.workers.items() if worker.alive}
        finally:
            for worker in self.workers.values():
                worker.end()

    def _running(self) -> set[Run]:
        return set().union(*(worker.running for worker in self.workers.values()))

    def _start(self, device: str, waiting: list[Run]) -> None:
        """Starts what fits on the device beside what runs, and into the time that is left."""
        worker = self.workers.get(device)
        here = worker.running if worker is not None else set()
        free, running = 1.0 - sum(share(run) for run in here), self._running()
        for run in waiting:
            if run in running or run in self.failed:
                continue
            if len(here) >= self.options.jobs or share(run) > free + 1e-9:
                return
            seconds = estimated_seconds(run, self.results)
            seconds += _START_SECONDS if worker is None else 0
            if time.monotonic() + seconds > self.deadline:
                continue
            if worker is None:
                worker = Worker(self.sources, device, self.options.cuda_graph)
                self.workers[device], here = worker, worker.running
            worker.start(run)
            free -= share(run)

    def _end(self, run: Run, result: Result | str) -> int:
        """Keeps a run's result; returns how many there were."""
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
    try:
        tokens = {TokenCorpus((open_folder(of),)).vocab_size: of for of in options.tokens}
        read = {name: vocabulary(name, options.scale) for name in EXPERIMENTS}
        options.only = options.only or [name for name in read if read[name] in (0, *tokens)]
        if unknown := set(options.only) - set(EXPERIMENTS):
            raise ValueError(f"expected experiments of {', '.join(EXPERIMENTS)}, got {unknown}")
        options.device = list(dict.fromkeys(of for each in options.device for of in _devices(each)))
        for device in options.device:
            check_device(device)
        if options.jobs < 1 or not 0 <= options.minutes < math.inf:
            raise ValueError(
                "expected --jobs to be at least 1 and --minutes a number, not negative"
            )
        if options.cuda_graph is None:
            options.cuda_graph = all(torch.device(of).type == "cuda" for of in options.device)
        if options.cuda_graph:
            for device in options.device:
                check_graph(torch.device(device))
        results = Results(dict.fromkeys((RESULTS, options.out)))
        if missing := {read[name] for name in options.only} - {0, *tokens}:
            raise ValueError(
                f"expected --tokens to name corpora of {missing} tokens too; `python -m "
                "experiments.pretraining corpus --vocabulary N` makes one"
            )
        on_text = [x for x in options.only if not (read[x] or x.startswith(("mqar", "budget")))]
        pack = options.text if options.scale == "full" and on_text else None
        if pack is not None and not pack.is_file():
            raise FileNotFoundError(
                f"expected --text to be a pack, got {pack}, which is not there; "
                "`python -m experiments.text` makes one"
            )
        session = Session(options, {0: pack} | tokens, results)
        if options.list:
            for run in still_to_be_done(options.only, options.scale, results, session.texts):
                print(f"{estimated_seconds(run, results):5.0f} s  {run}")
            return 0
        kept, failed = session.perform()
    except (OSError, ValueError) as error:
        print(f"experiments.run: {error}", file=sys.stderr)
        return 2
    left = len(still_to_be_done(options.only, options.scale, results, session.texts))
    print(f"{kept} results in {options.out}; {failed} failed; {left} runs are still to be done")
    return 1 if failed else 0


def _devices(name: str) -> list[str]:
    """The device's name; of "auto" all GPUs', or where the operators run on none the CPU's."""
    if name != "auto":
        return [name]
    if default_device() == "cpu":
        return ["cpu"]
    return [f"cuda:{i}" for i in range(torch.cuda.device_count())]


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
    many = f"runs at a time on each device, if they are small; {default}"
    add("--jobs", type=int, default=8, help=many)
    graphs = "training steps are CUDA graphs; default: on a GPU"
    add("--cuda-graph", action=argparse.BooleanOptionalAction, help=graphs)
    add("--device", nargs="+", default=["auto"], help="default: all GPUs, else the CPU")
    add("--text", type=Path, default=PACK, help=f"what experiments.text packed; {default}")
    add("--tokens", type=Path, nargs="+", default=[], help="corpora of experiments.pretraining")
    add("--out", type=Path, default=RESULTS, help=f"folder for new results; {default}")
    add("--list", action="store_true", help="only say what is to be done, and for how long")
    return parser


if __name__ == "__main__":
    sys.exit(main())
