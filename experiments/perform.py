"""One run from its start to its result, and a process that performs one after the other."""

from __future__ import annotations

import functools
import hashlib
import math
import multiprocessing
import os
import subprocess
import sys
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
from gla_ext.model import count_parameters
from gla_ext.train.data import Corpus, load_corpus
from gla_ext.train.trainer import Trainer

TINY_TEXT_BYTES = 200_000
_CURVE = 100  # points of a training curve that a result keeps


def text_digest(pack: Path | None) -> str:
    """What `Run.text` says of a pack, or of the small text of tests (None)."""
    if pack is None:
        return _corpus(None).fingerprint[:12]
    with pack.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]


@functools.cache
def _corpus(pack: Path | None) -> Corpus:
    return load_corpus(max_bytes=TINY_TEXT_BYTES) if pack is None else read_pack(pack)


def perform(run: Run, pack: Path | None, device: torch.device) -> Result:
    """Trains and evaluates.

    Args:
        run: the run.
        pack: the text, which only runs on text read; None is the small one.
        device: where.
    """
    torch.manual_seed(run.seed)
    start = time.perf_counter()
    if run.task == "recall":
        trainer: Trainer = RecallTrainer(run, device)
        score, details = _recall(trainer)
    else:
        trainer = LanguageTrainer(run, _corpus(pack), device)
        score, details = _text(trainer)
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
    """Accuracy; a run ends early when it has solved the task."""
    steps = trainer.settings.steps
    every, accuracy = max(1, steps // EVALUATIONS), 0.0
    while trainer.step < steps and accuracy < SOLVED:
        trainer.train_step()
        if trainer.step % every == 0 or trainer.step == steps:
            accuracy = trainer.evaluate()
    curve = [[step, _short(value)] for step, value in trainer.evaluations]
    return max(value for _, value in trainer.evaluations), {"accuracies": curve}


def _text(trainer: LanguageTrainer) -> tuple[float, dict[str, Any]]:
    """Bits a byte, and by position; a loss that is no number ends the run without a score."""
    start = time.perf_counter()
    while trainer.step < trainer.settings.steps:
        trainer.train_step()
        if trainer.step % 100 == 0 and not math.isfinite(trainer.recent_loss()):
            return math.nan, {"by_position": []}
    if trainer.device.type == "cuda":
        torch.cuda.synchronize()
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
    """A process that performs runs, so that several share a GPU and a late one can be ended."""

    def __init__(self, pack: Path | None, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_work, args=(theirs, pack, device, sys.argv[1:]), daemon=True
        )
        self._process.start()
        theirs.close()
        self.run: Run | None = None

    def start(self, run: Run) -> None:
        """Gives it a run; it must have none."""
        self.run = run
        self.connection.send(run)

    def result(self) -> Result | str:
        """The result of the run, or how it failed; waits for it."""
        self.run = None
        try:
            return self.connection.recv()
        except EOFError:
            self._process.join()
            return f"its process ended with status {self._process.exitcode}"

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def end(self) -> None:
        """Ends the process, whatever it is at."""
        self._process.kill()
        self._process.join()
        self.connection.close()


def _work(connection: Connection, pack: Path | None, device: str, arguments: list[str]) -> None:
    sys.argv[1:] = arguments  # what _environment says of the command
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 4))
    where = torch.device(device)
    while True:
        try:
            run = connection.recv()
        except EOFError:
            return
        try:
            connection.send(perform(run, pack, where))
        except Exception:  # of any kind: it is the run's end, which is reported, not the worker's
            connection.send(traceback.format_exc())
        if where.type == "cuda":
            torch.cuda.empty_cache()
