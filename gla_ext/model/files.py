"""Files that are complete at any moment, the removal of partial files after a kill, and JSON."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Gives a file to write, which then replaces `path`, with its bytes flushed to the disk.

    The file is in a temporary folder next to `path`, as safetensors first writes a file of a random
    name. If the process is killed, only that folder remains, and the next writer of `path` removes
    it. After an error it is removed too, and `path` is unchanged. There may be only one writer at a
    time.

    Args:
        path: the file to make or replace; its folder exists.
    """
    path = Path(path)
    remove_leftovers(path)
    folder = _writing_folder(path)
    folder.mkdir()
    try:
        file = folder / path.name
        file.touch()
        mode = file.stat().st_mode
        yield file
        file.chmod(mode)  # safetensors makes its file readable only by the owner
        _sync(file)
        os.replace(file, path)
    finally:
        shutil.rmtree(folder)
    _sync(path.parent)


def write_text(path: str | Path, text: str) -> None:
    """Writes text as UTF-8, through `replacing`."""
    with replacing(path) as file:
        file.write_text(text, encoding="utf-8")


def read_json(path: str | Path, owner: str = "") -> dict[str, Any]:
    """The object in a JSON file; raises OSError, and the errors of `json_object`."""
    return json_object(Path(path).read_bytes(), path, owner)


def json_object(text: str | bytes, path: str | Path, owner: str = "") -> dict[str, Any]:
    """The object in a text from the file `path`; raises ValueError, with a sentence that the owner
    begins, if it is none.
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{owner}expected {path} to be JSON, got {error}") from error
    if not isinstance(values, dict):
        kind = type(values).__name__
        raise ValueError(f"{owner}expected {path} to be a JSON object, got {kind}")
    return values


@contextlib.contextmanager
def unexpected_values(path: str | Path) -> Iterator[None]:
    """Inside, what fails because of the values in a file raises ValueError with its path."""
    try:
        yield
    except (AttributeError, LookupError, OverflowError, RecursionError, TypeError) as error:
        raise ValueError(
            f"expected {path} to be whole, got {type(error).__name__} for its values: {error}"
        ) from error


def remove_leftovers(path: str | Path) -> None:
    """Removes a partial file that a killed writer of `path` left; there must be no other writer."""
    folder = _writing_folder(Path(path))
    if folder.exists():
        shutil.rmtree(folder)


def _writing_folder(path: Path) -> Path:
    return path.with_name(f".{path.name}.gla_ext-writing")


def _sync(path: Path) -> None:
    """Waits until a file's bytes, or a folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
