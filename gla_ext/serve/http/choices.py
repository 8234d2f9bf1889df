"""OpenAI's completion interface: the choices of a reply."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from gla_ext.serve.request import Delta, TokenLogprob
from gla_ext.serve.text import Detokenizer, Tokenizer

LEAST = -9999.0  # OpenAI's value for a log-probability of -inf, which JSON lacks
LONG = 4096  # tokens of a prompt whose log-probabilities are not all objects at once
_LISTS = {  # each entry as JSON
    "tokens": lambda names, x, offset: names.quoted(x.token),
    "token_logprobs": lambda names, x, offset: repr(max(x.logprob, LEAST)),
    "top_logprobs": lambda names, x, offset: names.best(x),
    "text_offset": lambda names, x, offset: str(offset),
}
dumps = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


class Names:
    """The names of tokens in a reply."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._known: dict[int, str] = {}
        self._quoted: dict[int, str] = {}

    def __getitem__(self, token: int) -> str:
        if token not in self._known:
            try:
                text = "\ufffd" if self.tokenizer is None else self.tokenizer.decode([token])
            except Exception:  # it may know fewer tokens than the model
                text = "\ufffd"
            # Tokens that are parts of characters are distinguished by their ids.
            self._known[token] = f"token_id:{token}" if "\ufffd" in text else text
        return self._known[token]

    def quoted(self, token: int) -> str:
        """The name as JSON."""
        known = self._quoted.get(token)
        if known is None:
            known = self._quoted[token] = dumps(self[token])
        return known

    def best(self, x: TokenLogprob) -> str:
        """OpenAI's top_logprobs, as JSON: the token and the most probable ones."""
        best = {self.quoted(x.token): x.logprob}
        for token, value in x.best.items():
            name = self.quoted(token)
            if name not in best:  # of equal names the most probable one is kept
                best[name] = value
        entries = [f"{name}:{x if x > LEAST else LEAST}" for name, x in best.items()]
        return "{" + ",".join(entries) + "}"


class Echo:
    """A prompt that choices begin with: its text, if it was given as text, and its tokens."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        given: str | None,
        tokens: Sequence[int],
        skip_special: bool,
    ) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._given, self.tokens = given, tokens

    @cached_property
    def shown(self) -> tuple[str, list[int]]:
        """Its text, and the offset of each token in it."""
        pieces = [""] * len(self.tokens)
        if self._tokenizer is not None:
            # A text that was given has the special tokens that it spells out.
            skip_special = self._skip_special and self._given is None
            push = Detokenizer(self._tokenizer, [], skip_special).push
            pieces = [push(token) for token in self.tokens]
        text = "".join(pieces)
        offsets = [0]
        for piece in pieces[:-1]:
            offsets.append(offsets[-1] + len(piece))
        if self._given is None:
            return text, offsets
        # The tokenizer may have put something before a text that was given.
        before = len(text) - len(self._given)
        return self._given, [max(offset - before, 0) for offset in offsets]


class Choice:
    """One choice of a reply that is being generated: deltas are added, and JSON is taken.

    Attributes:
        ident, whole, piece: OpenAI's beginning of the id of a reply, and its names of a whole reply
            and of a stream's event.
    """

    ident: str
    whole: str
    piece: str

    def __init__(self, index: int, names: Names, logprobs: bool) -> None:
        self._index, self._names, self._logprobs = index, names, logprobs
        self._texts: list[str] = []
        self._reason: str | None = None

    def add(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self._reason = delta.finish_reason

    def take(self, whole: bool) -> Iterator[str]:
        """Pieces of the JSON of what was added since the last call, for a whole reply or an event.
        Nothing may be added before the last piece is taken.
        """
        said = dumps(self._said("".join(self._texts), whole))
        self._texts.clear()
        yield f'{{"index":{self._index},{said[1:-1]},"logprobs":'
        yield from self._shown() if self._logprobs else ["null"]
        yield f',"finish_reason":{dumps(self._reason)}}}'

    def _said(self, text: str, whole: bool) -> dict[str, Any]:
        """OpenAI's field of a text."""
        raise NotImplementedError

    def _shown(self) -> Iterator[str]:
        """Pieces of the JSON of log-probabilities."""
        raise NotImplementedError


class TextChoice(Choice):
    """A choice of /v1/completions."""

    ident, whole, piece = "cmpl", "text_completion", "text_completion"

    def __init__(self, index: int, names: Names, logprobs: bool, echo: Echo | None = None) -> None:
        super().__init__(index, names, logprobs)
        self._echo, self._start = echo, 0
        self._prompt: Sequence[TokenLogprob] | None = None
        self._new: dict[str, list[str]] = {name: [] for name in _LISTS}  # as JSON

    def add(self, delta: Delta) -> None:
        if self._echo is not None and self._prompt is None:
            text, _ = self._echo.shown
            self._texts.append(text)
            given = delta.prompt_logprobs
            self._start, self._prompt = len(text), given if len(given) > LONG else [*given]
        super().add(delta)
        for x in delta.logprobs:
            for name, view in _LISTS.items():
                self._new[name].append(view(self._names, x, self._start + x.offset))

    def _said(self, text: str, whole: bool) -> dict[str, Any]:
        return {"text": text}

    def _shown(self) -> Iterator[str]:
        before = "{"
        for name, new in self._new.items():
            yield f'{before}"{name}":['
            between = ""
            for entry in self._of_prompt(name):
                yield between + entry
                between = ","
            yield between * bool(new) + ",".join(new) + "]"
            new.clear()
            before = ","
        yield "}"
        self._echo = None

    def _of_prompt(self, name: str) -> Iterator[str]:
        """What a list begins with, made as it is taken: a prompt may be long."""
        if self._echo is None:
            return
        # Of the first alone, if a refresh ended the sequence while its prompt was read.
        count = 1 + len(self._prompt)
        if name == "tokens":
            yield from map(self._names.quoted, self._echo.tokens[:count])
        elif name == "text_offset":
            yield from map(str, self._echo.shown[1][:count])
        else:
            yield "null"
            yield from (_LISTS[name](self._names, x, 0) for x in self._prompt)


class ChatChoice(Choice):
    """A choice of /v1/chat/completions."""

    ident, whole, piece = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, index: int, names: Names, logprobs: bool) -> None:
        super().__init__(index, names, logprobs)
        self._role = {"role": "assistant"}  # of the first event
        self._new: list[str] = []  # as JSON

    def add(self, delta: Delta) -> None:
        super().add(delta)
        for x in delta.logprobs:
            best = [self._one(token, value) for token, value in x.best.items()]
            self._new.append(dumps(self._one(x.token, x.logprob) | {"top_logprobs": best}))

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        name = self._names[token]
        whole = not name.startswith("token_id:")  # not a part of a character
        bytes_of = [*name.encode()] if whole else None
        return {"token": name, "logprob": max(logprob, LEAST), "bytes": bytes_of}

    def _said(self, text: str, whole: bool) -> dict[str, Any]:
        message, self._role = self._role | {"content": text}, {}
        return {"message": message | {"refusal": None}} if whole else {"delta": message}

    def _shown(self) -> Iterator[str]:
        yield f'{{"content":[{",".join(self._new)}],"refusal":null}}'
        self._new.clear()


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
