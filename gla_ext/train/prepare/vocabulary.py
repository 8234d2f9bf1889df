"""Trains a tokenizer on a sample of the text: byte-level BPE, as GPT-2's."""

from __future__ import annotations

import ctypes
import hashlib
import sys
from collections.abc import Callable, Iterator

from gla_ext.train.prepare.readers import Reader
from gla_ext.train.tokens.tokenizer import DOCUMENT_START_TOKEN, Tokenizer, finished

SAMPLE = 24 << 20  # characters


def train_tokenizer(
    vocab_size: int, reader: Reader, size: int, check: Callable[[], None]
) -> Tokenizer:
    """Makes a tokenizer of at most vocab_size tokens; fewer where the text gives no more.

    Args:
        vocab_size: at least 257: the bytes, and the token that starts a document.
        reader: at the beginning of the sources; all are read, what is held out is not taken.
        size: bytes of the sources on the disk. Of more than SAMPLE, a share of the pieces is taken,
            chosen by a hash of their text.
        check: is called from piece to piece, and may raise.
    """
    from tokenizers import Tokenizer as Model
    from tokenizers import models, pre_tokenizers, trainers

    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[DOCUMENT_START_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model = Model(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.train_from_iterator(_sample(reader, size, check), trainer)
    made = finished(model)
    del model, trainer
    ctypes.CDLL(None).malloc_trim(0)  # what the trainer took, the processes to come would have too
    return made


def _sample(reader: Reader, size: int, check: Callable[[], None]) -> Iterator[str]:
    """Pieces to train on, about SAMPLE characters in all."""
    from tqdm import tqdm

    interval = 0.5 if sys.stderr.isatty() else 10.0
    taken = 0
    with tqdm(total=size, desc="tokenizer", unit="B", unit_scale=True, mininterval=interval) as bar:
        for piece in reader:
            check()
            bar.update(piece.read - bar.n)
            place = int.from_bytes(hashlib.sha256(piece.text.encode()).digest()[8:16], "big")
            if piece.part == "train" and place * size < SAMPLE * 2**64 and taken < SAMPLE:
                taken += len(piece.text)
                yield piece.text
