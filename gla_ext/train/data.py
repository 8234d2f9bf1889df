"""Text as bytes: where it comes from, which files are held out, and how well simple coders (lzma,
order 0) compress it.

A corpus is a set of documents (files). Each is preceded by byte 0, which text does not contain.
So this byte tells the model that a document starts; predicting it does not count in the loss.
"""

from __future__ import annotations

import errno
import hashlib
import lzma
import os
import stat
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from gla_ext.train.tokens.tokenizer import Tokenizer, byte_tokenizer

DOCUMENT_START = 0
VOCAB_SIZE = 256
MAX_BYTES = 64 << 20
HELD_OUT_FRACTION = 0.03
MAX_HELD_OUT_BYTES = 128 << 10
_GLANCE = 64 << 10  # first bytes of a file too large to read, to decide if it is text

# Folders that are not in the default corpus: other packages, tests (some systems leave them out),
# and the codecs' generated tables. The tables are nearly equal, and would be in both parts.
_SKIPPED_FOLDERS = frozenset(
    ("__pycache__", "dist-packages", "encodings", "idle_test", "site-packages", "test", "tests")
)


@dataclass(frozen=True)
class Corpus:
    """Documents, split into two parts that share none of them.

    name: source of the documents, for people.
    train, held_out: names and contents, in the order of a hash of the name.
    left_out: bytes of further text that did not fit.

    `gla_ext.train.tokens.corpus.TokenCorpus` has the same methods and attributes but these.
    """

    name: str
    train: tuple[tuple[str, bytes], ...]
    held_out: tuple[tuple[str, bytes], ...]
    left_out: int = 0

    vocab_size = VOCAB_SIZE
    document_start = DOCUMENT_START
    tokens_per_byte = 1.0  # of the text to train on
    held_out_tokens_per_byte = 1.0

    def __str__(self) -> str:
        train, held_out = (sum(len(text) for _, text in x) for x in (self.train, self.held_out))
        left_out = f"{self.left_out:,} bytes of text beyond {MAX_BYTES >> 20} MiB"
        return (
            f"{self.name}: {len(self.train)} documents, {train:,} bytes to train on; "
            f"{len(self.held_out)} documents, {held_out:,} bytes held out"
        ) + f"\nLeft out: {left_out}" * (self.left_out > 0)

    @property
    def held_out_bytes(self) -> int:
        """The size of the text held out."""
        return sum(len(text) for _, text in self.held_out)

    @property
    def tokenizer(self) -> Tokenizer:
        """The bytes, as a tokenizer."""
        return byte_tokenizer()

    def batches(
        self, batch_size: int, seq_len: int, seed: int, segments: int, device: torch.device
    ) -> Batches:
        """The windows to train on, with the arguments of `Batches`."""
        return Batches(encode(self.train).to(device), batch_size, seq_len, seed, segments)

    def held_out_tokens(self, device: torch.device) -> Tensor:
        """The documents held out: see `encode`."""
        return encode(self.held_out).to(device)

    def prompt(self, text: str) -> list[int]:
        """The tokens of a document's beginning. Bytes of the command line that are not UTF-8 are
        surrogates in it.
        """
        return [DOCUMENT_START, *text.encode(errors="surrogateescape")]

    def text_of(self, tokens: list[int]) -> str:
        """The text of a document's tokens."""
        text = bytes(tokens).strip(bytes([DOCUMENT_START]))
        return text.decode(errors="replace")

    def bits_of_others(self) -> dict[str, float]:
        """Bits per held-out byte of simple coders, by their names."""
        return {
            "lzma": lzma_bits_per_byte(self.held_out),
            "order-0": order0_bits_per_byte(self.train, self.held_out),
        }

    @property
    def fingerprint(self) -> str:
        """Hex digest of all names and contents, in order, and of the split."""
        digest = hashlib.sha256()
        for part in (self.train, self.held_out):
            digest.update(b"part")
            for name, text in part:
                title = os.fsencode(name)  # need not be UTF-8
                digest.update(b"%d %d %b" % (len(title), len(text), title))
                digest.update(text)
        return digest.hexdigest()


