"""The loop of a training run, and the signals that stop it."""

from __future__ import annotations

import signal
import sys
import time
from types import FrameType

from gla_ext.train.output.log import Log
from gla_ext.train.output.saving import Saver
from gla_ext.train.parallel import ONE_PROCESS, Parallel
from gla_ext.train.presets import Options
from gla_ext.train.trainer import Trainer

MOST_SKIPPED = 20  # bad updates in a row


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
    """Trains to the last step, saves checkpoints and evaluates; returns the times for
    `metrics.json`.
    """
    checked = trainer.step
    with Log(trainer, options) as log, Saver(trainer, options) as saver:
        while trainer.step < trainer.settings.steps:
            if trainer.step > 0 and trainer.step % trainer.eval_every == 0:
                _evaluate(trainer, log, signals)
            stops = signals.stopped()  # once a step, as the processes ask each other
            if not stops:
                start = time.perf_counter()
                trainer.update()
                log.update(start)
            if log.reads and checked < trainer.step:
                _check(trainer, checked, options, saver)
                checked = trainer.step
            if stops or saver.is_due():
                saver.save()
            if stops:
                raise Interrupted
    if trainer.step not in dict(trainer.evaluations):
        print("Evaluating on the held-out text ...", flush=True)
    _evaluate(trainer, log, signals)
    signals.check()
    return log.speed()


def _evaluate(trainer: Trainer, log: Log, signals: StopSignals) -> None:
    """An evaluation, unless there is one of this step."""
    if trainer.step not in dict(trainer.evaluations):
        trainer.evaluate(signals.stopped)
        if trainer.evaluations and trainer.evaluations[-1][0] == trainer.step:
            log.evaluation()


def _check(trainer: Trainer, since: int, options: Options, saver: Saver) -> None:
    """Stops the run after a checkpoint if updates since a step were bad, or says that they were
    skipped.

    Raises:
        ValueError: with --skip-bad only if the weights are no numbers, or all of the last
            MOST_SKIPPED updates were bad.
    """
    from tqdm import tqdm

    bad = [since + i for i in trainer.bad[since : trainer.step].nonzero().flatten().tolist()]
    if not bad:
        return
    step = bad[0]
    loss, norm = trainer.losses[step].item(), trainer.norms[step].item()
    what = f"a loss of {loss:.3f} and a gradient norm of {norm:.3g} in update {step + 1}"
    whole = trainer.has_finite_weights()
    last = trainer.bad[max(0, trainer.step - MOST_SKIPPED) : trainer.step]
    if whole and options.skip_bad and not (last.all() and len(last) == MOST_SKIPPED):
        for step in bad:
            loss = f"{trainer.losses[step].item():.3f}"
            tqdm.write(f"Skipped update {step + 1}, whose loss is {loss}", file=sys.stderr)
        return
    if whole:
        saver.save()
        ends = f"which was left out; --resume goes on behind step {trainer.step}, with --skip-bad "
        ends += "also past others"
    else:
        ends = "and weights that are no numbers; --resume goes on from the last checkpoint"
    raise ValueError(
        f"expected finite losses without spikes, got {what}, {ends}; a lower --lr may help"
    )
