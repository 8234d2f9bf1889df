"""A reply as an ASGI response, whole or as server-sent events; it ends if the client leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from gla_ext.serve.http.access import Entry
from gla_ext.serve.http.choices import ChatChoice, TextChoice, head, usage_of
from gla_ext.serve.http.fields import RefusedError
from gla_ext.serve.http.protocol import Completion
from gla_ext.serve.sequence import Sequence


class Reply(Response):
    """The reply to a request with some sequences.

    Args:
        ident, model, asked: id of the reply, name of the model, and the request.
        choices: its choices, by sequence.
        inbox: queue of new (sequence, delta) pairs.
        write_seconds: time limit for the client to receive the data that is sent to it.
        leave: called with each unfinished sequence if the client leaves.
        began: called with the status when the reply begins. An error before that is raised.
    """

    def __init__(
        self,
        ident: str,
        model: str,
        asked: Completion,
        choices: dict[Sequence, TextChoice] | dict[Sequence, ChatChoice],
        inbox: asyncio.Queue,
        write_seconds: float,
        leave: Callable[[Sequence], None],
        began: Callable[[int], None],
    ) -> None:
        super().__init__()
        self._head, self._asked, self._began = head(ident, model), asked, began
        self._choices, self._inbox = choices, inbox
        self._write_seconds, self._leave = write_seconds, leave
        self._form = type(next(iter(choices.values())))
        self._going = set(choices)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        entry = Entry.of(scope)
        answer = (
            self._stream(send, entry) if self._asked.stream else self._whole(scope, receive, send)
        )
        tasks = [asyncio.ensure_future(answer), asyncio.ensure_future(_left(receive))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()
            else:
                entry.note = "the client left"
        except TimeoutError:
            entry.note = f"the client took nothing for {self._write_seconds:g} s"
        finally:
            usage = self._usage()
            entry.ident = self._head["id"]
            entry.tokens_in, entry.tokens_out = usage["prompt_tokens"], usage["completion_tokens"]
            for task in tasks:
                task.cancel()
            for sequence in self._going:
                self._leave(sequence)

    async def _next(self) -> tuple[list[dict[str, Any]], RefusedError | None]:
        """All deltas that have arrived, as choices, and the error after them or None."""
        items = [await self._inbox.get()]
        while not self._inbox.empty():
            items.append(self._inbox.get_nowait())
        found = []
        for sequence, delta in items:
            if delta.finish_reason is not None:
                self._going.discard(sequence)
            if delta.finish_reason in ("error", "cancelled"):
                return found, RefusedError(500, delta.error or "the engine has failed")
            render = self._choices[sequence].render
            # A prompt may be long, and its tokens are decoded one by one.
            echoes = self._asked.echo
            found.append(await asyncio.to_thread(render, delta) if echoes else render(delta))
        return found, None

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        came: dict[int, list[dict[str, Any]]] = {n: [] for n in range(len(self._choices))}
        while self._going:
            found, failed = await self._next()
            if failed is not None:
                raise failed
            for choice in found:
                came[choice["index"]].append(choice)
        choices = [self._form.merged(found) for found in came.values()]
        whole = {"object": self._form.whole, "choices": choices, "usage": self._usage()}
        response = JSONResponse(self._head | whole)
        self._began(200)
        await response(scope, receive, send)

    async def _stream(self, send: Send, entry: Entry) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        self._began(200)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        counts = self._asked.include_usage
        head = self._head | {"object": self._form.piece} | ({"usage": None} if counts else {})
        failed = None
        while self._going and failed is None:
            choices, failed = await self._next()
            events = [head | {"choices": [choice]} for choice in choices]
            if failed is not None:
                entry.note = str(failed)
                events.append(failed.body())
            elif not self._going and counts:
                events.append(head | {"choices": [], "usage": self._usage()})
            await self._send(send, *map(json.dumps, events))
        await self._send(send, "[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, *events: str) -> None:
        """Sends events; raises TimeoutError if the client does not receive them in time."""
        body = "".join(f"data: {event}\n\n" for event in events).encode()
        async with asyncio.timeout(self._write_seconds):
            await send({"type": "http.response.body", "body": body, "more_body": True})

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
