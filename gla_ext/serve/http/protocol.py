"""OpenAI's completion interface: parsed requests."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence
from typing import Any

from gla_ext.decode.sampling import is_int
from gla_ext.serve.http.fields import BOOL, CHAT, COMPLETION, RefusedError, read_object, short
from gla_ext.serve.request import MOST_LOGPROBS, Limits, Request

ROLES = ("system", "user", "assistant")  # whose messages every chat template knows
MOST_PROMPTS = 256  # limit of prompts times n in a request
_OURS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty")
_OURS += ("frequency_penalty", "logprobs", "seed", "ignore_eos", "skip_special_tokens")


@dataclasses.dataclass(frozen=True)
class Completion:
    """A parsed request for completions: choice i belongs to prompt `i // n`."""

    prompts: list[str | list[int]]
    n: int
    stream: bool
    include_usage: bool
    options: dict[str, Any]
    echo: bool = False

    def requests(self, prompts: Sequence[Sequence[int]]) -> list[Request]:
        """The requests for the engine, from the prompts' tokens; raises RefusedError for options
        out of range.
        """
        found = []
        for tokens in prompts:
            shared = array("q", tokens)
            for number in range(self.n):
                options, seed = dict(self.options), self.options.get("seed")
                if seed is not None:
                    options["seed"] = (seed + number) % 2**63 if number else seed
                try:
                    found.append(Request(shared, **options))
                except (TypeError, ValueError) as error:
                    message = str(error).partition(": ")[2]  # without the name of our class
                    raise RefusedError(400, message, None, field_of(message)) from error
        return found


def field_of(message: str) -> str | None:
    """The option that an error of a `Request` or its limits is about, if fields have its name."""
    words = message.partition(",")[0].split()
    return next((name for name in (*_OURS, "logit_bias", "stop") if name in words), None)


def most_logprobs(requests: Sequence[Request], limits: Limits) -> int:
    """The most log-probabilities that the reply may have within the limits."""
    found = 0
    for x in requests:
        if x.logprobs is not None:
            found += min(x.max_new_tokens, limits.new_tokens) * (1 + x.logprobs)
        if x.prompt_logprobs is not None:
            found += min(len(x.tokens), limits.prompt_tokens) * (1 + x.prompt_logprobs)
    return found


def read(body: bytes, model: str) -> Completion:
    """Parses the JSON body of a request; raises RefusedError if it is invalid or asks for another
    model than `model`.
    """
    given = read_object(body, COMPLETION)
    check_model(given, model)
    n = given.get("n", 1)
    if given.get("best_of", n) != n:
        raise RefusedError(
            400, f"expected best_of to be n = {n}, got {given['best_of']}", None, "best_of"
        )
    prompts, options = _read_prompts(given.get("prompt")), read_options(given)
    if len(prompts) * n > MOST_PROMPTS:
        message = f"expected at most {MOST_PROMPTS} choices, got {len(prompts)} prompts of {n}"
        raise RefusedError(400, message, None, "n" if n > 1 else "prompt")
    echo = given.get("echo", False)
    if echo:
        options["prompt_logprobs"] = options.get("logprobs")
    return Completion(prompts, n, *read_stream(given), options, echo)


Message = dict[str, str]


def read_chat(body: bytes, model: str) -> tuple[Completion, list[Message]]:
    """Like `read`, of a conversation: the request, still without a prompt, and the messages."""
    given = read_object(body, CHAT)
    check_model(given, model)
    options = read_options(given)
    wanted = options.pop("logprobs", False)
    most = given.get("top_logprobs", 0)
    if most and not wanted:
        message = f"expected logprobs to be true with top_logprobs = {most}"
        raise RefusedError(400, message, None, "top_logprobs")
    if not 0 <= most <= MOST_LOGPROBS:
        message = f"expected top_logprobs from 0 to {MOST_LOGPROBS}, got {most}"
        raise RefusedError(400, message, None, "top_logprobs")
    if wanted:
        options["logprobs"] = most
    n = given.get("n", 1)
    if n > MOST_PROMPTS:
        raise RefusedError(400, f"expected at most {MOST_PROMPTS} choices, got {n}", None, "n")
    messages = [_read_message(message) for message in given.get("messages", [])]
    if not messages:
        raise RefusedError(400, "expected at least one message, got none", None, "messages")
    return Completion([], n, *read_stream(given), options), messages


def _read_message(given: Any) -> Message:
    def refuse(wanted: str, got: Any) -> RefusedError:
        return RefusedError(400, f"expected {wanted}, got {short(got)}", None, "messages")

    if not isinstance(given, dict):
        raise refuse("a message to be an object", given)
    # Clients send a reply back as a message, with all its fields.
    given = {name: value for name, value in given.items() if value not in (None, [])}
    if odd := [name for name in given if name not in ("role", "content", "name")]:
        raise refuse("a message of role, content and name", odd[0])
    if given.get("role") not in ROLES:
        raise refuse(f"a message's role among {', '.join(ROLES)}", given.get("role"))
    content = given.get("content")
    if isinstance(content, list):
        for part in content:
            if not (isinstance(part, dict) and isinstance(part.get("text"), str)):
                kind = part.get("type") if isinstance(part, dict) else part
                raise refuse("parts of a message to be text, which is all the model reads", kind)
        content = "\n".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise refuse("a message's content to be a string or a list of parts", content)
    check_text(content, "messages")
    return {**given, "content": content}


def check_model(given: dict[str, Any], model: str) -> None:
    if given.get("model", model) != model:
        message = f"expected model to be {model!r}, got {short(given['model'])}"
        raise RefusedError(404, message, "model_not_found", "model")


def read_stream(given: dict[str, Any]) -> tuple[bool, bool]:
    """Whether the reply is a stream, and whether this ends with the usage."""
    options = given.get("stream_options", {})
    streaming = {name: value for name, value in options.items() if value is not None}
    usage = streaming.pop("include_usage", False)
    if streaming or not BOOL[0](usage):
        message = f"expected stream_options to be include_usage alone, got {short(options)}"
        raise RefusedError(400, message, None, "stream_options")
    return given.get("stream", False), usage


def read_options(given: dict[str, Any]) -> dict[str, Any]:
    """The options of an engine's request."""
    if given.get("n", 1) < 1:
        raise RefusedError(400, f"expected n of at least 1, got {given['n']}", None, "n")
    options = {name: value for name, value in given.items() if name in _OURS}
    if options.get("top_k") in (0, -1):  # all tokens, for vLLM
        del options["top_k"]
    counts = {given[name] for name in ("max_tokens", "max_completion_tokens") if name in given}
    if len(counts) > 1:
        message = "expected max_tokens and max_completion_tokens to be the same, got two numbers"
        raise RefusedError(400, message, None, "max_tokens")
    if counts:
        options["max_new_tokens"] = counts.pop()
        if options["max_new_tokens"] < 0:
            name = "max_tokens" if "max_tokens" in given else "max_completion_tokens"
            message = f"expected {name} of at least 0, got {options['max_new_tokens']}"
            raise RefusedError(400, message, None, name)
    bias = given.get("logit_bias", {})
    options["logit_bias"] = {int(token): value for token, value in bias.items()}
    stop = given.get("stop") or []
    options["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    return options


def read_refresh(body: bytes) -> bool:
    """Whether sequences continue after `POST /v1/refresh`, whose body may be empty."""
    return read_object(body or b"{}", {"keep_running": BOOL}).get("keep_running", False)


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
        if isinstance(prompt, str):
            check_text(prompt, "prompt")
    return prompts


def check_text(text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"expected {name} to be Unicode text, got lone surrogates"
        raise RefusedError(400, message, None, name) from error


def _is_tokens(value: Any) -> bool:
    known = isinstance(value, list) and len(value) > 0
    return known and all(type(x) is int and 0 <= x < 2**62 for x in value)
