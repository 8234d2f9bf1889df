"""One run from its start to its result, and a process that performs several at a time."""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import math
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import gla_ext
from experiments.language import LanguageTrainer
from experiments.pack import read_pack
from experiments.recall import EVALUATIONS, SOLVED, RecallTrainer
from experiments.runs import Result, Run
from gla_ext.devices import in_fixed_order
from gla_ext.model import count_parameters
from gla_ext.train.data import Corpus, load_corpus
from gla_ext.train.tokens.corpus import TokenCorpus
from gla_ext.train.tokens.folder import open_folder
from gla_ext.train.trainer import Trainer

TINY_TEXT_BYTES = 200_000
_CURVE = 100  # points of a training curve that a result keeps
# Initial weights come from the generator of all threads, which torch.compile, at a first update,
# sets back after it has traced.
_setting_up = threading.Lock()


def text_digest(pack: Path | None) -> str:
    """What `Run.text` says of a pack, a corpus of tokens, or the small text of tests (None)."""
    if pack is None or pack.is_dir():
        return _corpus(pack).fingerprint[:12]
    with pack.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]


@functools.cache
def _corpus(pack: Path | None) -> Corpus | TokenCorpus:
    if pack is None:
        return load_corpus(max_bytes=TINY_TEXT_BYTES)
    return TokenCorpus((open_folder(pack),)) if pack.is_dir() else read_pack(pack)


def perform(run: Run, pack: Path | None, device: torch.device, cuda_graph: bool = False) -> Result:
    """Trains and evaluates; several threads may do so at a time.

    Args:
        run: the run.
        pack: the text, which only runs on text read: a pack, the folder of a corpus of tokens, or
            None, which is the small one.
        device: where.
        cuda_graph: whether a training step is one CUDA graph. Default: False.
    """
    # On a stream of its own a thread's work does not wait for the others'.
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    try:
        with torch.cuda.stream(stream):
            return _perform(run, pack, device, cuda_graph)
    finally:  # of a failed run too: the next one gets its memory
        if stream is not None:
            stream.synchronize()


def _perform(run: Run, pack: Path | None, device: torch.device, cuda_graph: bool) -> Result:
    with _setting_up:
        start = time.perf_counter()
        if run.task == "recall":
            trainer: Trainer = RecallTrainer(run, device, cuda_graph)
            trainer.update()  # the first one compiles
        else:
            trainer = LanguageTrainer(run, _corpus(pack), device, cuda_graph)
    score, details = _recall(trainer) if run.task == "recall" else _text(trainer)
    losses = trainer.losses[: trainer.step].double().cpu()
    span = max(1, len(losses) // _CURVE)
    details |= {
        "losses": [_short(part.mean().item()) for part in losses.split(span)],
        "steps_a_loss": span,
        "steps_done": trainer.step,
        "parameters": count_parameters(trainer.model),
        "seconds": round(time.perf_counter() - start, 1),
        **_environment(device),
    }
    return Result(run, score, details)


def _recall(trainer: RecallTrainer) -> tuple[float, dict[str, Any]]:
    """Accuracy, after a first update; a run ends early when it has solved the task."""
    steps = trainer.settings.steps
    every, accuracy = max(1, steps // EVALUATIONS), 0.0
    while True:
        if trainer.step % every == 0 or trainer.step == steps:
            accuracy = trainer.evaluate()
        if trainer.step == steps or accuracy >= SOLVED:
            break
        trainer.update()
    curve = [[step, _short(value)] for step, value in trainer.evaluations]
    return max(value for _, value in trainer.evaluations), {"accuracies": curve}


def _text(trainer: LanguageTrainer) -> tuple[float, dict[str, Any]]:
    """Bits a byte, and by position; a loss that is no number ends the run without a score."""
    start = time.perf_counter()
    while trainer.step < trainer.settings.steps:
        trainer.update()
        if trainer.step % 100 == 0 and not math.isfinite(trainer.recent_loss()):
            return math.nan, {"by_position": []}
    trainer.recent_loss()  # waits for the last step
    seconds = time.perf_counter() - start
    by_position = trainer.bits_by_position()
    details = {
        "by_position": [[place, _short(bits)] for place, bits in by_position],
        "long_documents": len(trainer.long),
        "tokens_per_second": round(trainer.run.tokens / seconds),
    }
    return trainer.score(by_position), details


def _short(x: float) -> float | None:
    return round(x, 5) if math.isfinite(x) else None


@functools.cache
def _environment(device: torch.device) -> dict[str, str]:
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else "CPU",
        "torch": torch.__version__,
        "gla_ext": f"{gla_ext.__version__} {_commit()}".strip(),
        "command": " ".join(["python -m experiments.run", *sys.argv[1:]]),
    }


def _commit() -> str:
    """The commit of the working tree, '' where that is not known."""
    command = ["git", "-C", Path(__file__).parent, "rev-parse", "--short", "HEAD"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""


class Worker:
    """A process that performs runs, several at a time, and can be ended while it does.

    Its threads share a GPU better than processes would, whose kernels never run at the same time.

    Args:
        texts: what `perform` is given as a pack, by `Run.text`.
        device, cuda_graph: as `perform`'s.
    """

    def __init__(self, texts: dict[str, Path | None], device: str, cuda_graph: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_work, args=(theirs, texts, device, cuda_graph, sys.argv[1:]), daemon=True
        )
        self._process.start()
        theirs.close()
        self.running: set[Run] = set()

    def start(self, run: Run) -> None:
        """Gives it a run, beside those that it has."""
        self.running.add(run)
        with contextlib.suppress(BrokenPipeError):  # of a process that has ended: see `results`
            self.connection.send(run)

    def results(self) -> list[tuple[Run, Result | str]]:
        """A run that has ended with its result, or with how it failed; waits for one. Of a process
        that has ended, all its runs.
        """
        try:
            run, result = self.connection.recv()
        except (EOFError, ConnectionResetError):  # the latter where it has left a run unread
            self._process.join()
            how = f"its process ended with status {self._process.exitcode}"
            ended = [(run, how) for run in self.running]
        else:
            ended = [(run, result)]
        self.running -= {run for run, _ in ended}
        return ended

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def end(self) -> None:
        """Ends the process, whatever it is at."""
        self._process.kill()
        self._process.join()
        self.connection.close()


def _work(
    connection: Connection,
    texts: dict[str, Path | None],
    device: str,
    cuda_graph: bool,
    arguments: list[str],
) -> None:
    sys.argv[1:] = arguments  # what _environment says of the command
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 4))
    where, sending = torch.device(device), threading.Lock()

    def answer(run: Run) -> None:
        result: Result | str
        try:
            result = perform(run, texts.get(run.text), where, cuda_graph)
        except Exception:  # of any kind: it is the run's end, which is reported, not the worker's
            result = traceback.format_exc()
        if where.type == "cuda":
            gc.collect()  # a trainer refers to itself; its memory is the next run's
        with sending:
            connection.send((run, result))

    with in_fixed_order(where):
        while True:
            try:
                run = connection.recv()
            except EOFError:
                return
            threading.Thread(target=answer, args=(run,), daemon=True).start()
