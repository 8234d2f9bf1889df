"""Text and tokens: a folder's tokenizer or bytes, incremental decoding, stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from gla_ext.model.files import read_json

CONTEXT = 16  # tokens of the prompt that are decoded before the first new one
LONGEST_OPEN = 16  # tokens that may be held back for the rest of a character
MOST_EMPTY = 8  # tokens without text that may be held back for the next word


class Tokenizer(Protocol):
    """The methods that a server needs of a tokenizer; those of transformers have them.

    If a tokenizer has `all_special_ids`, as in transformers, its `decode` also takes
    `skip_special_tokens`.
    """

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: list[int]) -> str: ...


class Bytes:
    """UTF-8 bytes as tokens, with byte 0 first, as `gla_ext.train` encodes a document."""

    def encode(self, text: str) -> list[int]:
        return [0, *text.encode()]

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")


def load_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer in a checkpoint's folder, loaded by transformers. Or `Bytes`, if the folder has
    no tokenizer, or has that of bytes that `gla_ext.train` writes, and no chat template or tokens
    of its own.

    Raises:
        ValueError: if there is none and the model's vocabulary is not the 256 bytes, or if it
            cannot be read.
    """
    path = folder / "tokenizer_config.json"
    config = read_json(path) if path.exists() else {"gla_ext_bytes": True}
    chats = "chat_template" in config or (folder / "chat_template.jinja").exists()
    if config.get("gla_ext_bytes") and not chats and vocab_size == 256:
        return Bytes()
    if not path.exists() and not chats:
        raise ValueError(
            f"expected {folder} to hold a tokenizer, as its model has {vocab_size} tokens, not the "
            "256 bytes; got no tokenizer_config.json"
        )
    from transformers import AutoTokenizer

    import gla_ext.hf  # noqa: F401  registers the model type 'gla'

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        said = " ".join(str(error).split())
        raise ValueError(f"expected {folder} to hold a tokenizer, got {said}") from error


def chat_tokens(tokenizer: Tokenizer | None, messages: list[dict[str, str]]) -> list[int]:
    """The tokens of a conversation, up to where the model's answer begins.

    Args:
        tokenizer: one of transformers, with a chat template.
        messages: each has a role and content.

    Raises:
        ValueError: if there is no chat template, or the template raises an error.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("expected a tokenizer with a chat template, got one without")
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program of its own
        raise ValueError(f"expected messages that the chat template takes, got {error}") from error
    return tokenizer.encode(text, add_special_tokens=False)


class Detokenizer:
    """Converts tokens to text one by one: returns the text that each token completes.

    A character may take several tokens, and a space may depend on the token before. Therefore a few
    earlier tokens are decoded together, with the new ones and without. A character that is
    incomplete at the end is not shown. With skip_special_tokens, special tokens are left out if the
    tokenizer has any.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool = True
    ) -> None:
        self._decode = tokenizer.decode
        if skip_special_tokens and hasattr(type(tokenizer), "all_special_ids"):
            self._decode = partial(tokenizer.decode, skip_special_tokens=True)
        self._window = list(prompt[-CONTEXT:])
        self._shown = len(self._window)  # the text of the first _shown tokens was returned

    def push(self, token: int) -> str:
        """The text that this token completes, possibly empty."""
        self._window.append(token)
        window, shown = self._window, self._shown
        text, before = self._decode(window), self._decode(window[:shown])
        waiting = len(window) - shown
        if text.endswith("\ufffd"):  # possibly an incomplete character
            if waiting < LONGEST_OPEN:
                return ""
        elif text == before:
            # A special token, or one that only has text together with the next. The window must not
            # begin with it: decoded without a word before, the next token would lose its space.
            if waiting > MOST_EMPTY:
                window.pop()
            return ""
        self._window, self._shown = window[shown:], waiting
        return _after(before, text)

    def rest(self) -> str:
        """The text that waits, without the character that is incomplete."""
        text = self._decode(self._window).rstrip("\ufffd")
        return _after(self._decode(self._window[: self._shown]), text)


def _after(before: str, text: str) -> str:
    while not text.startswith(before):  # a character that began in the prompt is now complete
        before = before[:-1]
    return text[len(before) :]


class StopStrings:
    """Ends a text before the first of some non-empty strings. Holds back text that may become one
    of them.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """The text that may be shown now, and whether a stop string follows it."""
        if not self._stops:
            return text, False
        self._held += text
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            return self._held[: min(places)], True
        # Hold back the longest end of the text that is the start of a stop string.
        most = min(max(map(len, self._stops)) - 1, len(self._held))
        for count in range(most, 0, -1):
            if any(stop.startswith(self._held[-count:]) for stop in self._stops):
                break
        else:
            count = 0
        out, self._held = self._held[: len(self._held) - count], self._held[-count:] * (count > 0)
        return out, False

    def flush(self) -> str:
        """The text that is still held back, if the text ended without a stop string."""
        held, self._held = self._held, ""
        return held
