"""Fills a corpus: this process reads and writes in order, others make tokens of text."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TextIO

from gla_ext.train.loop import StopSignals
from gla_ext.train.prepare.readers import PIECE, Piece, Reader
from gla_ext.train.prepare.writer import Encoded, Writer
from gla_ext.train.tokens.tokenizer import Tokenizer

COMMIT_SECONDS = 10.0


def fill(
    writer: Writer,
    reader: Reader,
    tokenizer: Tokenizer,
    workers: int,
    size: int,
    signals: StopSignals,
    lock: TextIO,
) -> None:
    """Writes all that is left of the sources, and commits.

    Args:
        writer: after `begin`.
        reader: at the writer's place.
        tokenizer: makes tokens.
        workers: processes that do so; the result does not depend on it.
        size: bytes of all sources on the disk.
        signals: are looked at from batch to batch.
        lock: of the folder, which only this process holds.

    Raises:
        Interrupted: when a signal came; all up to some document is committed.
        OSError, ValueError, ImportError: of reading and writing; the corpus is as of the last
            commit.
    """
    from tqdm import tqdm

    code, place, committed = writer.parts["train"].type, writer.place, time.monotonic()
    waiting, first = deque(), sum(part.tokens for part in writer.parts.values())
    interval = 0.5 if sys.stderr.isatty() else 10.0
    start = time.monotonic()
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context("fork"), _start, (tokenizer, code, lock)
    )
    with (
        pool,
        tqdm(total=size, desc="prepare", unit="B", unit_scale=True, mininterval=interval) as bar,
    ):

        def write_one() -> None:
            nonlocal place, committed
            last, future = waiting.popleft()
            for name, new in future.result().items():
                writer.parts[name].append(new)
            place = last.after
            now = time.monotonic()
            if place is not None and now - committed >= COMMIT_SECONDS:
                writer.commit(place)
                committed = now
            tokens = sum(part.tokens for part in writer.parts.values()) - first
            bar.set_postfix_str(f"{tokens / (now - start):,.0f} tokens/s", refresh=False)
            bar.update(last.read - bar.n)

        try:
            for batch in _batches(reader):
                sent = [(piece.text, piece.begins, piece.part) for piece in batch]
                waiting.append((batch[-1], pool.submit(_encode, sent)))
                if len(waiting) > 2 * workers:
                    write_one()
                if signals.stopped():
                    if place is not None:
                        writer.commit(place)
                    signals.check()
            while waiting:
                write_one()
            writer.commit(reader.place)
            bar.update(size - bar.n)
        except BrokenProcessPool as error:
            raise ValueError(
                "expected every process to live on, got one that was killed, perhaps for its "
                "memory; the same command goes on, with fewer --workers"
            ) from error


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces in batches of about PIECE characters."""
    batch, count = [], 0
    for piece in pieces:
        batch.append(piece)
        count += len(piece.text)
        if count >= PIECE:
            yield batch
            batch, count = [], 0
    if batch:
        yield batch


_tokenizer: Tokenizer
_type: str


def _start(tokenizer: Tokenizer, code: str, lock: TextIO) -> None:
    """Begins a process that makes tokens; it ends with the one that began it."""
    global _tokenizer, _type
    _tokenizer, _type = tokenizer, code
    lock.close()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal, for the first process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def end() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


def _encode(pieces: list[tuple[str, bool, str]]) -> dict[str, Encoded]:
    """The tokens of a batch, by part; pieces as texts, whether documents begin, and their parts."""
    rows, encoded = _tokenizer.encode([text for text, _, _ in pieces]), {}
    start = _tokenizer.document_start
    for name in {part for _, _, part in pieces}:
        new = Encoded(array(_type), [], 0)
        for (text, begins, part), row in zip(pieces, rows, strict=True):
            if part != name:
                continue
            if begins:
                new.starts.append(len(new.tokens))
                new.tokens.append(start)
            new.tokens.extend(row)
            new.bytes += len(text.encode())
        encoded[name] = new
    return encoded
