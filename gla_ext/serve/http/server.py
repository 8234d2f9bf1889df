"""Runs the HTTP server until a signal, and then finishes the accepted requests."""

from __future__ import annotations

import contextlib
import logging
import resource
import signal
import socket

import uvicorn

from gla_ext.serve.engine import Engine
from gla_ext.serve.http.application import Application, Options
from gla_ext.serve.http.connections import protocol

logger = logging.getLogger("gla_ext.serve")

BACKLOG = 2048  # connections that may wait to be accepted
MOST_HEAD = 1 << 16  # most bytes of a request's head


def serve(
    engine: Engine,
    host: str = "127.0.0.1",
    port: int = 8000,
    options: Options | None = None,
    connections: int = 2048,
    shutdown_seconds: int = 60,
) -> None:
    """Warms an engine up and serves it until SIGINT or SIGTERM.

    After the signal no connection is accepted, and accepted requests are finished, within
    shutdown_seconds. A second SIGINT ends the server at once.

    Args:
        host: address to listen on. Default: '127.0.0.1', only this machine.
        port: 0 takes a free one. Default: 8000.
        options: see `Options`.
        connections: most connections at once; more get status 503. Default: 2048.
        shutdown_seconds: see above. Default: 60.

    Raises:
        RuntimeError: if the engine has failed; clients have received an error.
        OSError: if it cannot listen on the address.
    """
    options = Options() if options is None else options
    _allow_open_files(2 * connections)
    failed = False

    def stop() -> None:
        nonlocal failed
        failed = server.should_exit = True

    app = Application(engine, options, stop).starlette()
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level=logging.WARNING,
        lifespan="on",
        backlog=BACKLOG,
        http=protocol(options.read_seconds),
        h11_max_incomplete_event_size=MOST_HEAD,
        limit_concurrency=connections + 1,  # uvicorn counts the new connection too
        timeout_keep_alive=30,
        timeout_graceful_shutdown=shutdown_seconds,
    )
    server = _Server(config, engine)
    listening = _listening(host, port, options.write_seconds)
    # uvicorn raises KeyboardInterrupt after it has finished; before, it interrupts the warm-up.
    with listening as listener, contextlib.suppress(KeyboardInterrupt):
        engine.warm_up()
        name = f"[{host}]" if ":" in host else host
        address = f"http://{name}:{listener.getsockname()[1]}"
        with _quiet(signal.SIGTERM):
            print(f"Serving {options.name} on {address}", flush=True)
            server.run(sockets=[listener])
    if failed:
        raise RuntimeError("the engine has failed")


class _Server(uvicorn.Server):
    """Logs when it begins to shut down, and when it has."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self._engine = engine

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        counts = (self._engine.running, self._engine.waiting)
        seconds = self.config.timeout_graceful_shutdown
        logger.info("shutting down: %d sequences run, %d wait, within %d s", *counts, seconds)
        await super().shutdown(sockets)
        logger.info("shut down")


@contextlib.contextmanager
def _quiet(number: signal.Signals):
    """While active, a signal that uvicorn raises again after its end has no effect."""
    before = signal.signal(number, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(number, before)


def _listening(host: str, port: int, write_seconds: float) -> socket.socket:
    """A listening socket. Its connections end if the other side acknowledges no data for so
    long.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    milliseconds = int(1000 * write_seconds)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
    return listener


def _allow_open_files(count: int) -> None:
    """Raises the process's limit of open files, as far as it is allowed to."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
