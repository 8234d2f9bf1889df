"""Who may ask, and a line in the log for each request."""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import logging
import time
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gla_ext.serve.http.fields import RefusedError

logger = logging.getLogger("gla_ext.serve")

LEFT = 499  # nginx's status of a request whose client left before the reply
ENDED = "the server shut down before the reply was whole"


@dataclasses.dataclass
class Entry:
    """What the log says of a request, in its scope: the id and tokens of its reply, and a note."""

    ident: str = "-"
    tokens_in: int = 0
    tokens_out: int = 0
    note: str = ""

    @staticmethod
    def of(scope: Scope) -> Entry:
        return scope.setdefault("gla_ext.entry", Entry())


class Log:
    """Logs a line for each request, at level debug for those outside of /v1."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        entry, start, status = Entry.of(scope), time.monotonic(), LEFT

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except asyncio.CancelledError:  # by uvicorn, once it has waited for shutdown_seconds
            entry.note = ENDED
            if status == LEFT:
                await RefusedError(503, ENDED).response()(scope, receive, noting)
        except Exception:
            status = 500
            raise
        finally:
            level = logging.INFO if scope["path"].startswith("/v1/") else logging.DEBUG
            logger.log(
                level,
                "%s %s %s %d, %d tokens in, %d out, %.3f s%s",
                entry.ident,
                scope["method"],
                quote(scope["path"])[:200],
                status,
                entry.tokens_in,
                entry.tokens_out,
                time.monotonic() - start,
                entry.note and f": {entry.note}",
            )


class Key:
    """Refuses requests to /v1 that do not bring the key."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._key = app, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1/"):
            scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
            is_right = hmac.compare_digest(given.strip().encode("latin-1"), self._key)
            if scheme.lower() != "bearer" or not is_right:
                message = "expected the server's key, as 'Authorization: Bearer KEY'"
                refused = RefusedError(401, message, "invalid_api_key")
                Entry.of(scope).note = message
                headers = {"WWW-Authenticate": "Bearer"}
                await refused.response(headers)(scope, receive, send)
                return
        await self._app(scope, receive, send)
