"""Writes a corpus so that it can be gone on with after a stop at any moment.

Tokens are appended to the shards. From time to time they are flushed to the disk, and progress.json
is replaced: it says how long every file is and how far the sources are read. What lies beyond that
is cut off when the corpus is opened again.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
from array import array
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from gla_ext.model.files import read_json, unexpected_values, write_text
from gla_ext.train.prepare.sources import Place
from gla_ext.train.tokens.folder import FORMAT, MANIFEST, PARTS, PROGRESS
from gla_ext.train.tokens.tokenizer import Tokenizer

TYPES = {"uint16": "H", "uint32": "I"}  # of tokens, as `array` calls them


@dataclass
class Encoded:
    """Documents of one part, as tokens.

    tokens: in the corpus's type. starts: where in them documents start. bytes: of their text.
    """

    tokens: array
    starts: list[int]
    bytes: int


@dataclass
class Part:
    """A part of a corpus that is being written.

    folder, name: where, and 'train' or 'held_out'.
    type: of the tokens, 'H' or 'I' as of `array`. shard_tokens: most tokens of a shard.
    tokens, documents, bytes: how many are written.
    """

    folder: Path
    name: str
    type: str
    shard_tokens: int
    tokens: int = 0
    documents: int = 0
    bytes: int = 0
    _files: dict[Path, BinaryIO] = field(default_factory=dict)  # the last shard and the index

    def append(self, new: Encoded) -> None:
        """Appends documents, or the continuation of the last one."""
        starts = array("q", [self.tokens + start for start in new.starts])
        self._write(self.folder / f"{self.name}.idx", starts)
        done = 0
        while done < len(new.tokens):
            number, place = divmod(self.tokens, self.shard_tokens)
            piece = new.tokens[done : done + self.shard_tokens - place]
            self._write(self._shard(number), piece)
            self.tokens += len(piece)
            done += len(piece)
            if place + len(piece) == self.shard_tokens:
                self.close()
        self.documents += len(new.starts)
        self.bytes += new.bytes

    def _shard(self, number: int) -> Path:
        return self.folder / f"{self.name}-{number:05}.bin"

    def _write(self, path: Path, numbers: array) -> None:
        if path not in self._files:
            self._files[path] = path.open("ab")
        self._files[path].write(numbers.tobytes())

    def flush(self) -> None:
        """Waits until all is on the disk."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        self.flush()
        for file in self._files.values():
            file.close()
        self._files = {}

    def numbers(self) -> dict[str, int]:
        """What progress.json says of the part."""
        return {"tokens": self.tokens, "documents": self.documents, "bytes": self.bytes}

    def restore(self, tokens: int = 0, documents: int = 0, bytes: int = 0) -> None:
        """Goes back to an earlier state, of `numbers`: cuts the files."""
        for file in self._files.values():
            with contextlib.suppress(OSError):  # of a full disk
                file.close()
        self._files = {}
        self.tokens, self.documents, self.bytes = tokens, documents, bytes
        _cut(self.folder / f"{self.name}.idx", documents * 8)
        count = len(list(self.folder.glob(f"{self.name}-*.bin")))
        if tokens > count * self.shard_tokens:
            raise ValueError(
                f"expected {self.folder} to have {tokens:,} tokens in {self.name}, as {PROGRESS} "
                f"says, got {count} shards; another --out begins anew"
            )
        sizes = self._sizes()
        for number in range(count + 1):
            size = sizes[number] if number < len(sizes) else 0
            _cut(self._shard(number), size * array(self.type).itemsize)

    def _sizes(self) -> list[int]:
        """The tokens of each shard."""
        full, rest = divmod(self.tokens, self.shard_tokens)
        return [self.shard_tokens] * full + [rest] * (rest > 0)

    def finish(self) -> dict[str, Any]:
        """Closes the part; returns its entry in corpus.json."""
        self.close()
        shards = [
            {"name": path.name, "tokens": size, "sha256": _digest(path)}
            for path, size in zip(map(self._shard, itertools.count()), self._sizes(), strict=False)
        ]
        index = _digest(self.folder / f"{self.name}.idx")
        return self.numbers() | {"index_sha256": index, "shards": shards}


class Writer:
    """A corpus that is being written.

    Args:
        folder: where; locked by this process.
        settings: all that decides what is written, by the flags' names.

    Attributes:
        place: how far the sources are read, as of the last `commit`.
        parts: the parts, after `begin`.
        is_whole: whether the corpus was finished before.

    Raises:
        ValueError: if something else is there, or a corpus of other settings.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder, self.settings = folder, settings
        self.place, self.parts = Place(), {}
        self._numbers: dict[str, dict[str, int]] = {}
        self.is_whole = (folder / MANIFEST).exists()
        path = folder / (MANIFEST if self.is_whole else PROGRESS)
        if not path.exists():
            if found := sorted(x.name for x in folder.iterdir() if x.name[0] != "."):
                raise ValueError(
                    f"expected --out to be a new or empty folder, got {folder} with {found[0]}"
                )
            self._save()
            return
        state = read_json(path)
        with unexpected_values(path):
            for flag, value in settings.items():
                if state["settings"][flag] != value:
                    raise ValueError(
                        f"expected {flag} to be as when {folder} was begun, got another; the same "
                        "command goes on with it, another --out begins anew"
                    )
            if not self.is_whole:
                self.place, self._numbers = Place(**state["place"]), state["parts"]

    def begin(self, dtype: str, shard_bytes: int) -> None:
        """Opens the parts where the last commit left them."""
        size = array(TYPES[dtype]).itemsize
        for name in PARTS:
            self.parts[name] = Part(self.folder, name, TYPES[dtype], shard_bytes // size)
        with unexpected_values(self.folder / PROGRESS):
            self.back()

    def commit(self, place: Place) -> None:
        """From here on a stop loses nothing up to the place."""
        for part in self.parts.values():
            part.flush()
        self.place = place
        self._numbers = {name: part.numbers() for name, part in self.parts.items()}
        self._save()

    def back(self) -> None:
        """Cuts off what was written since the last commit."""
        for name, part in self.parts.items():
            part.restore(**self._numbers.get(name, {}))

    def finish(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Makes the corpus whole; returns what is written to corpus.json."""
        content = {
            "format": FORMAT,
            "dtype": next(x for x, code in TYPES.items() if code == self.parts["train"].type),
            "tokenizer": {
                "digest": tokenizer.digest,
                "vocab_size": tokenizer.vocab_size,
                "document_start": tokenizer.start,
            },
            **{name: part.finish() for name, part in self.parts.items()},
        }
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        left_out = {"broken": self.place.broken, "not_text": self.place.not_text}
        manifest = {"digest": digest, **content, "left_out": left_out, "settings": self.settings}
        write_text(self.folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")
        (self.folder / PROGRESS).unlink()
        return manifest

    def _save(self) -> None:
        state = {"settings": self.settings, "place": asdict(self.place), "parts": self._numbers}
        write_text(self.folder / PROGRESS, json.dumps(state) + "\n")


def _cut(path: Path, size: int) -> None:
    """Cuts a file to its size at the last commit; it has only grown since. Removes a file that did
    not exist then.
    """
    found = path.stat().st_size if path.exists() else 0
    if found < size:
        raise ValueError(
            f"expected {path} to have {size:,} bytes, as {PROGRESS} says, got {found:,}; another "
            "--out begins anew"
        )
    if size:
        os.truncate(path, size)
    else:
        path.unlink(missing_ok=True)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
