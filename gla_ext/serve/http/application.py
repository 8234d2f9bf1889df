"""An engine over HTTP, with OpenAI's completion interface. Needs the extra `serve`."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import functools
import hashlib
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from gla_ext.decode import ChangedError
from gla_ext.serve.engine import ClosedError, Deltas, Engine, FullError
from gla_ext.serve.http import protocol
from gla_ext.serve.http.access import Entry, Key, Log
from gla_ext.serve.http.choices import ChatChoice, Echo, Names, TextChoice
from gla_ext.serve.http.fields import RefusedError, short
from gla_ext.serve.http.protocol import Completion
from gla_ext.serve.http.reply import Reply
from gla_ext.serve.sequence import Sequence
from gla_ext.serve.text import chat_tokens
from gla_ext.serve.worker import Worker

PAGE = Path(__file__).with_name("page.html")
MOST_REFUSED = 1 << 26  # bytes; a client that is still sending does not see an error reply
MOST_BODIES = 16  # of the largest size, that are being read
MOST_KEPT = 1 << 24  # log-probabilities of all replies under way
Form = type[TextChoice] | type[ChatChoice]
LONG_TEXT = 4096  # characters of a text that is read in a thread


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the HTTP server.

    Args:
        name: the model's name for clients.
        body_bytes: most bytes of a request.
        read_seconds: time limit for receiving a request's head, and then for its body.
        write_seconds: time limit for a client to receive the data that is sent to it.
        allow_refresh: whether to serve `POST /v1/refresh`, by which clients report that the model
            changed.
        api_key: what requests to /v1 must bring; None lets all in.
        allow_origins: origins whose pages may ask, '*' for all.
        page: whether to serve a page at /, to try the model in.
    """

    name: str = "gla"
    body_bytes: int = 8 << 20
    read_seconds: float = 30.0
    write_seconds: float = 60.0
    allow_refresh: bool = False
    api_key: str | None = dataclasses.field(default=None, repr=False)
    allow_origins: tuple[str, ...] = ()
    page: bool = True


