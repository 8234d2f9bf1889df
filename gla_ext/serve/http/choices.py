"""OpenAI's completion interface: the choices of a reply."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from gla_ext.serve.request import Delta, TokenLogprob
from gla_ext.serve.text import Detokenizer, Tokenizer

LEAST = -9999.0  # OpenAI's value for a log-probability of -inf, which JSON lacks
_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class Names:
    """The names of tokens in a reply."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __getitem__(self, token: int) -> str:
        if token not in self._known:
            text = "\ufffd" if self.tokenizer is None else self.tokenizer.decode([token])
            # Tokens that are parts of characters are distinguished by their ids.
            self._known[token] = f"token_id:{token}" if "\ufffd" in text else text
        return self._known[token]


class Echo:
    """A prompt that choices begin with: its text, if it was given as text, and its tokens."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt: str | list[int],
        tokens: Sequence[int],
        skip_special: bool,
    ) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._prompt, self.tokens = prompt, tokens

    @cached_property
    def shown(self) -> tuple[str, list[int]]:
        """Its text, and the offset of each token in it."""
        pieces = [""] * len(self.tokens)
        if self._tokenizer is not None:
            push = Detokenizer(self._tokenizer, [], self._skip_special).push
            pieces = [push(token) for token in self.tokens]
        text = "".join(pieces)
        offsets = [0]
        for piece in pieces[:-1]:
            offsets.append(offsets[-1] + len(piece))
        if isinstance(self._prompt, list):
            return text, offsets
        # The tokenizer may have put something before a text that was given.
        before = len(text) - len(self._prompt)
        return self._prompt, [max(offset - before, 0) for offset in offsets]


class TextChoice:
    """One choice of a reply of /v1/completions that is being generated.

    Attributes:
        ident, whole, piece: OpenAI's beginning of the id of a reply, and its names of a whole reply
            and of a stream's event.
    """

    ident, whole, piece = "cmpl", "text_completion", "text_completion"

    def __init__(self, index: int, names: Names, logprobs: bool, echo: Echo | None = None) -> None:
        self._index, self._names, self._logprobs = index, names, logprobs
        self._echo, self._start = echo, 0

    def render(self, delta: Delta) -> dict[str, Any]:
        """A delta in the form of OpenAI's choice."""
        text = delta.text
        logprobs = {name: [] for name in _LISTS} if self._logprobs else None
        if self._echo is not None:
            prompt, offsets = self._echo.shown
            text, self._start = prompt + text, len(prompt)
            if logprobs is not None:
                self._add_prompt(logprobs, self._echo.tokens[0], delta.prompt_logprobs, offsets)
            self._echo = None
        if logprobs is not None:
            for x in delta.logprobs:
                self._add(logprobs, x, self._start + x.offset)
        return {
            "index": self._index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
        }

    def _add_prompt(
        self, logprobs: dict, first: int, rest: Sequence[TokenLogprob], offsets: Sequence[int]
    ) -> None:
        for name, value in zip(_LISTS, (self._names[first], None, None, 0), strict=True):
            logprobs[name].append(value)
        # There is no rest if a refresh ended the sequence while its prompt was read.
        for x, offset in zip(rest, offsets[1:], strict=bool(rest)):
            self._add(logprobs, x, offset)

    def _add(self, logprobs: dict, x: TokenLogprob, offset: int) -> None:
        best = {}  # keeps the first of equal names: the token itself, else the most probable
        for token, value in ((x.token, x.logprob), *x.best.items()):
            best.setdefault(self._names[token], max(value, LEAST))
        logprobs["tokens"].append(self._names[x.token])
        logprobs["token_logprobs"].append(max(x.logprob, LEAST))
        logprobs["top_logprobs"].append(best)
        logprobs["text_offset"].append(offset)

    @staticmethod
    def merged(choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Combines the rendered deltas of one choice."""
        whole = dict(choices[-1], text="".join(choice["text"] for choice in choices))
        if whole["logprobs"] is not None:
            whole["logprobs"] = {
                name: [x for choice in choices for x in choice["logprobs"][name]] for name in _LISTS
            }
        return whole


class ChatChoice:
    """Like `TextChoice`, of /v1/chat/completions."""

    ident, whole, piece = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, index: int, names: Names, logprobs: bool) -> None:
        self._index, self._names, self._logprobs = index, names, logprobs
        self._role = {"role": "assistant"}  # of the first event

    def render(self, delta: Delta) -> dict[str, Any]:
        message, self._role = self._role | {"content": delta.text}, {}
        logprobs = None
        if self._logprobs:
            logprobs = {"content": [self._named(x) for x in delta.logprobs], "refusal": None}
        return {
            "index": self._index,
            "delta": message,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
        }

    def _named(self, x: TokenLogprob) -> dict[str, Any]:
        best = [self._one(token, value) for token, value in x.best.items()]
        return self._one(x.token, x.logprob) | {"top_logprobs": best}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        name = self._names[token]
        whole = not name.startswith("token_id:")  # not a part of a character
        bytes_of = [*name.encode()] if whole else None
        return {"token": name, "logprob": max(logprob, LEAST), "bytes": bytes_of}

    @staticmethod
    def merged(choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        whole = dict(choices[-1])
        del whole["delta"]
        text = "".join(choice["delta"]["content"] for choice in choices)
        whole["message"] = {"role": "assistant", "content": text, "refusal": None}
        if whole["logprobs"] is not None:
            content = [x for choice in choices for x in choice["logprobs"]["content"]]
            whole["logprobs"] = {"content": content, "refusal": None}
        return whole


def head(ident: str, model: str) -> dict[str, Any]:
    """The fields that all events of a reply have in common."""
    return {"id": ident, "created": int(time.time()), "model": model}


def usage_of(prompt_tokens: int, cached: int, new: int) -> dict[str, Any]:
    """OpenAI's usage."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new,
        "total_tokens": prompt_tokens + new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
