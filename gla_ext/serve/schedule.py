"""Which sequences decode in a step, and which pieces of prompts pass beside them."""

from __future__ import annotations

from gla_ext.decode._prompts import CHUNK
from gla_ext.serve.batch import Batch
from gla_ext.serve.metrics import Metrics
from gla_ext.serve.prefix import PrefixCache
from gla_ext.serve.prompts import NONE, Piece
from gla_ext.serve.sequence import Sequence, Status


def step_of_pieces(every: int, most: int) -> int:
    """Tokens of which pieces are whole multiples, so that they pass every checkpoint at its place:
    as many as divide `every`, where `most` tokens, or a chunk, may pass at once.
    """
    return max(n for n in range(CHUNK, min(every, max(most, CHUNK)) + 1, CHUNK) if every % n == 0)


class Schedule:
    """Sequences that have rows: all whose prompt has passed decode in each step, and prompts pass
    in pieces, packed, each in turn.

    Args:
        batch, prefixes: where they pass, and what they start from, and leave on their way.
        most: tokens that pass between two steps of those that decode.
        alone: one passes at a time, in pieces of `prefixes.every` tokens.

    Attributes:
        running: the sequences, the one whose prompt is next before those that have had a turn.
    """

    def __init__(
        self, batch: Batch, prefixes: PrefixCache, metrics: Metrics, most: int, alone: bool
    ) -> None:
        self._batch, self._prefixes, self._metrics = batch, prefixes, metrics
        self._most, self._alone = most, alone
        self._step = batch.every or CHUNK
        # Else a piece ends at the next checkpoint, which is then copied.
        self._whole = not alone and (batch.every > 0 or not prefixes.enabled)
        self.running: list[Sequence] = []

    def _those(self, status: Status) -> list[Sequence]:
        return [sequence for sequence in self.running if sequence.status is status]

    def decode(self) -> list[Sequence]:
        """Passes the last token of each sequence that goes on; returns these."""
        going = [sequence for sequence in self._those(Status.DECODING) if not sequence.drew_all]
        if going:
            self._batch.step([sequence.row for sequence in going])
        return going

    def read(self) -> list[Sequence]:
        """Passes pieces of prompts; returns the sequences whose prompt has ended."""
        ended: list[Sequence] = []
        reading = self._those(Status.READING)
        # Nobody waits for a step's token where none decodes: then a round may be a full one.
        beside = len(reading) < len(self.running)
        room = max(self._most * (1 if beside else 8), self._step)
        while room > 0 and reading:
            with self._prefixes.round():
                pieces = self._take(reading, room)
                if not pieces:
                    break
                self._batch.prefill([piece for _, piece in pieces])
                for sequence, piece in pieces:
                    self._pass(sequence, piece)
                    if piece.ends:
                        sequence.status = Status.DECODING
                        ended.append(sequence)
            room -= sum(len(piece.tokens) for _, piece in pieces)
            reading = self._those(Status.READING)
        return ended

    def _take(self, reading: list[Sequence], room: int) -> list[tuple[Sequence, Piece]]:
        """Pieces that pass at once, of sequences that then let all others have a turn."""
        pieces: list[tuple[Sequence, Piece]] = []
        for sequence in reading:
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
            self.running.remove(sequence)
            self.running.append(sequence)
            if self._alone or room <= 0:
                break
        return pieces

    def _stop(self, sequence: Sequence, start: int, room: int) -> int:
        """Where the next piece of a prompt ends: at its start where there is no room."""
        stop, every = len(sequence.request.tokens), self._prefixes.every
        if not self._whole:
            stop = min(stop, (start // every + 1) * every)
        if not self._alone and stop - start > room:
            stop = start + room // self._step * self._step
        return stop

    def _begin(self, sequence: Sequence, start: int) -> None:
        """Counts a prompt at its first piece, and what a piece need not pass that starts there."""
        if sequence.passed == 0:
            self._metrics.began(sequence)
        skipped = start - sequence.passed
        self._metrics.skipped(skipped)
        sequence.cached += skipped
        sequence.passed = start

    def _pass(self, sequence: Sequence, piece: Piece) -> None:
        """Counts what has passed, and copies a checkpoint that was not made on the way."""
        sequence.passed += len(piece.tokens)
        if not self._whole:
            every, stop = self._prefixes.every, sequence.passed
            for row in self._prefixes.reserve(sequence.keys, stop - every, stop, every):
                if row != NONE:
                    self._batch.cache.keep(sequence.row, row)