class Application:
    """The HTTP routes, and the connection between them and the engine's thread, which this class
    starts. on_failure is called in the event loop if the engine fails.
    """

    def __init__(
        self, engine: Engine, options: Options, on_failure: Callable[[], None] | None = None
    ) -> None:
        self.engine, self.options = engine, options
        self._on_failure = on_failure
        self._worker = Worker(engine, self._deliver)
        self._inboxes: dict[Sequence, asyncio.Queue] = {}
        self._encoding = asyncio.Lock()
        self._bodies = 0  # bytes of requests that are not submitted yet
        self._kept = 0  # log-probabilities that all replies under way may have
        self._statuses: Counter[int] = Counter()
        self._started = int(time.time())

    def starlette(self) -> Starlette:
        """The ASGI application."""
        routes = [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
        ]
        if self.options.allow_refresh:
            routes.append(Route("/v1/refresh", self.refresh, methods=["POST"]))
        if self.options.page:
            routes.append(Route("/", self.page))
        handlers = {RefusedError: self._refuse, HTTPException: self._refuse_route}
        around = [Middleware(Log)]
        if origins := self.options.allow_origins:
            given = {"allow_methods": ["GET", "POST"], "allow_headers": ["*"]}
            around.append(Middleware(CORSMiddleware, allow_origins=origins, **given))
        if self.options.api_key is not None:
            around.append(Middleware(Key, key=self.options.api_key))
        options = {"exception_handlers": handlers, "lifespan": self._lifespan}
        return Starlette(routes=routes, middleware=around, **options)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        self._worker.start()
        try:
            yield
        finally:
            await asyncio.to_thread(self._worker.close)

    def _deliver(self, deltas: Deltas) -> None:
        self._loop.call_soon_threadsafe(self._dispatch, deltas)

    def _dispatch(self, deltas: Deltas) -> None:
        for sequence, delta in deltas:
            if (inbox := self._inboxes.get(sequence)) is not None:
                inbox.put_nowait((sequence, delta))
            if delta.finish_reason is not None:
                self._inboxes.pop(sequence, None)
        if self._worker.error is not None and self._on_failure is not None:
            self._on_failure()

    async def completions(self, request: HTTPRequest) -> Response:
        """POST /v1/completions."""
        async with self._body(request) as body:
            asked = await _called(len(body), protocol.read, body, self.options.name)
            self._check_room(len(asked.prompts) * asked.n)
            prompts = [await self._tokens(prompt) for prompt in asked.prompts]
            return self._reply(asked, prompts, TextChoice)

    async def chat(self, request: HTTPRequest) -> Response:
        """POST /v1/chat/completions."""
        async with self._body(request) as body:
            name = self.options.name
            asked, messages = await _called(len(body), protocol.read_chat, body, name)
            self._check_room(asked.n)
            tokenizer = self.engine.tokenizer
            try:
                async with self._encoding:
                    tokens = await asyncio.to_thread(chat_tokens, tokenizer, messages)
            except ValueError as error:
                raise RefusedError(400, str(error), None, "messages") from error
            options = {"max_new_tokens": self.engine.limits.new_tokens} | asked.options
            end = getattr(tokenizer, "eos_token_id", None)  # a turn's, perhaps not the model's
            options["end_tokens"] = () if end is None else (end,)
            return self._reply(dataclasses.replace(asked, options=options), [tokens], ChatChoice)

    @contextlib.asynccontextmanager
    async def _body(self, request: HTTPRequest, sequences: int = 1) -> AsyncIterator[bytearray]:
        """The body of a request for at least so many sequences. It is not kept if there is no room
        for them, or beside other bodies.
        """
        body, refused = bytearray(), None
        most = self.options.body_bytes
        try:
            if sequences > 0:
                self._check_room(sequences)
        except RefusedError as error:
            refused = error
        try:
            size = await self._receive(request, body, most if refused is None else 0)
            if refused is not None:
                raise refused
            if size > most:
                message = f"expected a body of at most {most} bytes, got {size} or more"
                raise RefusedError(413, message)
            if size > len(body):
                message = (
                    f"expected at most {MOST_BODIES * most} bytes of bodies that are being read"
                )
                raise RefusedError(429, f"{message}, got more", "rate_limit_exceeded")
            yield body
        finally:
            self._bodies -= len(body)

    def _check_room(self, count: int) -> None:
        with _refusing():
            self.engine.check_room(count)

    def _reply(self, asked: Completion, prompts: list[list[int]], form: Form) -> Reply:
        requests = asked.requests(prompts)
        kept = protocol.most_logprobs(requests, self.engine.limits)
        self._check_kept(kept)
        with _refusing():
            sequences = self._worker.submit(*requests)
        self._kept += kept
        inbox: asyncio.Queue = asyncio.Queue()
        self._inboxes |= dict.fromkeys(sequences, inbox)
        names, wanted = Names(self.engine.tokenizer), asked.options.get("logprobs") is not None
        choices = {}
        for index, sequence in enumerate(sequences):
            choices[sequence] = form(index, names, wanted)
            if asked.echo:
                if index % asked.n == 0:  # one for all choices of a prompt
                    prompt, request = asked.prompts[index // asked.n], sequence.request
                    text = prompt if isinstance(prompt, str) else None
                    given = (text, request.tokens, request.skip_special_tokens)
                    echo = Echo(self.engine.tokenizer, *given)
                choices[sequence] = form(index, names, wanted, echo)
        asked.prompts.clear()  # the requests have the tokens
        ident = f"{form.ident}-{secrets.token_hex(12)}"
        args = (ident, self.options.name, asked, choices, inbox, self.options.write_seconds)
        return Reply(*args, self._leave, self._count, functools.partial(self._release, kept))

    def _check_kept(self, kept: int) -> None:
        """Bounds the memory of replies: each is kept until its client has taken it."""
        if kept > MOST_KEPT:
            message = f"expected a reply of at most {MOST_KEPT} log-probabilities, got up to {kept}"
            raise RefusedError(400, message)
        if (room := MOST_KEPT - self._kept) < kept:
            message = f"expected at most {room} more log-probabilities beside other replies, got "
            raise RefusedError(429, f"{message}{kept}", "rate_limit_exceeded")

    def _release(self, kept: int) -> None:
        self._kept -= kept

    def _count(self, status: int) -> None:
        self._statuses[status] += 1

    def _leave(self, sequence: Sequence) -> None:
        """Ends a sequence whose client has disconnected."""
        self._inboxes.pop(sequence, None)
        self.engine.cancel(sequence)

    async def _receive(self, request: HTTPRequest, body: bytearray, most: int) -> int:
        """Receives a body, of which `body` gets what may be kept; returns its size."""
        size, most_of_all = 0, MOST_BODIES * self.options.body_bytes
        try:
            async with asyncio.timeout(self.options.read_seconds):
                async for block in request.stream():
                    size += len(block)
                    if size <= most and self._bodies + len(block) <= most_of_all:
                        body += block
                        self._bodies += len(block)
                    elif size > MOST_REFUSED:
                        break
        except TimeoutError as error:
            seconds = self.options.read_seconds
            raise RefusedError(408, f"expected a body within {seconds:g} s") from error
        except ClientDisconnect as error:
            raise RefusedError(400, "the client left before its body had come") from error
        return size

    async def _tokens(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, list):
            return prompt
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise RefusedError(400, "expected a prompt of tokens: no tokenizer is there")
        async with self._encoding:  # tokenizers are not documented to be thread-safe
            return await _called(len(prompt), tokenizer.encode, prompt)

    async def refresh(self, request: HTTPRequest) -> Response:
        """POST /v1/refresh."""
        async with self._body(request, 0) as body:
            keep_running = protocol.read_refresh(body)
        self._check_engine()
        try:
            await asyncio.to_thread(self.engine.refresh, keep_running)
        except ValueError as error:
            raise RefusedError(409, str(error)) from error
        return JSONResponse({"status": "ok"})

    async def page(self, request: HTTPRequest) -> Response:
        """GET /."""
        text = PAGE.read_text(encoding="utf-8")
        script = text.partition("<script>")[2].partition("</script>")[0]
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        policy += "connect-src 'self'; img-src data:; base-uri 'none'; frame-ancestors 'none'"
        return HTMLResponse(text, headers={"Content-Security-Policy": policy})

    async def models(self, request: HTTPRequest) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: HTTPRequest) -> Response:
        """GET /v1/models/NAME."""
        name = request.path_params["name"]
        if name != self.options.name:
            message = f"expected {self.options.name!r}, got {short(name)}"
            raise RefusedError(404, message, "model_not_found")
        return JSONResponse(self._model())

    def _model(self) -> dict:
        known = {"id": self.options.name, "created": self._started}
        return known | {"object": "model", "owned_by": "gla_ext"}

    def _check_engine(self) -> None:
        if self._worker.error is not None:
            raise RefusedError(503, f"the engine has failed: {type(self._worker.error).__name__}")

    async def health(self, request: HTTPRequest) -> Response:
        """GET /health."""
        self._check_engine()
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: HTTPRequest) -> Response:
        """GET /metrics."""
        engine, prefixes = self.engine, self.engine.prefixes
        text = engine.metrics.text(
            {
                "running": engine.running,
                "waiting": engine.waiting,
                "rows": engine.limits.rows,
                "checkpoints": len(prefixes),
                "checkpoint_bytes": prefixes.nbytes,
                "open_replies": len(self._inboxes),
                "body_bytes": self._bodies,
                "reply_logprobs": self._kept,
            }
        )
        lines = ["# TYPE gla_ext_completion_responses_total counter"]
        for status, count in sorted(self._statuses.items()):
            lines.append(f'gla_ext_completion_responses_total{{status="{status}"}} {count}')
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return PlainTextResponse(text + "\n".join(lines) + "\n", headers={"content-type": kind})

    async def _refuse(self, request: HTTPRequest, error: RefusedError) -> Response:
        self._count(error.status)
        Entry.of(request.scope).note = ascii(str(error))
        headers = {"Retry-After": "1"} if error.status in (429, 503) else None
        return error.response(headers)

    async def _refuse_route(self, request: HTTPRequest, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"[:200]
        if error.status_code == 404:
            paths = (route.path.replace("{name:path}", "NAME") for route in request.app.routes)
            message = f"expected a path among {', '.join(paths)}, got {short(request.url.path)}"
        return RefusedError(error.status_code, message).response(error.headers)


async def _called(size: int, function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function that reads a text of this size; other replies do not wait for a long one."""
    return await asyncio.to_thread(function, *args) if size >= LONG_TEXT else function(*args)


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Turns the engine's errors into replies."""
    try:
        yield
    except FullError as error:
        raise RefusedError(429, str(error), "rate_limit_exceeded") from error
    except (ChangedError, ClosedError) as error:
        raise RefusedError(503, str(error)) from error
    except ValueError as error:
        code = "context_length_exceeded" if "a prompt of at most" in str(error) else None
        raise RefusedError(400, str(error), code, protocol.field_of(str(error))) from error
