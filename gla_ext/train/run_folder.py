"""The folder of a training run: locked by one process, cleared of leftovers, and not overwritten by
accident.

It holds a run's files: checkpoint.safetensors, and at the end the model and the files in RESULTS.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from gla_ext.model.checkpoint import CONFIG_FILE, MODEL_FILE, read_metadata
from gla_ext.model.custom_code import CUSTOM_CODE_FILE
from gla_ext.model.files import remove_leftovers

CHECKPOINT = "checkpoint.safetensors"
METRICS, CURVE, SAMPLE, LOG = "metrics.json", "loss.png", "sample.txt", "log.jsonl"
TOKENIZER = ("tokenizer_config.json", "tokenizer.json")
CARD = "README.md"
RESULTS = (MODEL_FILE, CONFIG_FILE, CUSTOM_CODE_FILE, *TOKENIZER, CARD, METRICS, CURVE, SAMPLE)
LOCK = ".gla_ext-train.lock"
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


@contextlib.contextmanager
def held(folder: Path) -> Iterator[TextIO]:
    """Creates the folder and locks it against other runs. Removes incomplete files of a killed run.

    The lock is on a file in the folder. The context yields this file and does not remove it. The
    kernel releases the lock when the process has ended, in whatever way, together with all
    processes that it forked and that did not close the file.

    Raises:
        NotADirectoryError: if something other than a folder is there.
        ValueError: if another process holds the folder.
    """
    if os.path.lexists(folder) and not folder.is_dir():
        raise NotADirectoryError(f"expected --out to be a folder, got {folder}, which is none")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            raise ValueError(
                f"expected {folder} to be free, got another run in it ({lock.read().strip()}); "
                "wait for its end, stop it, or choose another --out"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            print(
                f"gla_ext.train: {folder} is on a file system without locks; start no other run "
                "there meanwhile",
                file=sys.stderr,
            )
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        lock.flush()
        for name in (CHECKPOINT, LOG, *RESULTS):
            remove_leftovers(folder / name)
        yield lock


def folders(out: Path) -> list[Path]:
    """The folders of torch's distributed checkpoints in a run's folder, whole or not."""
    return sorted(out.glob("checkpoint-*.dcp"))


def remove_folders(out: Path, but: str | None) -> None:
    """Removes these folders, partial or old, except `but`, the one that the checkpoint file names,
    and those that earlier ones name.
    """
    named = {read_metadata(path).get("sharded") for path in earlier(out)}
    for folder in folders(out):
        if folder.name not in named | {but}:
            shutil.rmtree(folder)


def earlier(out: Path) -> list[Path]:
    """The checkpoints before the last one that are kept, in order."""
    return sorted(out.glob("checkpoint-*.safetensors"), key=lambda path: (len(path.name), path))


def keep_earlier(out: Path, count: int) -> None:
    """Keeps the checkpoint that the next one replaces, and of all those the last `count`; that of
    step 0 is not kept.
    """
    path = out / CHECKPOINT
    step = read_metadata(path)["step"] if count and path.exists() else 0
    if step:
        kept = out / f"checkpoint-{step}.safetensors"
        kept.unlink(missing_ok=True)
        os.link(path, kept)
    every = earlier(out)
    for path in every[: max(0, len(every) - count)]:
        path.unlink()


def check_nothing_is_lost(folder: Path, resume: bool, overwrite: bool) -> None:
    """Raises ValueError if a run there would overwrite another run's files without being told to.

    A checkpoint of step 0 may be overwritten.
    """
    checkpoint = folder / CHECKPOINT
    if overwrite or (resume and checkpoint.exists()):
        return
    there = [name for name in RESULTS if (folder / name).exists()]
    if checkpoint.exists():
        step = _step(checkpoint)
        if step != 0:
            there.append(CHECKPOINT if step is None else f"{CHECKPOINT} of step {step}")
    if there:
        go_on = "--resume goes on with it, up to more --steps; " if checkpoint.exists() else ""
        raise ValueError(
            f"expected {folder} to hold no earlier run, got {', '.join(there)}; {go_on}"
            "another folder keeps it, --overwrite writes over it"
        )


def _step(checkpoint: Path) -> int | None:
    """The step of a checkpoint; None if it cannot be read."""
    try:
        return read_metadata(checkpoint).get("step")
    except ValueError:
        return None