def load_corpus(path: str | Path | None = None, max_bytes: int = MAX_BYTES) -> Corpus:
    """Reads a corpus and splits it; the same files always give the same split.

    Documents are taken in the order of a hash of their names, up to max_bytes. In that order, each
    document that still fits into min(3 % of the bytes, 128 KiB) is held out; if none does, the
    smallest is. A single document is instead split in two, and its end of that size is held out.

    Args:
        path: a text file, of which the first max_bytes are taken, or a folder, of which every text
            file that fits is taken, except hidden files and links. Default: the `*.py` files of
            this Python's standard library, without its tests and codec tables.
        max_bytes: upper limit of the corpus in bytes, and of its memory. Default: 64 MiB.

    Raises:
        OSError: if the path does not exist or cannot be read.
        ValueError: if it is neither a file nor a folder, if a file is not text, or if there is too
            little text to split (under 2 bytes).
    """
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        read = _read_folder(root, max_bytes, suffix=".py", skipped=_SKIPPED_FOLDERS)
        return _split(f"Python {sysconfig.get_python_version()} standard library", *read)
    path = Path(path)
    if path.is_dir():
        return _split(str(path), *_read_folder(path, max_bytes))
    text, left_out = read_text_file(path, max_bytes)
    return _split(str(path), [(path.name, text)], left_out)


def read_text_file(path: Path, max_bytes: int) -> tuple[bytes, int]:
    """The first max_bytes of a text file, and the number of its further bytes.

    Raises:
        OSError: if the file does not exist or cannot be read.
        ValueError: for a pipe, a device, or a file that is not text.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise ValueError(f"expected {path} to be a text file, got a link to itself") from error
    if not stat.S_ISREG(mode):  # reading a pipe would wait for its writer
        raise ValueError(f"expected {path} to be a text file, got a pipe, socket, folder or device")
    with path.open("rb") as file:
        text = file.read(max_bytes)
        left_out = max(0, os.fstat(file.fileno()).st_size - len(text))
    if not _is_text(text):
        raise ValueError(f"expected {path} to be text, got a file with NUL bytes")
    return text, left_out


def encode(documents: tuple[tuple[str, bytes], ...]) -> Tensor:
    """The documents in one row, each after a byte 0: uint8 `[sum of (1 + length)]`."""
    row = b"".join(bytes([DOCUMENT_START]) + text for _, text in documents)
    return torch.frombuffer(bytearray(row), dtype=torch.uint8)


class Batches:
    """Training windows as a pure function of (seed, step), which is all that a resumed run needs.

    Each epoch lays a grid of windows over the stream, shifted by a random offset, and visits the
    windows in random order. Offset and order follow from (seed, epoch).

    Args:
        stream: uint8 `[n]`, from `encode`.
        batch_size: windows per step.
        seq_len: T, tokens of a window that a step takes; each also gives the token after it.
        seed: any whole number.
        segments: steps per window, which has `segments * seq_len` tokens. Default: 1.

    Raises:
        ValueError: for a stream shorter than one window.
    """

    def __init__(
        self, stream: Tensor, batch_size: int, seq_len: int, seed: int, segments: int = 1
    ) -> None:
        self.stream, self.batch_size, self.seq_len, self.seed = stream, batch_size, seq_len, seed
        self.segments, self.window_len = segments, segments * seq_len
        self.windows = (len(stream) - 1) // self.window_len
        if self.windows < 1:
            length = "seq_len + 1" if segments == 1 else "segments * seq_len + 1"
            raise ValueError(
                f"Batches: expected a stream of at least {length} = {self.window_len + 1} tokens, "
                f"got {len(stream)}"
            )
        self._epoch, self._starts = -1, stream.new_empty(0, dtype=torch.int64)

    def __call__(self, step: int, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a step, or of some of its rows: int64 `[batch_size, seq_len]`."""
        first = step // self.segments * self.batch_size
        done = step % self.segments * self.seq_len
        windows = range(first, first + self.batch_size)[rows]
        starts = [self._start(window) + done for window in windows]
        batch = torch.stack([self.stream[s : s + self.seq_len + 1] for s in starts]).long()
        return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()

    def most_documents(self) -> int:
        """The largest number of documents in a row of a step."""
        starts = (self.stream == DOCUMENT_START).cumsum(0, dtype=torch.int32)
        inside = starts[self.seq_len - 1 :] - starts[: len(starts) - self.seq_len + 1]
        return 1 + int(inside.max())

    def _start(self, window: int) -> int:
        """The start in the stream of the window with this running number."""
        epoch, place = divmod(window, self.windows)
        if epoch != self._epoch:
            generator = torch.Generator("cpu").manual_seed(_seed(self.seed, epoch))
            slack = len(self.stream) - 1 - self.windows * self.window_len
            shift = torch.randint(slack + 1, (1,), generator=generator, device="cpu")
            order = torch.randperm(self.windows, generator=generator, device="cpu")
            self._epoch, self._starts = epoch, order * self.window_len + shift
        return int(self._starts[place])


