"""The command line of the server."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from gla_ext.model import GLAForCausalLM, fuse_projections
from gla_ext.ops.chunk import batch_invariant
from gla_ext.serve.engine import Engine
from gla_ext.serve.request import Limits
from gla_ext.serve.text import load_tokenizer
from gla_ext.train.devices import check_device, default_device

DTYPES = ("float32", "bfloat16", "float16")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    limits = Limits()
    parser = argparse.ArgumentParser(
        prog="python -m gla_ext.serve",
        description="Serves a language model over HTTP, with OpenAI's completion interface.",
    )
    parser.add_argument("model", type=Path, help="a folder with config.json and model.safetensors")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument("--name", help="the model's, for clients; default: its folder's")
    parser.add_argument("--device", type=_device, default=default_device())
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--state-dtype", choices=DTYPES, default="float32")
    parser.add_argument("--rows", type=int, default=limits.rows, help="decoded at once")
    parser.add_argument("--waiting", type=int, default=limits.waiting, help="that may wait")
    parser.add_argument("--max-prompt-tokens", type=int, default=limits.prompt_tokens)
    parser.add_argument("--max-new-tokens", type=int, default=limits.new_tokens)
    parser.add_argument("--prefill-tokens", type=int, default=limits.prefill_tokens)
    parser.add_argument("--checkpoint-tokens", type=int, default=limits.checkpoint_tokens)
    parser.add_argument("--cache-bytes", type=int, default=limits.cache_bytes)
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument(
        "--allow-refresh", action="store_true", help="serve POST /v1/refresh: the model changed"
    )
    parser.add_argument("--connections", type=int, default=2048)
    parser.add_argument("--shutdown-seconds", type=int, default=60)
    return parser.parse_args(arguments)


def _device(name: str) -> str:
    try:
        check_device(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return name


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    try:
        from gla_ext.serve.http import Options, serve
    except ModuleNotFoundError as error:
        sys.exit(f"python -m gla_ext.serve: {error}; 'pip install starlette uvicorn' brings it")
    limits = Limits(
        rows=args.rows,
        waiting=args.waiting,
        prompt_tokens=args.max_prompt_tokens,
        new_tokens=args.max_new_tokens,
        prefill_tokens=args.prefill_tokens,
        checkpoint_tokens=args.checkpoint_tokens,
        cache_bytes=args.cache_bytes,
    )
    model = GLAForCausalLM.from_pretrained(args.model).to(args.device, getattr(torch, args.dtype))
    tokenizer = load_tokenizer(args.model, model.config.vocab_size)
    with batch_invariant(args.batch_invariant):
        state_dtype = getattr(torch, args.state_dtype)
        model = fuse_projections(model.eval())
        engine = Engine(model, tokenizer, limits, state_dtype=state_dtype)
    name = args.name or args.model.resolve().name
    options = Options(name, allow_refresh=args.allow_refresh)
    serve(engine, args.host, args.port, options, args.connections, args.shutdown_seconds)
