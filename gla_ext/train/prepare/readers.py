"""Reads documents from the sources as a stream, in pieces, from any place on."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import hashlib
import io
import itertools
import json
import mmap
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, BinaryIO

from gla_ext.train.prepare.sources import (
    DATASET,
    JSON_LINES,
    PARQUET,
    Place,
    Source,
    needed,
    sources,
    suffix_of,
)
from gla_ext.train.tokens.folder import PARTS

MAX_LINE = 16 << 20  # bytes of a line of JSON
PIECE = 1 << 18  # characters of a document that are tokenized at once; at most twice as many
_BLOCK = 1 << 20  # bytes
_GLANCE = 64 << 10  # first bytes of a file, which tell whether it is text
_TAIL = 16 << 10  # characters at a piece's end in which a place to cut is sought
_ROWS, _BYTES = 64, 4 << 10  # most of a table that is read at once, but for one row
# Where a cut changes no tokens of a tokenizer like GPT-2's: before a blank between words, or else
# before the end of a line.
_CUTS = (re.compile(r"(?<=\w)(?= \w)"), re.compile(r"(?<=\w)(?=\n\S)"))


@dataclass(frozen=True)
class Piece:
    """A part of a document's text.

    text: never empty.
    begins: whether the document begins with it.
    part: that of the document, 'train' or 'held_out'.
    after: the place after it; None inside a document that can only be read from its beginning.
    read: bytes on the disk that are read so far, of all sources.
    """

    text: str
    begins: bool
    part: str
    after: Place | None
    read: int


@dataclass
class Reader:
    """Reads the documents of sources.

    paths: the sources, as the command line names them.
    place: how far they are read; changes.
    column: the key or column that holds a document's text.
    delimiter: what separates documents in a text file. None: a file is a document.
    skip_not_utf8: leave out text files that are not UTF-8.
    held_out: the share of documents that are held out, by a hash of their text (of the first piece
        of a long one).
    tell: takes a sentence about what is left out.
    held_out_paths: further sources, held out as a whole, also where they lie in the others.
    """

    paths: list[str]
    place: Place
    column: str
    delimiter: str | None
    skip_not_utf8: bool
    held_out: float
    tell: Callable[[str], None]
    held_out_paths: Sequence[str] = ()
    _is_apart: bool = field(default=False, init=False)  # whether the source is one of those

    def __iter__(self) -> Iterator[Piece]:
        """The pieces of all documents from the place on.

        Raises:
            OSError: for a file that cannot be read.
            ValueError: for a file that is not what its name says.
            ImportError: if the package that reads a file is missing.
        """
        kinds = {JSON_LINES: self._lines, PARQUET: self._parquet, DATASET: self._dataset}
        apart = self.held_out_paths
        every = itertools.chain(
            ((source, False) for source in sources(self.paths, but=apart)),
            ((source, True) for source in sources(apart)),
        )
        for source, is_apart in itertools.islice(every, self.place.source, None):
            self._is_apart = is_apart
            try:
                yield from kinds.get(source.kind, self._text)(source)
            except (EOFError, NotImplementedError, OSError, ValueError, zlib.error) as error:
                # pyarrow's errors are subclasses of ValueError and others.
                if getattr(error, "errno", None) or type(error) is ValueError:
                    raise
                raise ValueError(f"expected {source.path} to be whole, got {error}") from error
            self.place = self.place.after(source)

    def _text(self, source: Source) -> Iterator[Piece]:
        if self.place.at == 0 and not self._is_text(source):
            return
        part = self.place.inside
        begins = part is None
        with _opened(source.path, self.place.at) as (file, raw):
            decode = codecs.getincrementaldecoder("utf-8")().decode
            blocks = (decode(block) for block in _blocks(file))
            for text, ends in _documents(blocks, self.delimiter):
                part = self._part_of(text) if begins else part
                length = len(text.encode()) + len((self.delimiter or "").encode()) * ends
                self._move(self.place.at + length, inside=None if ends else part)
                if text:
                    yield Piece(text, begins, part, self.place, self.place.done + raw.tell())
                begins = ends

    def _is_text(self, source: Source) -> bool:
        """Whether a file is UTF-8, which is read once for that. If not, it is refused, or left out
        and told.
        """
        decoder, size = codecs.getincrementaldecoder("utf-8")(), 0
        with _opened(source.path, 0) as (file, _):
            for block in _blocks(file):
                if size == 0 and b"\0" in block[:_GLANCE]:
                    problem, refused = "NUL bytes", source.named
                    break
                pending = len(decoder.getstate()[0])
                try:
                    decoder.decode(block)
                except UnicodeDecodeError as error:
                    problem = f"another byte at {size - pending + error.start:,}"
                    refused = not self.skip_not_utf8
                    break
                size += len(block)
            else:
                if not decoder.getstate()[0]:
                    return True
                problem, refused = "half a character at its end", not self.skip_not_utf8
        sentence = f"expected {source.path} to be text in UTF-8, got {problem}"
        if refused:
            raise ValueError(f"{sentence}; --skip-not-utf8 leaves such files of a folder out")
        self.place = replace(self.place, not_text=self.place.not_text + 1)
        self.tell(f"{sentence}: left out")
        return False

    def _lines(self, source: Source) -> Iterator[Piece]:
        with _opened(source.path, self.place.at) as (file, raw):
            while line := file.readline(MAX_LINE + 1):
                length, too_long = len(line), len(line) > MAX_LINE and line[-1:] != b"\n"
                while too_long and (more := file.readline(_BLOCK)):
                    length += len(more)
                    if more.endswith(b"\n"):
                        break
                self._move(self.place.at + length, self.place.line + 1)
                if too_long:
                    self._leave_out(source, f"a line of over {MAX_LINE >> 20} MiB")
                elif line.lstrip()[:1] == b"[":
                    self._leave_out(source, "an array, where a line is to be one object of JSON")
                elif line.strip():
                    yield from self._document(source, self._text_of(line), raw.tell())

    def _text_of(self, line: bytes) -> str | None:
        """The document in a line of JSON, or None."""
        try:
            return json.loads(line)[self.column]
        except (LookupError, TypeError, ValueError, RecursionError):
            return None

    def _parquet(self, source: Source) -> Iterator[Piece]:
        parquet, arrow = (needed(x, source.path) for x in ("pyarrow.parquet", "pyarrow"))
        arrow.set_memory_pool(arrow.system_memory_pool())  # pyarrow's own keeps what was freed
        try:
            file = parquet.ParquetFile(source.path, pre_buffer=False, buffer_size=_BLOCK)
        except ValueError as error:  # pyarrow's errors are ValueErrors
            raise ValueError(f"expected {source.path} to be parquet, got {error}") from error
        self._check_column(source, file.schema_arrow.names)
        first = 0
        for group in range(file.num_row_groups):
            told = file.metadata.row_group(group)
            rows = told.num_rows
            if first + rows > self.place.at:
                at_once = max(1, min(_ROWS, _BYTES * rows // max(1, told.total_byte_size)))
                batches = file.iter_batches(
                    at_once, row_groups=[group], columns=[self.column], use_threads=False
                )
                columns = (batch.column(0) for batch in batches)
                yield from self._rows(source, columns, first, file.metadata.num_rows)
            first += rows

    def _dataset(self, source: Source) -> Iterator[Piece]:
        arrow, first = needed("pyarrow", source.path), 0
        try:
            dataset = needed("datasets", source.path).load_from_disk(source.path)
        except (ImportError, OSError):
            raise
        except Exception as error:  # datasets raises nothing narrower
            raise ValueError(f"expected {source.path} to be a dataset, got {error!r}") from error
        self._check_column(source, dataset.column_names)
        for cached in dataset.cache_files:
            with open(cached["filename"], "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            for batch in arrow.ipc.open_stream(arrow.py_buffer(mapped)):
                column = batch.column(self.column)
                for start in range(0, len(column), 4):
                    part = column[start : start + 4]
                    if first + len(part) > self.place.at:
                        _check_offsets(part, arrow)
                        yield from self._rows(source, [part], first, len(dataset))
                        mapped.madvise(mmap.MADV_DONTNEED)  # what is read would stay in memory
                    first += len(part)

    def _check_column(self, source: Source, names: list[str]) -> None:
        if self.column not in names:
            raise ValueError(
                f"expected {source.path} to have a column {self.column!r}, got "
                f"{', '.join(names)}; --column names another"
            )

    def _rows(
        self, source: Source, columns: Iterable[Any], first: int, count: int
    ) -> Iterator[Piece]:
        """The documents of a table's column from the place on.

        columns: pyarrow's arrays of it, in order. first: their first row. count: rows of the table.
        """
        for number, value in enumerate(itertools.chain.from_iterable(columns), first + 1):
            if number <= self.place.at:
                continue
            self._move(number, number)
            try:
                text = value.as_py()
            except UnicodeDecodeError:
                text = None
            yield from self._document(source, text, source.size * number // max(1, count))

    def _document(self, source: Source, text: Any, read: int) -> Iterator[Piece]:
        """The pieces of a document that is in memory; a broken one is left out."""
        try:
            text.encode()
        except (AttributeError, UnicodeEncodeError):  # no string; half of a surrogate pair
            self._leave_out(source, f"no text under {self.column!r}")
            return
        part = None
        for piece, ends in cut(text) if text else ():
            begins, part = part is None, part or self._part_of(piece)
            after = self.place if ends else None
            yield Piece(piece, begins, part, after, self.place.done + read)

    def _part_of(self, text: str) -> str:
        """The part of a document that begins with a text."""
        place = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
        return PARTS[self._is_apart or place < self.held_out * 2**64]

    def _move(self, at: int, line: int = 0, inside: str | None = None) -> None:
        self.place = replace(self.place, at=at, line=line, inside=inside)

    def _leave_out(self, source: Source, problem: str) -> None:
        self.place = replace(self.place, broken=self.place.broken + 1)
        self.tell(f"{source.path}:{self.place.line}: {problem}: left out")


def cut(text: str) -> Iterator[tuple[str, bool]]:
    """A text in pieces of at most 2 * PIECE characters, cut between words, and whether it ends with
    a piece.
    """
    start = 0
    while len(text) - start > 2 * PIECE:
        end = _cut_before(text, start + PIECE)
        yield text[start:end], False
        start = end
    yield text[start:], True


def _cut_before(text: str, end: int) -> int:
    for place in _CUTS:
        found = [match.start() for match in place.finditer(text, end - _TAIL, end)]
        if found:
            return found[-1]
    return end


def _documents(blocks: Iterable[str], delimiter: str | None) -> Iterator[tuple[str, bool]]:
    """Pieces of the documents in a text, some empty, and whether a document ends with it."""
    rest = ""
    for block in blocks:
        rest += block
        if delimiter:
            *whole, rest = rest.split(delimiter)
            for text in whole:
                yield from cut(text)
        *pieces, (rest, _) = cut(rest)
        yield from pieces
    yield rest, True


def _check_offsets(column: Any, arrow: ModuleType) -> None:
    """Raises pyarrow's error if texts would lie outside of a column, which pyarrow does not look at
    in a file that it maps. Text that is not UTF-8 is left out later.
    """
    as_bytes = {arrow.string(): arrow.binary(), arrow.large_string(): arrow.large_binary()}
    column.view(as_bytes.get(column.type, column.type)).validate(full=True)


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    return iter(lambda: file.read(_BLOCK), b"")


@contextlib.contextmanager
def _opened(path: str, start: int) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """A file at an offset in its uncompressed bytes, and the file on the disk."""
    _, compression = suffix_of(path)
    with open(path, "rb") as raw, contextlib.ExitStack() as stack:
        if not compression:
            raw.seek(start)
            yield raw, raw
            return
        if compression == ".gz":
            file = stack.enter_context(gzip.open(raw))
        else:
            arrow = needed("pyarrow", path)
            stream = arrow.CompressedInputStream(arrow.PythonFile(raw, "r"), "zstd")
            file = stack.enter_context(io.BufferedReader(stream, _BLOCK))
        while start > 0 and (skipped := file.read(min(start, _BLOCK))):
            start -= len(skipped)
        yield file, raw
