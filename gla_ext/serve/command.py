"""The command line of the server."""

from __future__ import annotations

import argparse
import contextlib
import logging
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch

from gla_ext.devices import default_device, usable_device
from gla_ext.model import GLAForCausalLM, fuse_projections
from gla_ext.model.tensors import load_tensors, read_model
from gla_ext.ops.chunk import batch_invariant
from gla_ext.serve.engine import Engine
from gla_ext.serve.request import Limits
from gla_ext.serve.text import Tokenizer, load_tokenizer

PROGRAM = "python -m gla_ext.serve"
DTYPES = ("float32", "bfloat16", "float16")
LEVELS = ("debug", "info", "warning", "error")
_NO_MEMORY = (MemoryError, torch.OutOfMemoryError)


def command_line() -> argparse.ArgumentParser:
    """The command line."""
    limits = Limits()
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Serves a language model over HTTP, with OpenAI's completion interface.",
    )

    def add(flag: str, text: str, default: Any, shown: str | None = None, **kwargs: Any) -> None:
        text = f"{text} (default: {default if shown is None else shown})"
        kind = {} if "action" in kwargs or default is None else {"type": type(default)}
        parser.add_argument(flag, default=default, help=text, **{**kind, **kwargs})

    parser.add_argument("model", type=Path, help="a folder with config.json and model.safetensors")
    add("--host", "address to listen on; 0.0.0.0 takes all", "127.0.0.1")
    add("--port", "port to listen on; 0 takes a free one", 8000, type=_number(0, 65535))
    add("--name", "the model's name for clients", None, "its folder's")
    add("--device", "cpu, cuda, or one GPU such as cuda:1", default_device(), type=usable_device)
    add("--dtype", "dtype of weights and products", None, "the checkpoint's", choices=DTYPES)
    add("--state-dtype", "dtype in which recurrent states are stored", "float32", choices=DTYPES)
    add("--rows", "sequences that are decoded at once", limits.rows)
    add("--waiting", "sequences that may wait for a row; more get status 429", limits.waiting)
    add("--max-prompt-tokens", "most tokens of a prompt", limits.prompt_tokens)
    add("--max-new-tokens", "most tokens that a request may ask for", limits.new_tokens)
    passing = "most tokens of prompts between two steps while others decode"
    add("--prefill-tokens", passing, limits.prefill_tokens)
    every = "tokens between two checkpoints of the prefix cache, a multiple of 64"
    add("--checkpoint-tokens", every, limits.checkpoint_tokens)
    add("--cache-bytes", "memory of the prefix cache; 0 turns it off", limits.cache_bytes)
    alone = "make a reply's bits in the same row the same, whatever else runs"
    add("--batch-invariant", alone, False, "no", action="store_true")
    told = "serve POST /v1/refresh, by which clients say that the model changed"
    add("--allow-refresh", told, False, "no", action="store_true")
    add("--api-key", "what requests to /v1 must bring as bearer token", None, "none", type=_key)
    pages = "let web pages of an origin ask, such as https://example.org, or of all: *; repeatable"
    add("--allow-origin", pages, [], "none", type=_origin, action="append")
    bare = "serve no page at /, in which a browser shows what the model writes"
    add("--no-page", bare, False, "no", action="store_true")
    add("--log-level", "the least level of lines in the log", "info", choices=LEVELS)
    more = "connections that may be open at once; more get status 503"
    add("--connections", more, 2048, type=_number(1))
    last = "most seconds to finish accepted requests after SIGTERM or SIGINT"
    add("--shutdown-seconds", last, 60, type=_number(0))
    return parser


def _number(least: int, most: int | None = None) -> Callable[[str], int]:
    """A function that parses an int and checks its range."""

    def number(text: str) -> int:
        value = int(text)
        if value < least or (most is not None and value > most):
            bounds = f"at least {least}" if most is None else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"expected a number {bounds}, got {value}")
        return value

    return number


def _key(text: str) -> str:
    if not re.fullmatch(r"[!-~]+", text):
        raise argparse.ArgumentTypeError("expected a key of ASCII characters without blanks")
    return text


def _origin(text: str) -> str:
    if not re.fullmatch(r"\*|https?://[^/\s]+", text):
        raise argparse.ArgumentTypeError(f"expected an origin such as http://host:80, got {text}")
    return text


def main(arguments: list[str] | None = None) -> None:
    """Serves until a signal. For an error that the user can fix it prints a sentence to stderr and
    exits with status 2; for a missing package with status 1.
    """
    args = command_line().parse_args(arguments)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("gla_ext").setLevel(args.log_level.upper())
    try:
        from gla_ext.serve.http import Options, serve
    except ModuleNotFoundError as error:
        sys.exit(f"{PROGRAM}: {error}; 'pip install safetensors starlette uvicorn' brings it")
    with in_a_sentence(PROGRAM):
        engine = _engine(args)
    name = args.name or args.model.resolve().name
    options = Options(
        name,
        allow_refresh=args.allow_refresh,
        api_key=args.api_key,
        allow_origins=tuple(args.allow_origin),
        page=not args.no_page,
    )
    try:
        serve(engine, args.host, args.port, options, args.connections, args.shutdown_seconds)
    except OSError as error:
        place = f"{args.host} and port {args.port}"
        _fail(PROGRAM, f"expected {place} to be free to listen on, got {error}")
    except _NO_MEMORY as error:  # the warm-up allocates memory too
        _fail(PROGRAM, error)


def _engine(args: argparse.Namespace) -> Engine:
    limits = Limits(
        rows=args.rows,
        waiting=args.waiting,
        prompt_tokens=args.max_prompt_tokens,
        new_tokens=args.max_new_tokens,
        prefill_tokens=args.prefill_tokens,
        checkpoint_tokens=args.checkpoint_tokens,
        cache_bytes=args.cache_bytes,
    )
    model, tokenizer = load(args.model, args.device, args.dtype)
    with batch_invariant(args.batch_invariant):
        state_dtype = getattr(torch, args.state_dtype)
        return Engine(model, tokenizer, limits, state_dtype=state_dtype)


def load(folder: Path, device: str, dtype: str | None) -> tuple[GLAForCausalLM, Tokenizer]:
    """A model that is ready to decode, and its tokenizer; dtype None is that of the embeddings in
    the file.
    """
    config, tensors = read_model(folder)
    model = GLAForCausalLM(config)
    load_tensors(model, tensors)
    stored = tensors["model.embeddings.weight"].dtype
    model = model.to(device, stored if dtype is None else getattr(torch, dtype))
    return fuse_projections(model.eval()), load_tokenizer(folder, config.vocab_size)


@contextlib.contextmanager
def in_a_sentence(program: str) -> Iterator[None]:
    """Ends the program with status 2 after an error that the user can fix, and says it in a
    sentence on stderr.
    """
    try:
        yield
    except (OSError, ValueError, ImportError, NotImplementedError, *_NO_MEMORY) as error:
        _fail(program, error)
    except RuntimeError as error:
        # Of torch's CPU allocator, and of `generate`.
        if not re.search("can't allocate memory|logits to be finite", str(error)):
            raise
        _fail(program, error)


def _fail(program: str, error: Exception | str) -> NoReturn:
    first_line = str(error).partition("\n")[0]  # torch appends the place in its sources
    print(f"{program}: {first_line or type(error).__name__}", file=sys.stderr)
    sys.exit(2)
