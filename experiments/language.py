"""Training on text: bits a byte of held-out documents, and the loss by position in long ones."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments import borrowed
from experiments.models import has_state, make_model, settings_of
from experiments.runs import Run
from gla_ext.train.data import DOCUMENT_START, Corpus
from gla_ext.train.trainer import Trainer

LONGEST = 32 << 10  # bytes of a document that the loss by position is of
LONG_DOCUMENTS = 32


class LanguageTrainer(Trainer):
    """The project's trainer, with a model of any of the compared layers.

    Args:
        run: the run.
        corpus: the text.
        device: where.
        cuda_graph: as the trainer's. Default: False.
    """

    evaluation_segment = LONGEST

    def __init__(
        self, run: Run, corpus: Corpus, device: torch.device, cuda_graph: bool = False
    ) -> None:
        self.run = run
        self.long = long_documents(corpus)
        super().__init__(settings_of(run, device), corpus, device, cuda_graph=cuda_graph)

    def make_model(self) -> nn.Module:
        """A model of the run's layer."""
        run, tokens = self.run, (self.corpus.vocab_size, self.corpus.document_start)
        if run.layer in borrowed.NAMES:
            sizes = (run.width, run.layers, self.corpus.vocab_size, run.seq_len)
            return borrowed.language_model(run.layer, *sizes)
        config = replace(self.settings.model_config(*tokens), max_position_embeddings=run.seq_len)
        return make_model(run.layer, config)

    def score(self, by_position: list[tuple[int, float]]) -> float:
        """Held-out bits a byte; of a layer without a state, of the long documents' first tokens, as
        many as it was trained on.
        """
        if has_state(self.run.layer):
            return self.evaluate()
        return bits_of_first(by_position, self.run.seq_len)

    @property
    def length(self) -> int:
        """Bytes of each long document that are looked at."""
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
            nats = F.cross_entropy(logits.float(), row[1:], reduction="none")
            total += nats.double().cpu()
        bits = total / len(self.long) / math.log(2)
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


def long_documents(corpus: Corpus) -> Tensor:
    """The first bytes of held-out documents that are long, byte 0 before each: uint8 `[n, L + 1]`.

    L is LONGEST, or less where no document is so long: the length of the longest one.
    """
    length = min(LONGEST, max(len(text) for _, text in corpus.held_out))
    rows = [text[:length] for _, text in corpus.held_out if len(text) >= length]
    rows = [bytes([DOCUMENT_START]) + text for text in rows[:LONG_DOCUMENTS]]
    return torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).view(len(rows), -1)
