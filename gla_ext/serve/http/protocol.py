"""OpenAI's completion interface: parsed requests and rendered replies."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

from gla_ext.decode.sampling import is_int
from gla_ext.serve.request import Delta, Request
from gla_ext.serve.text import Tokenizer

MOST_PROMPTS = 256  # limit of prompts times n in a request
LEAST = -9999.0  # OpenAI's value for a log-probability of -inf, which JSON lacks


class RefusedError(ValueError):
    """A request that is answered with an error and an HTTP status. code is OpenAI's name of the
    error, param the field that is wrong; both may be None.
    """

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


@dataclasses.dataclass(frozen=True)
class Completion:
    """A parsed request for completions: choice i belongs to prompt `i // n`."""

    prompts: list[str | list[int]]
    n: int
    stream: bool
    include_usage: bool
    options: dict[str, Any]

    def requests(self, prompts: Sequence[Sequence[int]]) -> list[Request]:
        """The requests for the engine, from the prompts' tokens; raises RefusedError for options
        out of range.
        """
        found = []
        for tokens in prompts:
            for number in range(self.n):
                options, seed = dict(self.options), self.options.get("seed")
                if seed is not None:
                    options["seed"] = (seed + number) % 2**63 if number else seed
                try:
                    found.append(Request(tokens, **options))
                except (TypeError, ValueError) as error:
                    raise RefusedError(400, str(error)) from error
        return found


def _is_number(value: Any) -> bool:
    # Rejects integers too large for a float, and NaN and inf, which the json module accepts.
    return abs(value) < 2**63 if is_int(value) else isinstance(value, float) and isfinite(value)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_stop(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list) and all(isinstance(x, str) for x in value)
    )


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_bias(value: Any) -> bool:
    names = isinstance(value, dict) and all(re.fullmatch(r"\d{1,18}", name) for name in value)
    return names and all(map(_is_number, value.values()))


def _is_nothing(value: Any) -> bool:
    """Whether an option that is not implemented has a value without effect: 0, empty or false."""
    return value in (0, "", False) or value == {}


_OPTIONS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model": (lambda x: isinstance(x, str), "a string"),
    "prompt": (lambda x: isinstance(x, (str, list)), "a string, tokens, or a list of these"),
    "max_tokens": (is_int, "an int"),
    "temperature": (_is_number, "a number"),
    "top_p": (_is_number, "a number"),
    "top_k": (is_int, "an int"),
    "n": (is_int, "an int"),
    "best_of": (is_int, "an int"),
    "stream": (_is_bool, "true or false"),
    "stream_options": (_is_object, "an object"),
    "logprobs": (is_int, "an int"),
    "stop": (_is_stop, "a string or a list of strings"),
    "seed": (is_int, "an int"),
    "ignore_eos": (_is_bool, "true or false"),
    "skip_special_tokens": (_is_bool, "true or false"),
    "user": (lambda x: isinstance(x, str), "a string"),
    "metadata": (_is_object, "an object"),
    "min_p": (_is_number, "a number"),
    "repetition_penalty": (_is_number, "a number"),
    "presence_penalty": (_is_number, "a number"),
    "frequency_penalty": (_is_number, "a number"),
    "logit_bias": (_is_bias, "an object of numbers, whose names are tokens"),
    "max_completion_tokens": (is_int, "an int"),
    "echo": (_is_nothing, "false, as it is not implemented"),
    "suffix": (_is_nothing, "null, as it is not implemented"),
}
_OURS = ("temperature", "top_p", "top_k", "logprobs", "seed", "ignore_eos", "skip_special_tokens")
_OURS += ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def read(body: bytes, model: str) -> Completion:
    """Parses the JSON body of a request; raises RefusedError if it is invalid or asks for another
    model than `model`.
    """
    given = _read_object(body, _OPTIONS)
    if given.get("model", model) != model:
        message = f"expected model to be {model!r}, got {short(given['model'])}"
        raise RefusedError(404, message, "model_not_found", "model")
    n = given.get("n", 1)
    if n < 1 or given.get("best_of", n) != n:
        raise RefusedError(400, f"expected n = best_of of at least 1, got n = {n}", None, "n")
    prompts = _read_prompts(given.get("prompt"))
    if len(prompts) * n > MOST_PROMPTS:
        message = f"expected at most {MOST_PROMPTS} choices, got {len(prompts)} prompts of {n}"
        raise RefusedError(400, message)
    streaming = given.get("stream_options", {})
    usage = streaming.get("include_usage", False)
    if set(streaming) - {"include_usage"} or not _is_bool(usage):
        message = f"expected stream_options to be include_usage alone, got {short(streaming)}"
        raise RefusedError(400, message)
    options = {name: value for name, value in given.items() if name in _OURS}
    counts = {given[name] for name in ("max_tokens", "max_completion_tokens") if name in given}
    if len(counts) > 1:
        message = "expected max_tokens and max_completion_tokens to be the same, got two numbers"
        raise RefusedError(400, message, None, "max_tokens")
    if counts:
        options["max_new_tokens"] = counts.pop()
    bias = given.get("logit_bias", {})
    options["logit_bias"] = {int(token): value for token, value in bias.items()}
    stop = given.get("stop", [])
    options["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    return Completion(prompts, n, given.get("stream", False), usage, options)


def _read_object(
    body: bytes, options: dict[str, tuple[Callable[[Any], bool], str]]
) -> dict[str, Any]:
    """The values of a JSON object that are not null, each checked for its option."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"expected JSON, got {type(error).__name__}: {error}") from error
    if not isinstance(given, dict):
        raise RefusedError(400, f"expected a JSON object, got {type(given).__name__}")
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if name not in options:
            raise RefusedError(
                400, f"expected names among {', '.join(options)}, got {name[:100]}", None, name
            )
        is_right, word = options[name]
        if not is_right(value):
            raise RefusedError(400, f"expected {name} to be {word}, got {short(value)}", None, name)
    return given


