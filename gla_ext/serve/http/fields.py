"""The fields of a request's JSON, each checked by itself."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

from starlette.responses import Response

from gla_ext.decode.sampling import is_int


class RefusedError(ValueError):
    """A request that is answered with an error and an HTTP status. code is OpenAI's name of the
    error, param the field that is wrong; both may be None.
    """

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self) -> str:
        """JSON, in ASCII: what is refused may not be text."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error})

    def response(self, headers: Mapping[str, str] | None = None) -> Response:
        return Response(self.body(), self.status, headers, "application/json")


Check = tuple[Callable[[Any], bool], str]  # whether a value is right, and what is expected


def _is_number(value: Any) -> bool:
    # Rejects integers too large for a float, and NaN and inf, which the json module accepts.
    return abs(value) < 2**63 if is_int(value) else isinstance(value, float) and isfinite(value)


def _is(*types: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, types)


def _is_stop(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list) and all(isinstance(x, str) for x in value)
    )


def _is_bias(value: Any) -> bool:
    names = isinstance(value, dict) and all(re.fullmatch(r"[0-9]{1,18}", name) for name in value)
    return names and all(map(_is_number, value.values()))


def _nothing(*values: Any) -> Check:
    """The check of an option that is not implemented: only values without effect are right."""
    return lambda value: value in values, f"{values[0]!r} or null, as it is not implemented"


NUMBER = (_is_number, "a number")
INT = (is_int, "an int")
BOOL = (_is(bool), "true or false")
STRING = (_is(str), "a string")
OBJECT = (_is(dict), "an object")
BOTH: dict[str, Check] = {
    "model": STRING,
    "max_tokens": INT,
    "max_completion_tokens": INT,
    "temperature": NUMBER,
    "top_p": NUMBER,
    "top_k": INT,
    "min_p": NUMBER,
    "presence_penalty": NUMBER,
    "frequency_penalty": NUMBER,
    "repetition_penalty": NUMBER,
    "logit_bias": (_is_bias, "an object of numbers, whose names are tokens"),
    "n": INT,
    "stream": BOOL,
    "stream_options": OBJECT,
    "stop": (_is_stop, "a string or a list of strings"),
    "seed": INT,
    "ignore_eos": BOOL,
    "skip_special_tokens": BOOL,
    "user": STRING,
    "metadata": OBJECT,
}
COMPLETION = BOTH | {
    "prompt": (_is(str, list), "a string, tokens, or a list of these"),
    "best_of": INT,
    "echo": BOOL,
    "logprobs": INT,
    "suffix": _nothing("", 0),
}
CHAT = BOTH | {
    "messages": (_is(list), "a list of messages"),
    "logprobs": BOOL,
    "top_logprobs": INT,
    "tools": _nothing([]),
    "tool_choice": _nothing("none", "auto"),
    "functions": _nothing([]),
    "response_format": _nothing({"type": "text"}, {}),
    "store": _nothing(False),
}


def read_object(body: bytes, checks: dict[str, Check]) -> dict[str, Any]:
    """The values of a JSON object that are not null, each of which passes its check."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"expected JSON, got {type(error).__name__}: {error}") from error
    if not isinstance(given, dict):
        raise RefusedError(400, f"expected a JSON object, got {type(given).__name__}")
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if name not in checks:
            raise RefusedError(
                400, f"expected names among {', '.join(checks)}, got {name[:100]}", None, name
            )
        is_right, word = checks[name]
        if not is_right(value):
            raise RefusedError(400, f"expected {name} to be {word}, got {short(value)}", None, name)
    return given


def short(value: Any) -> str:
    """A value in a short form, for an error message."""
    text = ascii(value) if len(str(value)) < 10_000 else f"a long {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:97]}..."
