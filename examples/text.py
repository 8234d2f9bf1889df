"""What the examples share: arguments, text as tokens, windows of it, the loss on some.

Not an example itself.
"""

import argparse
from argparse import ArgumentParser
from pathlib import Path

import torch
from torch import Tensor, nn

from gla_ext.devices import default_device, usable_device
from gla_ext.serve.text import Tokenizer
from gla_ext.train.data import read_text_file

MAX_EVAL_WINDOWS = 16
MAX_TEXT_BYTES = 16 << 20


def command_line(description: str, *folders: str, **defaults: int | float | Path) -> ArgumentParser:
    """A parser of folders, the text, a device and options with these defaults."""
    parser = ArgumentParser(description=description.partition("\n")[0])
    for name in folders:
        parser.add_argument(name, type=Path)
    text = Path(argparse.__file__)
    parser.add_argument("text", type=Path, nargs="?", default=text, help="default: argparse.py")
    parser.add_argument("--device", type=usable_device, default=default_device())
    for name, default in defaults.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=type(default), default=default, help=f"default: {default}")
    if "out" in (*folders, *defaults):
        parser.add_argument("--overwrite", action="store_true", help="write over a model in OUT")
    return parser


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
    """`[count, seq_len]` of tokens `[n]`, from random places.

    Raises:
        ValueError: for fewer than seq_len tokens.
    """
    if len(tokens) < seq_len:
        raise ValueError(f"expected a text of at least {seq_len} tokens, got {len(tokens)}")
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
