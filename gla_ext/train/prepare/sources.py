"""Sources of text: the files that the command line names, in an order that is always the same."""

from __future__ import annotations

import hashlib
import importlib
import os
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from gla_ext.model.files import read_json, unexpected_values

JSON_LINES, PARQUET, DATASET, TEXT = "json lines", "parquet", "dataset", "text"
_LINES = (".jsonl", ".ndjson", ".json")
_COMPRESSED = (".gz", ".zst")


@dataclass(frozen=True)
class Source:
    """A file, or the folder of a dataset that Hugging Face's `datasets` saved.

    path: where it is.
    kind: how it is read, of the constants above.
    size: bytes on the disk.
    named: whether the command line names it, rather than a folder around it.
    """

    path: str
    kind: str
    size: int
    named: bool


@dataclass(frozen=True)
class Place:
    """How far the sources are read; all that reading needs to go on from there.

    source: number of the source.
    at: where to go on in it: an offset in text, uncompressed, or the number of a line or a row.
    line: number of the last line read, from 1.
    inside: the part of a document of which only the beginning is read; else None.
    broken: lines and rows left out so far. not_text: files left out so far.
    done: bytes of the earlier sources.
    """

    source: int = 0
    at: int = 0
    line: int = 0
    inside: str | None = None
    broken: int = 0
    not_text: int = 0
    done: int = 0

    def after(self, source: Source) -> Place:
        """The beginning of the next source."""
        done = self.done + source.size
        return replace(self, source=self.source + 1, at=0, line=0, inside=None, done=done)


def sources(paths: list[str], but: Collection[str] = ()) -> Iterator[Source]:
    """The sources at paths, folders in the order of their files' names, without hidden files and
    links.

    Args:
        paths: files and folders, as `os.path.realpath` has them.
        but: paths whose sources are left out. Default: none.

    Raises:
        OSError: if a path is not there, or a folder cannot be read.
        ValueError: for a pipe or a device.
    """
    but = frozenset(but)
    for source in _at(paths):
        if not but or but.isdisjoint([source.path, *map(str, Path(source.path).parents)]):
            yield source


def _at(paths: list[str]) -> Iterator[Source]:
    for path in paths:
        if not os.path.isdir(path):
            yield _file(path, named=True)
        elif (Path(path) / "dataset_dict.json").exists():
            told = Path(path) / "dataset_dict.json"
            with unexpected_values(told):
                names = (os.path.join(path, split) for split in read_json(told)["splits"])
                raise ValueError(
                    f"expected one dataset in {path}, got several splits; name one: "
                    + " or ".join(names)
                )
        else:
            yield from _folder(path, named=True)


def measure(paths: list[str], but: Collection[str] = ()) -> tuple[str, int, int]:
    """A digest of the names, sizes and times of the last change of `sources`; how many they are,
    and their bytes on the disk.
    """
    digest, count, size = hashlib.sha256(), 0, 0
    for count, source in enumerate(sources(paths, but), 1):  # noqa: B007
        changed = os.stat(source.path).st_mtime_ns
        digest.update(os.fsencode(f"{source.path}\0{source.size}\0{changed}\n"))
        size += source.size
    return digest.hexdigest(), count, size


def needed(package: str, path: str) -> ModuleType:
    """The package that reads a source.

    Raises:
        ImportError: if it is missing; says how to get it.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(
            f"expected {package.split('.')[0]} to be installed, which reads {path}; in a clone "
            "pip install --no-build-isolation -e '.[data]' brings it"
        ) from error


def suffix_of(path: str) -> tuple[str, str]:
    """A file's suffix and that of its compression, each '' if there is none: ('.txt', '.gz') for
    a.txt.gz, ('.txt', '') for a.txt.
    """
    root, compression = os.path.splitext(path.lower())
    if compression not in _COMPRESSED:
        root, compression = path.lower(), ""
    return os.path.splitext(root)[1], compression


def _file(path: str, named: bool) -> Source:
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):  # reading a pipe would wait for its writer
        raise ValueError(f"expected {path} to be a file or a folder, got a pipe, socket or device")
    suffix, _ = suffix_of(path)
    kind = JSON_LINES if suffix in _LINES else PARQUET if suffix == ".parquet" else TEXT
    return Source(path, kind, found.st_size, named)


def _folder(path: str, named: bool = False) -> Iterator[Source]:
    if all(os.path.exists(os.path.join(path, x)) for x in ("dataset_info.json", "state.json")):
        size = sum(x.stat().st_size for x in os.scandir(path) if x.name.endswith(".arrow"))
        yield Source(path, DATASET, size, named)
        return
    for name in sorted(os.listdir(path)):
        inner = os.path.join(path, name)
        mode = os.lstat(inner).st_mode
        if name.startswith("."):
            continue
        if stat.S_ISDIR(mode):
            yield from _folder(inner)
        elif stat.S_ISREG(mode):
            yield _file(inner, named=False)
