"""The text of a run: one text as bytes, or prepared corpora of tokens."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from gla_ext.train.data import Corpus, load_corpus
from gla_ext.train.tokens.batches import TokenBatches
from gla_ext.train.tokens.folder import Folder, Stream, is_prepared, open_folder
from gla_ext.train.tokens.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenCorpus:
    """Prepared corpora of one tokenizer.

    folders: the corpora.
    weights: the share of each in what is trained on, up to a factor; None: by their sizes.

    `gla_ext.train.data.Corpus` has the same methods and attributes for bytes.
    """

    folders: tuple[Folder, ...]
    weights: tuple[float, ...] | None = None

    def __str__(self) -> str:
        train = sum(len(folder.train) for folder in self.folders)
        held_out = sum(len(folder.held_out) for folder in self.folders)
        return (
            f"{self.name}: {self.documents:,} documents, {train:,} tokens to train on; "
            f"{held_out:,} tokens held out, {self.held_out_bytes:,} bytes"
        )

    @property
    def name(self) -> str:
        """The folders and weights."""
        paths = [str(folder.path) for folder in self.folders]
        if self.weights is None:
            return ", ".join(paths)
        return ", ".join(f"{x}:{weight:g}" for x, weight in zip(paths, self.weights, strict=True))

    @property
    def documents(self) -> int:
        """How many there are to train on."""
        return sum(len(folder.train.starts) for folder in self.folders)

    @property
    def fingerprint(self) -> str:
        """Hex digest of the corpora, their order and weights."""
        digests = [folder.digest for folder in self.folders]
        return hashlib.sha256(json.dumps([digests, self.weights]).encode()).hexdigest()

    @property
    def tokenizer(self) -> Tokenizer:
        return self.folders[0].tokenizer

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @functools.cached_property
    def document_start(self) -> int:
        """The token before each document."""
        return self.tokenizer.document_start

    @functools.cached_property
    def tokens_per_byte(self) -> float:
        """Of the text to train on, as it is mixed."""
        streams = [folder.train for folder in self.folders]
        weights = self.weights or [len(stream) for stream in streams]
        pairs = zip(streams, weights, strict=True)
        return sum(weights) / sum(w * stream.bytes / len(stream) for stream, w in pairs)

    @property
    def held_out_tokens_per_byte(self) -> float:
        """Without the tokens before documents, which are not evaluated."""
        parts = [folder.held_out for folder in self.folders]
        return sum(len(part) - len(part.starts) for part in parts) / self.held_out_bytes

    @property
    def held_out_bytes(self) -> int:
        """The size of the text held out."""
        return sum(folder.held_out.bytes for folder in self.folders)

    def batches(
        self, batch_size: int, seq_len: int, seed: int, segments: int, device: torch.device
    ) -> TokenBatches:
        """The windows to train on, with the arguments of `TokenBatches`."""
        streams = [folder.train for folder in self.folders]
        return TokenBatches(streams, self.weights, batch_size, seq_len, seed, segments, device)

    def held_out_tokens(self, device: torch.device) -> Stream:
        """The documents held out, of all corpora in a row; on the disk, whatever the device."""
        return Stream.chain([folder.held_out for folder in self.folders])

    def prompt(self, text: str) -> list[int]:
        """The tokens of a document's beginning."""
        text = text.encode(errors="surrogateescape").decode(errors="replace")
        return [self.document_start, *self.tokenizer.encode([text])[0]]

    def text_of(self, tokens: list[int]) -> str:
        """The text of a document's tokens."""
        return self.tokenizer.decode(tokens)

    def bits_of_others(self) -> dict[str, float]:
        """Bits per held-out byte of simple coders: none, as there are no bytes here."""
        return {}


def open_corpus(data: list[str] | None, processes: int = 1) -> Corpus | TokenCorpus:
    """What a run trains on.

    Args:
        data: as of the flag --data: None, the path of a text file or folder, or prepared corpora,
            each as FOLDER or FOLDER:WEIGHT.
        processes: how many train.

    Raises:
        OSError, ValueError: of `load_corpus` and `open_folder`; for corpora of several tokenizers;
            for weights of some corpora only; for fewer documents than processes.
    """
    if data is None:
        return load_corpus()
    paths, weights = zip(*map(_weighted, data), strict=True)
    if len(paths) == 1 and not is_prepared(paths[0]):
        return load_corpus(paths[0])
    if None in weights and set(weights) != {None}:
        raise ValueError(f"expected a weight for every folder of --data or for none, got {data}")
    folders = tuple(map(open_folder, paths))
    for folder in folders:
        if folder.tokenizer.digest != folders[0].tokenizer.digest:
            raise ValueError(
                f"expected {folder.path} to have the tokenizer of {folders[0].path}, got another "
                f"one ({folder.tokenizer.digest[:12]})"
            )
    corpus = TokenCorpus(folders, None if None in weights else weights)
    if corpus.documents < processes:
        raise ValueError(
            f"expected at least as many documents as processes, {processes}, got {corpus.documents}"
        )
    return corpus


def absolute(data: list[str]) -> list[str]:
    """--data with absolute paths."""
    pairs = [(os.path.realpath(path), weight) for path, weight in map(_weighted, data)]
    return [path if weight is None else f"{path}:{weight:g}" for path, weight in pairs]


def check_outside(out: Path, data: list[str]) -> None:
    """Raises ValueError if a run would write to a folder of text that it reads."""
    for path, _ in map(_weighted, data):
        inside = out.resolve().is_relative_to(path) and not is_prepared(path)
        # Hidden folders are not read.
        if inside and not any(x.startswith(".") for x in out.resolve().relative_to(path).parts):
            raise ValueError(f"expected --out to be outside of --data, got {out} in {path}")


def _weighted(text: str) -> tuple[str, float | None]:
    """The path and the weight in FOLDER:WEIGHT or FOLDER."""
    path, colon, weight = text.rpartition(":")
    if not colon or os.path.exists(text):
        return text, None
    try:
        return path, float(weight)
    except ValueError:
        return text, None
