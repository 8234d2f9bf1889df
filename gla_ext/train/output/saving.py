"""When a run saves checkpoints, and how training goes on meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from gla_ext.train.presets import Options
from gla_ext.train.run_folder import CHECKPOINT, keep_earlier

if TYPE_CHECKING:
    from gla_ext.train.trainer import Trainer


class Saver:
    """Saves checkpoints each so many steps or minutes; a context, at whose end the last is whole.

    A snapshot is taken on the host; a thread writes it while the next updates run. Several
    processes write theirs together.
    """

    def __init__(self, trainer: Trainer, options: Options) -> None:
        self.trainer, self.options = trainer, options
        self.saved, self.time = trainer.step, time.monotonic()
        self._thread = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._thread.shutdown()
        if kind is None:  # else another process may be elsewhere
            self._wait()
        elif self._writing is not None:
            self._writing.result()

    def is_due(self) -> bool:
        """Whether the present step is one to save, on all processes alike."""
        step, minutes = self.trainer.step, self.options.save_minutes
        late = bool(minutes) and time.monotonic() - self.time > 60 * minutes
        if minutes:
            late = bool(self.trainer.parallel.largest(int(late)))
        return late or step % self.options.save_every == 0 or step == self.trainer.settings.steps

    def save(self) -> None:
        """Saves the present step, unless it is saved already; waits for the write before it."""
        if self.trainer.step == self.saved:
            return
        self._wait()
        self.saved, self.time = self.trainer.step, time.monotonic()
        self._writing = self._thread.submit(self._write, self.trainer.snapshot())

    def _wait(self) -> None:
        """Waits for the write before; what the first process met is everyone's error."""

        def wait() -> None:
            if self._writing is not None:
                self._writing.result()

        self.trainer.parallel.from_first(wait)
        wait()

    def _write(self, write: Callable[[Path], None]) -> None:
        if self.trainer.parallel.is_first:
            keep_earlier(self.options.out, self.options.keep - 1)
        write(self.options.out / CHECKPOINT)
