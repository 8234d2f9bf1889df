"""Training on text: bits a byte of held-out documents, and the loss by position in long ones."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from experiments import borrowed
from experiments.models import has_state, make_model, settings_of
from experiments.runs import Run
from gla_ext.losses import cross_entropy_loss
from gla_ext.train.data import DOCUMENT_START, Corpus
from gla_ext.train.tokens.corpus import TokenCorpus
from gla_ext.train.tokens.folder import Stream
from gla_ext.train.trainer import Trainer

LONGEST = 32 << 10  # bytes of a document that the loss by position is of
LONGEST_IN_TOKENS = 16 << 10
LONG_DOCUMENTS = 32


class LanguageTrainer(Trainer):
    """The project's trainer, with a model of any of the compared layers.

    Args:
        run: the run.
        corpus: the text, as bytes or tokens.
        device: where.
        cuda_graph: as the trainer's. Default: False.
    """

    evaluation_segment = LONGEST

    def __init__(
        self, run: Run, corpus: Corpus | TokenCorpus, device: torch.device, cuda_graph: bool = False
    ) -> None:
        self.run = run
        self.long, self.tokens_per_byte = long_documents(corpus)
        super().__init__(settings_of(run, device), corpus, device, cuda_graph=cuda_graph)

    def make_data(
        self, corpus: Corpus | TokenCorpus
    ) -> tuple[Callable[[int], tuple[Tensor, Tensor]], Tensor | Stream]:
        """As the trainer's, with rows that lie in a row where the run has such."""
        run = self.run
        sizes = (run.batch_size // run.consecutive, run.seq_len * run.consecutive, run.seed)
        batches = corpus.batches(*sizes, run.segments, self.device)

        def rows(step: int) -> tuple[Tensor, Tensor]:
            inputs, targets = batches(step)
            return inputs.reshape(-1, run.seq_len), targets.reshape(-1, run.seq_len)

        return rows, corpus.held_out_tokens(self.device)

    def make_model(self) -> nn.Module:
        """A model of the run's layer."""
        run, tokens = self.run, (self.corpus.vocab_size, self.corpus.document_start)
        if run.layer in borrowed.NAMES:
            sizes = (run.width, run.layers, self.corpus.vocab_size, run.seq_len)
            return borrowed.language_model(run.layer, *sizes)
        config = replace(self.settings.model_config(*tokens), max_position_embeddings=run.seq_len)
        return make_model(run.layer, config)

    def score(self, by_position: list[tuple[int, float]]) -> float:
        """Held-out bits a byte. Bytes are read as one sequence, or of a layer without a state the
        long documents' first ones, as many as it was trained on; tokens in windows.
        """
        if self.run.vocabulary:
            return bits_in_windows(self)
        if has_state(self.run.layer):
            return self.evaluate()
        return bits_of_first(by_position, self.run.seq_len)

    @property
    def length(self) -> int:
        """Bytes or tokens of each long document that are looked at."""
        return self.long.shape[1] - 1

    def bits_by_position(self) -> list[tuple[int, float]]:
        """First position and mean bits a byte of stretches of the long documents.

        A stretch is a 64th of them long; each document starts from no state and passes whole.
        """
        self.model.eval()
        size = max(1, self.length // 64)
        total = torch.zeros(self.length, dtype=torch.float64)
        for row in self.long:
            row = row.to(self.device).long()
            with torch.no_grad(), self._autocast():
                logits = self.model(row[None, :-1]).logits[0]
            total += cross_entropy_loss(logits, row[1:])[0].double().cpu()
        bits = total / len(self.long) / math.log(2) * self.tokens_per_byte
        return [(i * size, part.mean().item()) for i, part in enumerate(bits.split(size))]


def bits_of_first(by_position: list[tuple[int, float]], count: int) -> float:
    """Bits a byte of the long documents' first bytes.

    Args:
        by_position: as `bits_by_position` has it.
        count: how many bytes; those stretches count that end within, or else the first one.
    """
    size = by_position[1][0] if len(by_position) > 1 else count
    seen = [bits for start, bits in by_position if start + size <= count]
    return statistics.fmean(seen or [by_position[0][1]])


def bits_in_windows(trainer: Trainer) -> float:
    """Bits a byte of the held-out text, in windows of `seq_len` that each start from nothing; also
    appended to the trainer's evaluations. Tokens after the last whole window are left out.
    """
    trainer.model.eval()
    settings, corpus, held_out = trainer.settings, trainer.corpus, trainer.held_out
    T, start = settings.seq_len, corpus.document_start
    nats, count, windows = 0.0, 0, (len(held_out) - 1) // settings.seq_len
    for first in range(0, windows, settings.batch_size):
        last = min(first + settings.batch_size, windows)
        tokens = held_out[first * T : last * T + 1].to(trainer.device)
        inputs, targets = tokens[:-1].view(-1, T), tokens[1:]
        with torch.no_grad(), trainer._autocast():
            logits = trainer.model(inputs).logits.flatten(0, 1)
        nats += cross_entropy_loss(logits, targets, ignore_index=start)[0].sum().item()
        count += int((targets != start).sum())
    bits = nats / math.log(2) * corpus.held_out_tokens_per_byte / count
    trainer.evaluations.append((trainer.step, bits))
    return bits


def long_documents(corpus: Corpus | TokenCorpus) -> tuple[Tensor, float]:
    """The first bytes or tokens of held-out documents that are long, after the token that starts
    each, `[n, L + 1]`, and how many make a byte.

    L is LONGEST, or LONGEST_IN_TOKENS, or less where no document is so long: the length of the
    longest one.
    """
    if isinstance(corpus, TokenCorpus):
        held_out = corpus.held_out_tokens(torch.device("cpu"))
        bounds = [*held_out.starts.tolist(), len(held_out)]
        lengths = [end - start - 1 for start, end in itertools.pairwise(bounds)]
        length = min(LONGEST_IN_TOKENS, max(lengths))
        firsts = [at for at, long in zip(bounds, lengths, strict=False) if long >= length]
        rows = [held_out[at : at + length + 1] for at in firsts[:LONG_DOCUMENTS]]
        size = sum(len(corpus.text_of(row[1:].tolist()).encode()) for row in rows)
        return torch.stack(rows), len(rows) * length / size
    length = min(LONGEST, max(len(text) for _, text in corpus.held_out))
    rows = [text[:length] for _, text in corpus.held_out if len(text) >= length]
    rows = [bytes([DOCUMENT_START]) + text for text in rows[:LONG_DOCUMENTS]]
    return torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).view(len(rows), -1), 1.0