def read_refresh(body: bytes) -> bool:
    """Whether sequences continue after `POST /v1/refresh`, whose body may be empty."""
    options = {"keep_running": (_is_bool, "true or false")}
    return _read_object(body or b"{}", options).get("keep_running", False)


def _read_prompts(given: Any) -> list[str | list[int]]:
    if isinstance(given, str) or (isinstance(given, list) and given and is_int(given[0])):
        prompts = [given]
    else:
        prompts = given
    if not prompts or not all(isinstance(prompt, str) or _is_tokens(prompt) for prompt in prompts):
        wanted = "a string, tokens, or a list of these, none of no tokens"
        message = f"expected prompt to be {wanted}, got {short(given)}"
        raise RefusedError(400, message, None, "prompt")
    for prompt in prompts:
        # JSON strings may hold surrogates that are not text.
        if isinstance(prompt, str) and any("\ud800" <= x <= "\udfff" for x in prompt):
            message = "expected prompt to be Unicode text, got lone surrogates"
            raise RefusedError(400, message, None, "prompt")
    return prompts


def _is_tokens(value: Any) -> bool:
    known = isinstance(value, list) and len(value) > 0
    return known and all(type(x) is int and 0 <= x < 2**62 for x in value)


def short(value: Any) -> str:
    """A value in a short form, for an error message."""
    text = ascii(value) if len(str(value)) < 10_000 else f"a long {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:97]}..."


class Choice:
    """One choice of a reply that is being generated."""

    def __init__(self, index: int, tokenizer: Tokenizer | None, logprobs: bool) -> None:
        self._index, self._tokenizer, self._logprobs = index, tokenizer, logprobs

    def render(self, delta: Delta) -> dict[str, Any]:
        """A delta in the form of OpenAI's choice."""
        logprobs = None
        if self._logprobs:
            logprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
            for x in delta.logprobs:
                best = {}  # keeps the first of equal names: the token drawn, else the most probable
                for token, value in ((x.token, x.logprob), *x.best.items()):
                    best.setdefault(self._name(token), max(value, LEAST))
                logprobs["tokens"].append(self._name(x.token))
                logprobs["token_logprobs"].append(max(x.logprob, LEAST))
                logprobs["top_logprobs"].append(best)
                logprobs["text_offset"].append(x.offset)
        return {
            "index": self._index,
            "text": delta.text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
        }

    def _name(self, token: int) -> str:
        if self._tokenizer is None:
            return f"token_id:{token}"
        text = self._tokenizer.decode([token])
        # Tokens that are parts of characters are distinguished by their ids.
        return f"token_id:{token}" if "\ufffd" in text else text


def merged(choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Combines the rendered deltas of one choice."""
    whole = dict(choices[-1], text="".join(choice["text"] for choice in choices))
    if whole["logprobs"] is not None:
        whole["logprobs"] = {
            name: [x for choice in choices for x in choice["logprobs"][name]]
            for name in whole["logprobs"]
        }
    return whole


def head(ident: str, model: str) -> dict[str, Any]:
    """The fields that all events of a reply have in common."""
    created = int(time.time())
    return {"id": ident, "object": "text_completion", "created": created, "model": model}


def usage_of(prompt_tokens: int, cached: int, new: int) -> dict[str, Any]:
    """OpenAI's usage."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new,
        "total_tokens": prompt_tokens + new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
