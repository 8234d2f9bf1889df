"""The folder of a prepared corpus, which `python -m gla_ext.train.prepare` writes.

    corpus.json             what is in it, written last: without it the folder is unfinished
    train-00000.bin, ..     tokens of the documents to train on, in order; little endian, uint16 or
                            uint32; a shard is cut at its size, not where a document ends
    train.idx               where each document starts in these tokens; int64
    held_out-00000.bin, ..  and held_out.idx: the same of the documents held out
    tokenizer/              the tokenizer, as AutoTokenizer loads it

A document is the token that starts documents, and then its text's tokens.
"""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gla_ext.model.files import read_json, unexpected_values
from gla_ext.train.tokens.tokenizer import Tokenizer, read_tokenizer

MANIFEST, PROGRESS, TOKENIZER = "corpus.json", "progress.json", "tokenizer"
FORMAT = "gla_ext.train.prepare/1"
PARTS = ("train", "held_out")
_STARTS_AT_ONCE = 1 << 20  # documents


class Stream:
    """Tokens in shards, as if in a row.

    Args:
        shards: memory-mapped, uint16 or uint32, `[n]` each.
        starts: where documents start in the row, int64.
        size: bytes of their text.
        vocab_size: one more than the largest token.
    """

    def __init__(self, shards: list[Tensor], starts: Tensor, size: int, vocab_size: int) -> None:
        self.shards, self.starts, self.bytes = shards, starts, size
        self.vocab_size = vocab_size
        self._ends = list(itertools.accumulate(map(len, shards), initial=0))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, where: slice) -> Tensor:
        """Tokens from where.start up to where.stop: int64, on the CPU.

        Raises:
            ValueError: for a number that is no token.
        """
        start, stop, _ = where.indices(len(self))
        read = [torch.empty(0, dtype=torch.int64, device="cpu")]
        while start < stop:
            shard = bisect.bisect_right(self._ends, start) - 1
            offset = start - self._ends[shard]
            read.append(self.shards[shard][offset : offset + stop - start].long())
            start += len(read[-1])
        tokens = torch.cat(read)
        if len(tokens) and (largest := int(tokens.max())) >= self.vocab_size:
            raise ValueError(
                f"expected the tokens of a corpus to be below {self.vocab_size}, got {largest}; a "
                "copy that was damaged must be made again"
            )
        return tokens

    @classmethod
    def chain(cls, streams: list[Stream]) -> Stream:
        """Several in a row."""
        offsets = itertools.accumulate(map(len, streams[:-1]), initial=0)
        starts = [stream.starts + at for stream, at in zip(streams, offsets, strict=True)]
        shards = [shard for stream in streams for shard in stream.shards]
        size = sum(stream.bytes for stream in streams)
        return cls(shards, torch.cat(starts), size, streams[0].vocab_size)

    def most_documents(self, seq_len: int) -> int:
        """The largest number of documents in seq_len tokens in a row."""
        most = 1
        for first in range(0, len(self.starts), _STARTS_AT_ONCE):
            ours = self.starts[first : first + _STARTS_AT_ONCE]
            ends = torch.searchsorted(self.starts, ours + seq_len)
            inside = ends - torch.arange(first, first + len(ours), device="cpu")
            most = max(most, int(inside.max()))
        return most + 1  # the one that goes on at the window's start


@dataclass(frozen=True)
class Folder:
    """A prepared corpus.

    path, digest: where it is; hex digest of its tokens, documents and tokenizer.
    train, held_out: its parts.
    tokenizer: as in its folder.
    """

    path: Path
    digest: str
    train: Stream
    held_out: Stream
    tokenizer: Tokenizer


def is_prepared(path: str | Path) -> bool:
    """Whether a corpus is there, finished or not."""
    return any((Path(path) / name).exists() for name in (MANIFEST, PROGRESS))


def open_folder(path: str | Path) -> Folder:
    """Opens a prepared corpus and checks the sizes of its files.

    Raises:
        ValueError: if it is not there, unfinished or cut short, or if the tokenizer beside it is
            another one than that of its tokens.
    """
    path = Path(path)
    if not (path / MANIFEST).exists():
        found = "an unfinished one; the same command goes on with it"
        raise ValueError(
            f"expected {path} to be a corpus that 'python -m gla_ext.train.prepare' wrote, got "
            + (found if (path / PROGRESS).exists() else f"no {MANIFEST} there")
        )
    manifest = read_json(path / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise ValueError(
            f"expected {path / MANIFEST} to be of the format {FORMAT}, got {manifest.get('format')}"
        )
    with unexpected_values(path / MANIFEST):
        told = manifest["tokenizer"]
        tokenizer = read_tokenizer(path / TOKENIZER, told["document_start"])
        if tokenizer.digest != told["digest"]:
            raise ValueError(
                f"expected {path / TOKENIZER} to be the tokenizer of the shards "
                f"({told['digest'][:12]}), got another one ({tokenizer.digest[:12]})"
            )
        parts = (_stream(path, name, manifest, tokenizer.vocab_size) for name in PARTS)
        return Folder(path, str(manifest["digest"]), *parts, tokenizer)


def _stream(folder: Path, name: str, manifest: dict[str, Any], vocab_size: int) -> Stream:
    """A part of a corpus, as corpus.json has it."""
    stored = {"uint16": torch.uint16, "uint32": torch.uint32}[manifest["dtype"]]
    part = manifest[name]
    for what in ("documents", "bytes"):
        if part[what] < 1:
            raise ValueError(
                f"expected {folder / MANIFEST} to have {what} in {name}, got {part[what]}"
            )
    shards = [_mapped(folder / shard["name"], stored, shard["tokens"]) for shard in part["shards"]]
    starts = _mapped(folder / f"{name}.idx", torch.int64, part["documents"])
    stream = Stream(shards, starts, part["bytes"], vocab_size)
    if not (starts[0] == 0 and starts[-1] < len(stream) and _increases(starts)):
        raise ValueError(
            f"expected {folder / f'{name}.idx'} to say where documents start, in order, got other "
            "numbers; a copy that was damaged must be made again"
        )
    return stream


def _increases(numbers: Tensor) -> bool:
    blocks = (
        numbers[first : first + _STARTS_AT_ONCE + 1]
        for first in range(0, len(numbers), _STARTS_AT_ONCE)
    )
    return all(bool((block.diff() > 0).all()) for block in blocks)


def _mapped(path: Path, dtype: torch.dtype, count: int) -> Tensor:
    """A file of that many numbers, memory-mapped."""
    size = path.stat().st_size if path.exists() else None
    if size != count * dtype.itemsize:
        got = "no file" if size is None else f"{size:,}"
        raise ValueError(
            f"expected {path} to have {count * dtype.itemsize:,} bytes, as {MANIFEST} says, got "
            f"{got}; a copy that was cut short must be made again"
        )
    return torch.from_file(str(path), shared=False, size=count, dtype=dtype)
