"""What the examples share: arguments, text as tokens and back, windows of it, the loss on some.

Not an example itself.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from gla_ext.train.data import read_text_file
from gla_ext.train.devices import check_device, default_device

MAX_EVAL_WINDOWS = 16
MAX_TEXT_BYTES = 16 << 20


class Tokenizer(Protocol):
    """What the examples ask of a tokenizer; one of transformers has it."""

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


def with_text(
    tokenizer: Tokenizer, prompt: list[int], tokens: Iterator[int]
) -> Iterator[tuple[int, str]]:
    """Each token and the text that it completes; a character left open at the end is not shown.

    A character may take several tokens, and a space depend on the token before: a few tokens are
    decoded together, with the new ones and without.
    """
    window, shown = list(prompt), len(prompt)  # the text of window[:shown] is out
    for token in tokens:
        window.append(token)
        text = tokenizer.decode(window)
        if text.endswith("\ufffd"):  # perhaps a part of a character
            yield token, ""
            continue
        yield token, text[len(tokenizer.decode(window[:shown])) :]
        window, shown = window[shown:], len(window) - shown


def argument(parser: argparse.ArgumentParser) -> None:
    """Adds the text to a command line."""
    text = Path(argparse.__file__)
    parser.add_argument("text", type=Path, nargs="?", default=text, help="default: argparse.py")


def device_argument(parser: argparse.ArgumentParser) -> None:
    """Adds the device to a command line, which says what is wrong with another."""

    def usable(device: str) -> str:
        try:
            check_device(device)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return device

    parser.add_argument("--device", type=usable, default=default_device())


def load_text(path: Path, tokenizer: Tokenizer, seq_len: int) -> tuple[Tensor, Tensor]:
    """Tokens to train on, int64 `[n]`, and windows of the tenth at the end, `[windows, seq_len]`.

    Raises:
        ValueError: for a text too short for one window of each, or over MAX_TEXT_BYTES; for what is
            not a text file in UTF-8.
    """
    text, left_out = read_text_file(path, MAX_TEXT_BYTES)
    if left_out:
        raise ValueError(
            f"expected {path} to have at most {MAX_TEXT_BYTES} bytes, got {len(text) + left_out}; "
            "python -m gla_ext.train takes more"
        )
    try:
        tokens = torch.tensor(tokenizer.encode(text.decode()))
    except UnicodeDecodeError as error:
        raise ValueError(f"expected {path} to be UTF-8, got {error}") from error
    train, tail = tokens.tensor_split([len(tokens) - len(tokens) // 10])
    if len(tail) < seq_len:
        raise ValueError(
            f"expected {path} to have at least {10 * seq_len} tokens, got {len(tokens)}"
        )
    count = min(len(tail) // seq_len, MAX_EVAL_WINDOWS)
    return train, tail[: count * seq_len].view(count, seq_len)


def windows(tokens: Tensor, count: int, seq_len: int) -> Tensor:
    """`[count, seq_len]` of tokens `[n]`, from random places."""
    starts = torch.randint(len(tokens) - seq_len + 1, (count, 1))
    return tokens[starts + torch.arange(seq_len)]


@torch.no_grad()
def held_out_loss(model: nn.Module, rows: Tensor) -> float:
    """Mean cross entropy of a language model on rows, int64 `[B, T]`, in nats a token."""
    training, device = model.training, next(model.parameters()).device
    rows = rows.to(device)
    loss = model.eval()(rows, labels=rows).loss.item()
    model.train(training)
    return loss
