"""Files that are complete at any moment, and the removal of partial files after a kill."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


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