def _seed(seed: int, epoch: int) -> int:
    """A seed of 32 bits from any seed and epoch, since a CPU generator uses only 32."""
    number = (seed << 20) + epoch
    if 0 <= number < 1 << 32:
        return number
    return int.from_bytes(hashlib.sha256(f"{seed} {epoch}".encode()).digest()[:4], "big")


def lzma_bits_per_byte(documents: tuple[tuple[str, bytes], ...]) -> float:
    """Size of all documents compressed by lzma at its strongest preset, in bits per byte."""
    text = b"".join(text for _, text in documents)
    return 8 * len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) / len(text)


def order0_bits_per_byte(
    train: tuple[tuple[str, bytes], ...], held_out: tuple[tuple[str, bytes], ...]
) -> float:
    """Cross entropy of the held-out bytes under the training bytes' frequencies, in bits per byte.

    One is added to the count of every byte value (Laplace), so that none costs infinity.
    """
    counts, tested = (
        sum(torch.bincount(encode((document,))[1:], minlength=256) for document in part)
        for part in (train, held_out)
    )
    log2_p = (counts + 1).double().log2() - (counts + 1).sum().double().log2()
    return float(-(tested * log2_p).sum() / tested.sum())


def _read_folder(
    root: Path, max_bytes: int, suffix: str = "", skipped: frozenset[str] = frozenset()
) -> tuple[list[tuple[str, bytes]], int]:
    """Names (relative to the folder) and contents of the text files in a folder; links are ignored.

    They are in the order of `_place`, with at most max_bytes in all. Also returns how many bytes of
    text were left out. For a file that does not fit, its first bytes decide if it is text.
    """

    def fail(error: OSError) -> NoReturn:
        raise error

    files = {}
    for folder, folders, names in os.walk(root, onerror=fail):
        folders[:] = [name for name in folders if name not in skipped and name[0] != "."]
        for name in names:
            file = Path(folder, name)
            if name[0] != "." and name.endswith(suffix) and stat.S_ISREG(file.lstat().st_mode):
                files[file.relative_to(root).as_posix()] = file
    documents, left, left_out = [], max_bytes, 0
    for title in sorted(files, key=_place):
        file = files[title]
        size = file.stat().st_size
        with file.open("rb") as opened:
            text = opened.read(size if size <= left else _GLANCE)
        if not text or not _is_text(text):
            continue
        if size <= left:
            documents.append((title, text))
            left -= len(text)
        else:
            left_out += size
    return documents, left_out


def _place(name: str) -> bytes:
    """The sort key of a document."""
    return hashlib.sha256(os.fsencode(name)).digest()


def _split(name: str, documents: list[tuple[str, bytes]], left_out: int = 0) -> Corpus:
    """Splits documents, in the order of `_place`, as documented for `load_corpus`."""
    if not documents:
        besides = " that fit" if left_out else ""
        raise ValueError(f"load_corpus: expected {name} to hold text files{besides}, got none")
    total = sum(len(text) for _, text in documents)
    if total < 2:
        raise ValueError(f"load_corpus: expected at least 2 bytes of text, got {total}")
    if len(documents) == 1:
        ((title, text),) = documents
        cut = total - _held_out_bytes(total)
        parts = (((f"{title}[:{cut}]", text[:cut]),), ((f"{title}[{cut}:]", text[cut:]),))
        return Corpus(name, *parts, left_out)
    held_out = _fitting(documents, _held_out_bytes(total))
    held_out = held_out or [min(documents, key=lambda document: len(document[1]))]
    names = {name for name, _ in held_out}
    train = [document for document in documents if document[0] not in names]
    return Corpus(name, tuple(train), tuple(held_out), left_out)


def _fitting(documents: list[tuple[str, bytes]], max_bytes: int) -> list[tuple[str, bytes]]:
    """The documents, taken in order, that fit into what is left of max_bytes."""
    taken, left = [], max_bytes
    for document in documents:
        if len(document[1]) <= left:
            taken.append(document)
            left -= len(document[1])
    return taken


def _held_out_bytes(total: int) -> int:
    """The number of bytes to hold out of `total`: 3 %, at least 1, at most 128 KiB."""
    return max(1, min(int(total * HELD_OUT_FRACTION), MAX_HELD_OUT_BYTES))


def _is_text(text: bytes) -> bool:
    return DOCUMENT_START not in text
