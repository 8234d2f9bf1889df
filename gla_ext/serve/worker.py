"""An engine in a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from gla_ext.serve.engine import Deltas, Engine
from gla_ext.serve.request import Request
from gla_ext.serve.sequence import Sequence

logger = logging.getLogger("gla_ext.serve")


class Worker:
    """Steps an engine, which no other thread then steps, while there is something to do.

    deliver gets what each step added, in the worker's thread; error is what ended it, or None.
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
        """As `Engine.submit`."""
        sequences = self.engine.submit(*requests)
        with self._work:
            self._work.notify()
        return sequences

    def close(self) -> None:
        """Finishes what was accepted, and waits for that."""
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
        except Exception as error:  # whatever it was, clients must not wait for ever
            logger.exception("the engine has failed")
            self.error = error
            self._deliver(self.engine.cancel_all())
