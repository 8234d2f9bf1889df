"""`python -m gla_ext.generate FOLDER "text"` continues a text; with -i it is a conversation."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from gla_ext.decode import Decoder
from gla_ext.decode.generate import generate_stream
from gla_ext.devices import default_device, usable_device
from gla_ext.serve.command import DTYPES, in_a_sentence, load
from gla_ext.serve.text import Detokenizer, Tokenizer, chat_tokens

PROGRAM = "python -m gla_ext.generate"


def command_line() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="Continues a text with a language model, or talks with it."
    )
    add = parser.add_argument
    add("model", type=Path, help="a folder with config.json and model.safetensors")
    add("prompt", nargs="?", help="the text to continue; with -i what you say first")
    talks = "a conversation: each line that you write is answered; Ctrl-C stops an answer"
    add("-i", "--interactive", action="store_true", help=talks)
    most = "most tokens of a continuation or an answer (default: %(default)s)"
    add("--max-new-tokens", type=int, default=400, help=most)
    warm = "0 takes the most probable token (default: %(default)s)"
    add("--temperature", type=float, default=0.9, help=warm)
    add("--top-k", type=int, help="draw from the k most probable tokens (default: all)")
    add("--top-p", type=float, help="draw from those of this probability together (default: all)")
    add("--seed", type=int, help="fixes the draws (default: another each time)")
    place = "cpu, cuda, or one GPU such as cuda:1 (default: %(default)s)"
    add("--device", type=usable_device, default=default_device(), help=place)
    kind = "dtype of weights and products (default: the checkpoint's)"
    add("--dtype", choices=DTYPES, help=kind)
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Writes text to stdout; an error that the user can fix is a sentence, with status 2."""
    parser = command_line()
    args = parser.parse_intermixed_args(arguments)
    if args.prompt is None and not args.interactive:
        parser.error("expected a text to continue, or -i for a conversation")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # for unprintable characters
    with in_a_sentence(PROGRAM):
        model, tokenizer = load(args.model, args.device, args.dtype)
        decoder = _decoder(args, model, tokenizer)
        if args.interactive:
            _talk(decoder, tokenizer, args.prompt, args.max_new_tokens)
        else:
            print(args.prompt, end="", flush=True)
            _write(decoder, tokenizer, tokenizer.encode(args.prompt), args.max_new_tokens)


def _decoder(args: argparse.Namespace, model: torch.nn.Module, tokenizer: Tokenizer) -> Decoder:
    ends = model.config.eos_token_id
    ends = {*([] if ends is None else ends if isinstance(ends, list) else [ends])}
    ends |= {getattr(tokenizer, "eos_token_id", None)} - {None}
    generator = torch.Generator(args.device)
    generator.seed() if args.seed is None else generator.manual_seed(args.seed)
    filters = (args.temperature, args.top_k, args.top_p)
    return Decoder(model, 1, *filters, eos_token_id=sorted(ends), generator=generator)


def _pieces(decoder: Decoder, tokenizer: Tokenizer, tokens: list[int], count: int) -> Iterator[str]:
    """The text of a continuation, as it comes."""
    text = Detokenizer(tokenizer, tokens)
    for drawn in generate_stream(decoder.model, [tokens], count, decoder=decoder):
        if drawn.item() in decoder.end_tokens:
            break
        yield text.push(drawn.item())
    yield text.rest()


def _write(decoder: Decoder, tokenizer: Tokenizer, tokens: list[int], count: int) -> str:
    """Writes a continuation until its end or Ctrl-C; returns it."""
    written = ""
    with suppress(KeyboardInterrupt):
        for piece in _pieces(decoder, tokenizer, tokens, count):
            print(piece, end="", flush=True)
            written += piece
    print()
    return written


def _talk(decoder: Decoder, tokenizer: Tokenizer, line: str | None, count: int) -> None:
    """A conversation, until the end of the input or Ctrl-C. Without a chat template, the model
    continues all that was written.
    """
    with suppress(ImportError):
        importlib.import_module("readline")  # lets `input` edit its line
    has_template = getattr(tokenizer, "chat_template", None) is not None
    messages, text = [], ""
    while True:
        if line is None:
            try:
                line = input("> ")
            except (EOFError, KeyboardInterrupt):
                print()
                return
        messages.append({"role": "user", "content": line})
        text += f"{line}\n"
        tokens = chat_tokens(tokenizer, messages) if has_template else tokenizer.encode(text)
        answer = _write(decoder, tokenizer, tokens, count)
        messages.append({"role": "assistant", "content": answer})
        text += f"{answer}\n"
        line = None


if __name__ == "__main__":
    main()
