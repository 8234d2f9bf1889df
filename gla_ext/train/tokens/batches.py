"""Training windows of several corpora, mixed by weight."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from gla_ext.train.tokens.folder import Stream

PERIOD = 10_000  # windows, of which every corpus has its share


class Mixture:
    """From which corpus each window comes: shares are met in any stretch of windows, up to one
    window a corpus.

    Args:
        weights: one for each corpus, positive.

    Raises:
        ValueError: for a weight that is not, or so small that it gives no window in PERIOD.
    """

    def __init__(self, weights: list[float]) -> None:
        for weight in weights:
            if not 0 < weight < math.inf:
                raise ValueError(f"expected weights of --data to be positive, got {weight}")
        total = math.fsum(weights)
        self.counts = [round(weight / total * PERIOD) for weight in weights]
        self.counts[self.counts.index(max(self.counts))] += PERIOD - sum(self.counts)
        if not all(self.counts):
            raise ValueError(
                f"expected every weight of --data to be at least 1 / {PERIOD} of all, got "
                + ", ".join(f"{weight:g}" for weight in weights)
            )
        places = (
            ((number + 0.5) / count, corpus, number)
            for corpus, count in enumerate(self.counts)
            for number in range(count)
        )
        self._places = [(corpus, number) for _, corpus, number in sorted(places)]

    def __call__(self, window: int) -> tuple[int, int]:
        """The corpus of a window, and the window's number among those of this corpus."""
        period, place = divmod(window, PERIOD)
        corpus, number = self._places[place]
        return corpus, period * self.counts[corpus] + number


class TokenBatches:
    """Training windows as a pure function of (seed, step), which is all that a resumed run needs,
    whatever its number of processes.

    Each pass over a corpus lays a grid of windows over its tokens, shifted by a random offset, and
    visits them in random order. Both follow from the seed, the corpus's number and the pass.

    Args:
        streams: the tokens of each corpus.
        weights: the share of windows from each, as of `Mixture`. Default: their numbers of windows.
        batch_size: windows per step.
        seq_len: T, tokens of a window that a step takes; each also gives the token after it.
        seed: any whole number.
        segments: steps per window, which has `segments * seq_len` tokens.
        device: of the batches.

    Raises:
        ValueError: for a corpus shorter than one window, and those of `Mixture`.
    """

    def __init__(
        self,
        streams: list[Stream],
        weights: list[float] | None,
        batch_size: int,
        seq_len: int,
        seed: int,
        segments: int,
        device: torch.device,
    ) -> None:
        self.streams, self.batch_size, self.seq_len, self.seed = streams, batch_size, seq_len, seed
        self.segments, self.window_len, self.device = segments, segments * seq_len, device
        self.windows = [(len(stream) - 1) // self.window_len for stream in streams]
        if min(self.windows) < 1:
            raise ValueError(
                f"expected every corpus of --data to have at least {self.window_len + 1:,} tokens, "
                f"a window and the token after it, got {min(map(len, streams)):,}"
            )
        self.mixture = Mixture(weights or self.windows)

    def __call__(self, step: int, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a step, or of some of its rows: int64 `[batch_size, seq_len]`."""
        first = step // self.segments * self.batch_size
        done = step % self.segments * self.seq_len
        read = []
        for window in range(first, first + self.batch_size)[rows]:
            corpus, number = self.mixture(window)
            start = self._start(corpus, number) + done
            read.append(self.streams[corpus][start : start + self.seq_len + 1])
        batch = torch.stack(read)
        if self.device.type == "cuda":
            batch = batch.pin_memory()  # so that the copy does not wait for the GPU
        batch = batch.to(self.device, non_blocking=True)
        return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()

    def most_documents(self) -> int:
        """The largest number of documents in a row of a step."""
        return max(stream.most_documents(self.seq_len) for stream in self.streams)

    def _start(self, corpus: int, number: int) -> int:
        """Where a window begins in the tokens of its corpus."""
        count = self.windows[corpus]
        epoch, place = divmod(number, count)
        key = hashlib.sha256(f"{self.seed} {corpus} {epoch}".encode()).digest()
        slack = len(self.streams[corpus]) - 1 - count * self.window_len
        shift = int.from_bytes(key[:8], "big") % (slack + 1)
        return shuffled(place, count, key) * self.window_len + shift


def shuffled(number: int, count: int, key: bytes) -> int:
    """A number's image under a random permutation of the numbers below count, without a table.

    A Feistel network permutes the numbers of an even number of bits; numbers that leave the range
    pass again until they are in it (Black and Rogaway, 2002).
    """
    bits = max(1, ((count - 1).bit_length() + 1) // 2)
    while True:
        left, right = number >> bits, number & (1 << bits) - 1
        for turn in range(4):
            mixed = hashlib.blake2b(b"%d %d" % (turn, right), digest_size=8, key=key).digest()
            mixed = int.from_bytes(mixed, "big") & (1 << bits) - 1
            left, right = right, left ^ mixed
        number = left << bits | right
        if number < count:
            return number
