"""Text as tokens and back: a folder's tokenizer or bytes, text as tokens come, stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

CONTEXT = 16  # tokens of the prompt that are decoded beside the first new one
LONGEST_OPEN = 16  # tokens that may wait for the rest of a character
MOST_EMPTY = 8  # tokens without text that may wait for the next word


class Tokenizer(Protocol):
    """What a server asks of a tokenizer; one of transformers has it.

    `decode` of one that has `all_special_ids`, as transformers' do, also takes
    `skip_special_tokens`.
    """

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: list[int]) -> str: ...


class Bytes:
    """UTF-8 bytes as tokens, after byte 0: how `gla_ext.train` shows a document to its model."""

    def encode(self, text: str) -> list[int]:
        return [0, *text.encode()]

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")


def load_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer that lies beside a checkpoint, through transformers, or bytes.

    Raises:
        ValueError: without one, for a model that is not of bytes.
    """
    if (folder / "tokenizer_config.json").exists():
        from transformers import AutoTokenizer

        import gla_ext.hf  # noqa: F401  registers the model type 'gla'

        return AutoTokenizer.from_pretrained(folder)
    if vocab_size != 256:
        raise ValueError(
            f"expected {folder} to hold a tokenizer, as its model has {vocab_size} tokens, not the "
            "256 bytes; got no tokenizer_config.json"
        )
    return Bytes()


class Detokenizer:
    """The text that each token completes.

    A character may take several tokens, and a space depend on the token before: a few tokens are
    decoded together, with the new ones and without. A character left open at the end is not shown.
    With skip_special_tokens special tokens are left out, where the tokenizer has some.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool = True
    ) -> None:
        self._decode = tokenizer.decode
        if skip_special_tokens and hasattr(type(tokenizer), "all_special_ids"):
            self._decode = partial(tokenizer.decode, skip_special_tokens=True)
        self._window = list(prompt[-CONTEXT:])
        self._shown = len(self._window)  # the text of the window up to here is out

    def push(self, token: int) -> str:
        """The text that this token completes, which may be none."""
        self._window.append(token)
        window, shown = self._window, self._shown
        text, before = self._decode(window), self._decode(window[:shown])
        waiting = len(window) - shown
        if text.endswith("\ufffd"):  # may be a part of a character
            if waiting < LONGEST_OPEN:
                return ""
        elif text == before:
            # A special token, or one that has text only beside the next. The window does not move
            # on to it alone: decoded without a word before, the next would lose its space.
            if waiting > MOST_EMPTY:
                window.pop()
            return ""
        self._window, self._shown = window[shown:], waiting
        while not text.startswith(before):  # a character that the prompt began is whole now
            before = before[:-1]
        return text[len(before) :]


class StopStrings:
    """Ends a text before the first of some strings, none of them empty, and holds back what may
    become one.
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
        # The longest end of the text that is the start of a stop string waits.
        most = min(max(map(len, self._stops)) - 1, len(self._held))
        for count in range(most, 0, -1):
            if any(stop.startswith(self._held[-count:]) for stop in self._stops):
                break
        else:
            count = 0
        out, self._held = self._held[: len(self._held) - count], self._held[-count:] * (count > 0)
        return out, False

    def flush(self) -> str:
        """What was held back, of a text that ended otherwise."""
        held, self._held = self._held, ""
        return held
