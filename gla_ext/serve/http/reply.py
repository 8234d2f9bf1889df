"""A reply as an ASGI response, whole or as server-sent events; it ends if the client leaves.

JSON is made block by block while the client takes it, so that a long one takes no memory as a whole
and stops no other reply.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gla_ext.serve.http.access import ENDED, Entry
from gla_ext.serve.http.choices import Choice, dumps, head, usage_of
from gla_ext.serve.http.fields import RefusedError
from gla_ext.serve.http.protocol import Completion
from gla_ext.serve.sequence import Sequence

BLOCK = 1 << 16  # characters of a reply that are made and sent at a time
_LAST_SECONDS = 1.0  # for a stream's last event when the server shuts down


class Reply(Response):
    """The reply to a request with some sequences.

    Args:
        ident, model, asked: id of the reply, name of the model, and the request.
        choices: its choices, by sequence.
        inbox: queue of new (sequence, delta) pairs.
        write_seconds: time limit for the client to receive the data that is sent to it.
        leave: called with each unfinished sequence if the client leaves.
        began: called with the status when the reply begins. An error before that is raised.
        ended: called when nothing is kept any more.
    """

    def __init__(
        self,
        ident: str,
        model: str,
        asked: Completion,
        choices: dict[Sequence, Choice],
        inbox: asyncio.Queue,
        write_seconds: float,
        leave: Callable[[Sequence], None],
        began: Callable[[int], None],
        ended: Callable[[], None],
    ) -> None:
        super().__init__()
        self._head, self._asked, self._began = head(ident, model), asked, began
        self._choices, self._inbox, self._ended = choices, inbox, ended
        self._write_seconds, self._leave = write_seconds, leave
        self._sending = False  # whether the client has a part of what it is to get at once
        self._form = type(next(iter(choices.values())))
        self._going = set(choices)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        entry = Entry.of(scope)
        answer = self._stream(send, entry) if self._asked.stream else self._whole(send)
        tasks = [asyncio.ensure_future(answer), asyncio.ensure_future(_left(receive))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()
            else:
                entry.note = "the client left"
        except TimeoutError:
            entry.note = f"the client took nothing for {self._write_seconds:g} s"
        except asyncio.CancelledError:  # by uvicorn, once it has waited for shutdown_seconds
            self._leave_all()
            if self._asked.stream and not self._sending and not tasks[0].done():
                tasks[0].cancel()
                await asyncio.wait(tasks[:1])
                with contextlib.suppress(TimeoutError):
                    await self._end_with(RefusedError(503, ENDED), send)
            raise
        finally:
            usage = self._usage()
            entry.ident = self._head["id"]
            entry.tokens_in, entry.tokens_out = usage["prompt_tokens"], usage["completion_tokens"]
            for task in tasks:
                task.cancel()
            self._leave_all()
            self._ended()

    def _leave_all(self) -> None:
        while self._going:
            self._leave(self._going.pop())

    async def _end_with(self, error: RefusedError, send: Send) -> None:
        """Ends a stream with an error, or raises TimeoutError if the client does not take it."""
        async with asyncio.timeout(_LAST_SECONDS):
            event = f"data: {error.body()}\n\n".encode()
            await send({"type": "http.response.body", "body": event, "more_body": False})

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function, in a thread if it may take long: prompts that are echoed are decoded
        token by token.
        """
        return await asyncio.to_thread(function, *args) if self._asked.echo else function(*args)

    async def _next(self) -> tuple[list[Choice], RefusedError | None]:
        """Adds all deltas that have arrived. Returns their choices, and the error after them or
        None.
        """
        items = [await self._inbox.get()]
        while not self._inbox.empty():
            items.append(self._inbox.get_nowait())
        found: dict[Choice, None] = {}
        for sequence, delta in items:
            if delta.finish_reason is not None:
                self._going.discard(sequence)
            if delta.finish_reason in ("error", "cancelled"):
                return [*found], RefusedError(500, delta.error or "the engine has failed")
            choice = self._choices[sequence]
            try:
                await self._call(choice.add, delta)
            except Exception as error:  # a tokenizer may know fewer tokens than a prompt has
                return [*found], RefusedError(500, f"the tokenizer failed with {error!r}")
            found[choice] = None
        return [*found], None

    async def _whole(self, send: Send) -> None:
        while self._going:
            _, failed = await self._next()
            if failed is not None:
                raise failed
        opening = self._opening(object=self._form.whole, usage=self._usage())
        blocks = _blocks(_json(opening, self._choices.values(), whole=True))
        ready = [await self._call(next, blocks, b"") for _ in range(2)]
        headers = [(b"content-type", b"application/json")]
        if not ready[1]:
            headers.append((b"content-length", b"%d" % len(ready[0])))
        self._began(200)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send(send, itertools.chain(ready, blocks))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _stream(self, send: Send, entry: Entry) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        self._began(200)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        counts = self._asked.include_usage
        kind = self._form.piece
        opening = self._opening(object=kind, **({"usage": None} if counts else {}))
        failed = None
        while self._going and failed is None:
            choices, failed = await self._next()
            events = [_json(opening, [choice], whole=False) for choice in choices]
            if failed is not None:
                entry.note = str(failed)
                events.append([failed.body()])
            elif not self._going and counts:
                events.append([self._opening(object=kind, usage=self._usage()), "]}"])
            if failed is not None or not self._going:
                events.append(["[DONE]"])
            pieces = (piece for event in events for piece in ("data: ", *event, "\n\n"))
            await self._send(send, _blocks(pieces))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _opening(self, **fields: Any) -> str:
        """The JSON of a reply or an event up to its choices."""
        return f'{dumps(self._head | fields)[:-1]},"choices":['

    async def _send(self, send: Send, blocks: Iterator[bytes]) -> None:
        """Makes and sends blocks; raises TimeoutError if the client does not take one in time."""
        self._sending = True
        while block := await self._call(next, blocks, b""):
            async with asyncio.timeout(self._write_seconds):
                await send({"type": "http.response.body", "body": block, "more_body": True})
        self._sending = False

    def _usage(self) -> dict[str, Any]:
        # A prompt counts once, however many choices it has.
        sequences = [*self._choices]
        prompts = sequences[:: self._asked.n]
        return usage_of(
            sum(len(sequence.request.tokens) for sequence in prompts),
            sum(sequence.cached for sequence in prompts),
            sum(sequence.new for sequence in sequences),
        )


async def _left(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _json(opening: str, choices: Iterable[Choice], whole: bool) -> Iterator[str]:
    """Pieces of the JSON of a reply or an event."""
    for choice in choices:
        yield opening
        yield from choice.take(whole)
        opening = ","
    yield "]}"


def _blocks(pieces: Iterable[str]) -> Iterator[bytes]:
    """The pieces in blocks of at least `BLOCK` characters, but for the last."""
    held, size = [], 0
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= BLOCK:
            yield "".join(held).encode()
            held, size = [], 0
    if held:
        yield "".join(held).encode()
