"""A thread that runs an engine."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from gla_ext.serve.engine import Deltas, Engine
from gla_ext.serve.request import Request
from gla_ext.serve.sequence import Sequence

logger = logging.getLogger("gla_ext.serve")


class Worker:
    """Runs the steps of an engine in its own thread while there is work; no other thread may do so.

    deliver is called with each step's deltas, in the worker's thread. error is the exception that
    ended the worker, or None.
    """

    def __init__(self, engine: Engine, deliver: Callable[[Deltas], None]) -> None:
        self.engine, self._deliver = engine, deliver
        self.error: Exception | None = None
        self._work = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="gla_ext.serve")

    def start(self) -> None:
        self._thread.start()

    def submit(self, *requests: Request) -> list[Sequence]:
        """Like `Engine.submit`, and wakes up the thread."""
        sequences = self.engine.submit(*requests)
        with self._work:
            self._work.notify()
        return sequences

    def close(self) -> None:
        """Finishes all accepted sequences, and waits for that."""
        self.engine.drain()
        with self._work:
            self._closing = True
            self._work.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                with self._work:
                    self._work.wait_for(lambda: self._closing or self.engine.busy)
                    if not self.engine.busy:
                        return
                if deltas := self.engine.step():
                    self._deliver(deltas)
        except Exception as error:  # any exception must end the clients' wait
            logger.exception("the engine has failed")
            self.error = error
            self._deliver(self.engine.cancel_all())
