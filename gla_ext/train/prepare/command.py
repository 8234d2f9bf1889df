"""The command line of `python -m gla_ext.train.prepare`."""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from gla_ext.train.command import check_packages
from gla_ext.train.flags import FlagParser
from gla_ext.train.loop import Interrupted, StopSignals
from gla_ext.train.prepare.filling import fill
from gla_ext.train.prepare.readers import Reader
from gla_ext.train.prepare.sources import Place, measure
from gla_ext.train.prepare.vocabulary import train_tokenizer
from gla_ext.train.prepare.writer import Writer
from gla_ext.train.run_folder import held
from gla_ext.train.tokens.folder import MANIFEST, TOKENIZER
from gla_ext.train.tokens.tokenizer import Tokenizer, byte_tokenizer, read_tokenizer

PROGRAM = "python -m gla_ext.train.prepare"
MAX_SHARD = 1_000_000_000
_MOST_TOLD = 10  # sentences about what is left out; the rest is only counted
_BYTES = "bytes"
_MMAP_THRESHOLD = -3  # as malloc.h has it


def command_line() -> argparse.ArgumentParser:
    """The command line."""
    parser = FlagParser(
        prog=PROGRAM,
        description="makes a corpus of tokens from text, for --data of python -m gla_ext.train.",
    )

    def add(flag: str, text: str, shown: str | None = None, **kwargs: Any) -> None:
        default = kwargs.get("default") if shown is None else shown
        parser.add_argument(flag, help=f"{text} (default: {default})", **kwargs)

    sources = (
        "text files, JSON lines (.jsonl, .ndjson, .json), both also with .gz or .zst, parquet, "
        "folders of them, or folders that datasets' save_to_disk wrote"
    )
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help=sources)
    parser.add_argument("--out", type=Path, required=True, help="folder for the corpus")
    which = parser.add_mutually_exclusive_group(required=True)
    told = "tokenizer.json, or a folder that holds it; 'bytes' makes every byte a token"
    which.add_argument("--tokenizer", metavar="FOLDER_OR_FILE", help=told)
    told = "make a tokenizer of so many tokens from the text: byte-level BPE"
    which.add_argument("--train-tokenizer", type=int, metavar="TOKENS", help=told)
    add(
        "--document-start",
        "token before each document",
        "the tokenizer's bos_token, or else its eos_token",
        metavar="TOKEN",
    )
    add("--column", "key or column with a document's text", default="text")
    told = "text between the documents of a text file; \\n is a line's end"
    add("--delimiter", told, "none: a file is a document", type=_unescaped)
    told = "share of the documents that are held out, by a hash of their text"
    add("--held-out", told, "0.005", type=float)
    told = "sources that are held out instead; of the others all is trained on"
    add("--held-out-files", told, "none", nargs="+", metavar="SOURCE", default=[])
    add("--skip-not-utf8", "leave out text files in another encoding", "no", action="store_true")
    add("--workers", "processes that make tokens", "one a core", type=int)
    add("--shard-bytes", "largest shard", type=int, default=MAX_SHARD)
    return parser


def _unescaped(text: str) -> str:
    return text.replace("\\n", "\n")


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns its exit status (128 + the signal's number if stopped)."""
    argv = sys.argv[1:] if argv is None else argv
    options = command_line().parse_args(argv)
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 20)  # keep no large block that was freed
    with StopSignals() as signals:
        try:
            check_packages(("tokenizers", "tqdm"))
            _check(options)
            with held(options.out) as lock:
                prepare(options, signals, lock)
        except Interrupted:
            command = [sys.executable, "-m", "gla_ext.train.prepare", *argv]
            print(f"Stopped. To go on: {shlex.join(command)}")
            return 128 + signals.number
        except (OSError, ValueError, ImportError) as error:
            print(f"gla_ext.train.prepare: {error}", file=sys.stderr)
            return 2
    return 0


