"""Small corpora, prepared, and what is in them."""

from pathlib import Path

from gla_ext.train.prepare import command
from gla_ext.train.tokens.folder import open_folder

WORDS = ("def", "return", "café", "日本", "x", "+", "\n", "Ā", "<|endoftext|>", "\U0001f600")


def documents(count: int, seed: int = 0) -> list[str]:
    """Texts of some words, of different lengths; one is much longer than the others."""
    lengths = [3 + 7 * (seed + i) % 40 for i in range(count)]
    lengths[count // 2] = 600
    return [
        f"document {seed} {i} " + " ".join(WORDS[(i * j + j * j) % 10] for j in range(length))
        for i, length in enumerate(lengths)
    ]


def prepare(*args, code: int = 0) -> None:
    """The command, which ends with this status."""
    assert command.main([str(arg) for arg in args]) == code


def texts_of(folder: Path, part: str = "train") -> list[str]:
    """The documents of a part of a prepared corpus of bytes, in order."""
    stream = getattr(open_folder(folder), part)
    ends = [*stream.starts[1:], len(stream)]
    rows = [stream[start:end].tolist() for start, end in zip(stream.starts, ends, strict=True)]
    assert all(row[0] == 0 for row in rows)
    return [bytes(row[1:]).decode() for row in rows]
