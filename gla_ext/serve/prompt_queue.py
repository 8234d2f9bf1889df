"""Which pieces of prompts pass the model next."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from gla_ext.decode._prompts import CHUNK
from gla_ext.serve.batch import Batch
from gla_ext.serve.generation import Generation
from gla_ext.serve.metrics import Metrics
from gla_ext.serve.prefix import PrefixCache
from gla_ext.serve.prompts import NONE, Piece


def step_of_pieces(every: int, most: int) -> int:
    """Tokens of which pieces are whole multiples, so that they pass every checkpoint at its place:
    as many as divide `every`, where `most` tokens, or a chunk, may pass at once.
    """
    return max(n for n in range(CHUNK, min(every, max(most, CHUNK)) + 1, CHUNK) if every % n == 0)


class PromptQueue:
    """Prompts that pass the model in pieces, packed, each prompt in turn.

    Args:
        batch: where they pass.
        prefixes: what they start from, and leave on their way.
        metrics: which count them.
        most: tokens that pass between two steps of those that decode.
        alone: one passes at a time, in pieces of `prefixes.every` tokens.
    """

    def __init__(
        self, batch: Batch, prefixes: PrefixCache, metrics: Metrics, most: int, alone: bool
    ) -> None:
        self._batch, self._prefixes, self._metrics = batch, prefixes, metrics
        self._most, self._alone = most, alone
        self._step = batch.every or CHUNK
        # Else a piece ends at the next checkpoint, which is then copied.
        self._whole = not alone and (batch.every > 0 or not prefixes.enabled)
        self._queue: deque[Generation] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Generation]:
        return iter(self._queue)

    def append(self, sequence: Generation) -> None:
        """Takes a prompt, whose sequence has a row."""
        self._queue.append(sequence)

    def remove(self, sequence: Generation) -> None:
        """Gives one up."""
        self._queue.remove(sequence)

    def read(self, beside: bool) -> Iterator[Generation]:
        """Passes pieces, and gives out the sequences whose prompt has ended, each at once: were
        they here until the last piece has passed, an error there would lose them.

        Args:
            beside: whether others wait for a step.
        """
        # Nobody waits for a step's token where none decodes: then a round may be a full one.
        room = max(self._most * (1 if beside else 8), self._step)
        while room > 0 and self._queue:
            with self._prefixes.round():
                pieces = self._take(room)
                if not pieces:
                    break
                self._batch.prefill([piece for _, piece in pieces])
                for sequence, piece in pieces:
                    self._pass(sequence, piece)
                    if piece.ends:
                        self._queue.remove(sequence)
                        yield sequence
            room -= sum(len(piece.tokens) for _, piece in pieces)

    def _take(self, room: int) -> list[tuple[Generation, Piece]]:
        """Pieces that pass at once, of sequences that go to the end of the queue."""
        pieces: list[tuple[Generation, Piece]] = []
        for sequence in list(self._queue):
            start, source = self._prefixes.find(sequence.keys, sequence.passed)
            if start == 0:
                start, source = sequence.passed, sequence.row if sequence.passed else None
            if self._prefixes.is_coming(sequence.keys, start):
                continue  # it is found when what is before in this round has passed
            stop = self._stop(sequence, start, room)
            if stop == start:
                break
            tokens = sequence.request.tokens
            kept: list[int] = []
            if self._whole:
                kept = self._prefixes.reserve(sequence.keys, start, stop, self._step)
            ends = stop == len(tokens)
            self._begin(sequence, start)
            pieces.append((sequence, Piece(sequence.row, tokens[start:stop], ends, source, kept)))
            room -= stop - start
            self._queue.remove(sequence)
            self._queue.append(sequence)
            if self._alone or room <= 0:
                break
        return pieces

    def _stop(self, sequence: Generation, start: int, room: int) -> int:
        """Where the next piece of a prompt ends: at its start where there is no room."""
        stop, every = len(sequence.request.tokens), self._prefixes.every
        if not self._whole:
            stop = min(stop, (start // every + 1) * every)
        if not self._alone and stop - start > room:
            stop = start + room // self._step * self._step
        return stop

    def _begin(self, sequence: Generation, start: int) -> None:
        """Counts a prompt at its first piece, and what a piece need not pass that starts there."""
        if sequence.passed == 0:
            self._metrics.began(sequence)
        skipped = start - sequence.passed
        self._metrics.skipped(skipped)
        sequence.cached += skipped
        sequence.passed = start

    def _pass(self, sequence: Generation, piece: Piece) -> None:
        """Counts what has passed, and copies a checkpoint that was not made on the way."""
        sequence.passed += len(piece.tokens)
        if not self._whole:
            every, stop = self._prefixes.every, sequence.passed
            for row in self._prefixes.reserve(sequence.keys, stop - every, stop, every):
                if row != NONE:
                    self._batch.cache.keep(sequence.row, row)
