"""The loop of a training run, and the signals that stop it."""

from __future__ import annotations

import math
import signal
import sys
import time
from types import FrameType

from gla_ext.train.parallel import ONE_PROCESS, Parallel
from gla_ext.train.presets import Options
from gla_ext.train.run_folder import CHECKPOINT
from gla_ext.train.trainer import Trainer


class Interrupted(Exception):
    """A signal asked the run to stop."""


class StopSignals:
    """While active, the first SIGINT or SIGTERM is stored in `number`; a second one kills the
    process.

    A signal to any of the run's processes stops all of them at the same point, because all of them
    check equally often.
    """

    number: int | None = None

    def __init__(self, parallel: Parallel = ONE_PROCESS) -> None:
        self._parallel = parallel

    def __enter__(self) -> StopSignals:
        self._previous = {n: signal.signal(n, self._note) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        signal.signal(number, signal.SIG_DFL)

    def check(self) -> None:
        if self.stopped():
            raise Interrupted

    def stopped(self) -> bool:
        number = self._parallel.largest(self.number or 0)
        if number:
            self.number = number
        return bool(number)


def train(trainer: Trainer, options: Options, signals: StopSignals) -> dict[str, float]:
    """Trains to the last step and saves checkpoints; returns the times for `metrics.json`.

    The speed counts only steps, without evaluations, checkpoints and the first step, which
    compiles.
    """
    from tqdm import tqdm

    steps, first = trainer.settings.steps, trainer.step
    eval_every = trainer.settings.eval_every or max(250, steps // 4)
    checkpoint = options.out / CHECKPOINT
    pauses = (10, eval_every, options.save_every, steps)
    interval = 0.5 if sys.stderr.isatty() else 10.0
    first_seconds, seconds, rate, saved = 0.0, 0.0, 0.0, trainer.step
    with tqdm(total=steps, initial=first, desc="train", unit="step", mininterval=interval) as bar:
        while trainer.step < steps:
            due = trainer.step > 0 and trainer.step % eval_every == 0
            if due and trainer.step not in dict(trainer.evaluations):
                trainer.evaluate(signals.stopped)
            if not signals.stopped():
                start = time.perf_counter()
                trainer.update()
                done = trainer.step - first
                reads = done == 1 or not all(trainer.step % n for n in pauses)
                loss = _finite_loss(trainer) if reads else 0.0  # reading it waits for a GPU
                if done == 1:
                    first_seconds = time.perf_counter() - start
                else:
                    seconds += time.perf_counter() - start
                    rate = trainer.settings.tokens * (done - 1) / seconds
                if reads:
                    speed = f", {rate:,.0f} tokens/s" if rate else ""
                    bar.set_postfix_str(f"{loss:.3f} bits/byte{speed}", refresh=False)
                bar.update()
            due = trainer.step % options.save_every == 0 or trainer.step == steps
            if (due or signals.stopped()) and trainer.step > saved:
                trainer.save(checkpoint)
                saved = trainer.step
            signals.check()
    return {"tokens_per_second": round(rate), "first_step_seconds": round(first_seconds, 1)}


def _finite_loss(trainer: Trainer) -> float:
    """The mean of the last losses in bits per byte; raises ValueError if it is not finite."""
    loss = trainer.recent_loss()
    if not math.isfinite(loss):
        raise ValueError(
            f"expected a finite loss, got {loss} before step {trainer.step}; a lower --lr may help"
        )
    return loss