def prepare(options: argparse.Namespace, signals: StopSignals, lock: TextIO) -> None:
    """Makes the corpus, or what is left of it; raises Interrupted when a signal came."""
    tokenizer = _given_tokenizer(options)
    paths = [os.path.realpath(path) for path in options.sources]
    held_out = [os.path.realpath(path) for path in options.held_out_files]
    digest, count, size = measure(paths, but=held_out)
    held_out_digest, _, held_out_size = measure(held_out)
    if held_out and not count:
        raise ValueError("expected sources beside --held-out-files, got none")
    total = size + held_out_size
    fraction = 0.0 if held_out else options.held_out
    settings = {
        "SOURCE": digest,
        "--tokenizer": tokenizer.digest if tokenizer else None,
        "--train-tokenizer": options.train_tokenizer,
        "--column": options.column,
        "--delimiter": options.delimiter,
        "--held-out": fraction,
        "--held-out-files": held_out_digest,
        "--skip-not-utf8": options.skip_not_utf8,
        "--shard-bytes": options.shard_bytes,
    }
    writer = Writer(options.out, settings)
    if writer.is_whole:
        print(f"{options.out} is prepared already, from these sources")
        return

    def reader(place: Place, tell: Callable[[str], None]) -> Reader:
        given = (options.column, options.delimiter, options.skip_not_utf8, fraction)
        return Reader(paths, place, *given, tell, held_out)

    folder = options.out / TOKENIZER
    if tokenizer is not None:
        tokenizer.save(folder)
    elif (folder / "tokenizer.json").exists():
        tokenizer = read_tokenizer(folder)
    else:
        begin = reader(Place(), lambda sentence: None)  # they are said when tokens are made
        tokenizer = train_tokenizer(options.train_tokenizer, begin, total, signals.check)
        tokenizer.save(folder)
    print(f"Tokenizer: {tokenizer.vocab_size:,} tokens, {tokenizer.start!r} before each document")
    writer.begin("uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32", options.shard_bytes)
    if writer.place != Place():
        print(f"Going on behind {sum(x.tokens for x in writer.parts.values()):,} tokens")
    try:
        left = reader(writer.place, _teller())
        fill(writer, left, tokenizer, options.workers, total, signals, lock)
        _check_parts(writer, options)
    except BaseException:
        writer.back()
        raise
    _report(writer.finish(tokenizer), options.out)


def _given_tokenizer(options: argparse.Namespace) -> Tokenizer | None:
    if options.tokenizer is None:
        return None
    if options.tokenizer == _BYTES and not Path(_BYTES).exists():
        return byte_tokenizer()
    return read_tokenizer(options.tokenizer, options.document_start)


def _teller() -> Callable[[str], None]:
    """A function that prints what is left out, the first few times."""
    from tqdm import tqdm

    told = itertools.count(1)

    def tell(sentence: str) -> None:
        if (number := next(told)) <= _MOST_TOLD:
            tqdm.write(f"gla_ext.train.prepare: {sentence}", file=sys.stderr)
        if number == _MOST_TOLD:
            tqdm.write("gla_ext.train.prepare: more is only counted", file=sys.stderr)

    return tell


def _check(options: argparse.Namespace) -> None:
    """Fills in defaults and raises ValueError for options out of range."""
    if options.held_out is not None and options.held_out_files:
        raise ValueError("expected --held-out or --held-out-files, got both")
    if options.document_start is not None and options.tokenizer in (None, _BYTES):
        raise ValueError("expected --document-start with a tokenizer that is given, got it alone")
    if options.delimiter == "":
        raise ValueError("expected --delimiter to be some text, got none")
    options.held_out = 0.005 if options.held_out is None else options.held_out
    if not 0 < options.held_out < 1:
        raise ValueError(f"expected --held-out to be between 0 and 1, got {options.held_out}")
    options.workers = options.workers or len(os.sched_getaffinity(0))
    ranges = (
        ("--workers", options.workers, 1, 1024),
        ("--shard-bytes", options.shard_bytes, 4, MAX_SHARD),
        ("--train-tokenizer", options.train_tokenizer or 257, 257, 1 << 24),
    )
    for flag, value, least, most in ranges:
        if not least <= value <= most:
            raise ValueError(f"expected {flag} to be from {least} to {most}, got {value}")
    for path in map(os.path.realpath, [*options.sources, *options.held_out_files]):
        if Path(os.path.realpath(options.out)).is_relative_to(path):
            raise ValueError(f"expected --out to be outside of the sources, got it in {path}")


def _check_parts(writer: Writer, options: argparse.Namespace) -> None:
    train, held_out = writer.parts.values()
    broken = f"; {writer.place.broken} broken ones were left out" if writer.place.broken else ""
    if not train.documents + held_out.documents:
        raise ValueError(f"expected documents in the sources, got none{broken}")
    if not train.documents:
        raise ValueError(
            f"expected documents to train on, got {held_out.documents}, all held out; another "
            "--out with a smaller --held-out leaves some"
        )
    if not held_out.documents:
        raise ValueError(
            f"expected documents that are held out, got none of {train.documents:,}; another "
            "--out with a larger --held-out takes some, with --delimiter makes more of a file, "
            "with --held-out-files holds out files of your own"
        )


def _report(manifest: dict[str, Any], out: Path) -> None:
    for name, what in (("train", "to train on"), ("held_out", "held out")):
        part = manifest[name]
        print(
            f"{part['documents']:,} documents {what}: {part['tokens']:,} tokens, "
            f"{part['bytes']:,} bytes, {len(part['shards'])} shards"
        )
    left = manifest["left_out"]
    if any(left.values()):
        print(f"Left out: {left['broken']:,} broken lines, {left['not_text']:,} files not text")
    print(f"Wrote {out}: {MANIFEST}, digest {manifest['digest'][:12]}")
