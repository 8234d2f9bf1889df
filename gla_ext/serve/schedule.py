"""The choice of sequences that decode in a step, and of pieces of prompts that are read with it."""

from __future__ import annotations

from array import array

from gla_ext.decode._prompts import CHUNK
from gla_ext.serve.batch import Batch
from gla_ext.serve.metrics import Metrics
from gla_ext.serve.prefix import PrefixCache
from gla_ext.serve.prompts import NONE, Piece
from gla_ext.serve.sequence import Sequence, Status


def step_of_pieces(every: int, most: int) -> int:
    """The tokens of which pieces are whole multiples, so that checkpoints are in their right
    places: the largest divisor of `every` in whole chunks, at most `most` tokens, or one chunk.
    """
    return max(n for n in range(CHUNK, min(every, max(most, CHUNK)) + 1, CHUNK) if every % n == 0)


class Schedule:
    """The sequences that have rows. In each step, all whose prompt has been read decode. Prompts
    are read in packed pieces, in turn.

    Args:
        batch: runs steps and reads pieces.
        prefixes: the prefix cache, from which prompts start and in which they store checkpoints.
        most: tokens of prompts that are read between two token steps.
        alone: whether only one prompt is read at a time, in pieces of `prefixes.every` tokens.

    Attributes:
        running: the sequences, the one whose prompt is next before those that have had a turn.
    """

    def __init__(
        self, batch: Batch, prefixes: PrefixCache, metrics: Metrics, most: int, alone: bool
    ) -> None:
        self._batch, self._prefixes, self._metrics = batch, prefixes, metrics
        self._most, self._alone = most, alone
        self._step = batch.every or CHUNK
        # Otherwise a piece ends at the next checkpoint, which is then copied.
        self._whole = not alone and (batch.every > 0 or not prefixes.enabled)
        self.running: list[Sequence] = []

    def _those(self, status: Status) -> list[Sequence]:
        return [sequence for sequence in self.running if sequence.status is status]

    def decode(self) -> list[Sequence]:
        """Runs a token step of the sequences that continue; returns these."""
        going = [sequence for sequence in self._those(Status.DECODING) if not sequence.drew_all]
        if going:
            self._batch.step([sequence.row for sequence in going])
        return going

    def read(self) -> list[Sequence]:
        """Reads pieces of prompts; returns the sequences whose prompt has ended."""
        ended: list[Sequence] = []
        reading = self._those(Status.READING)
        # If no sequence decodes, none waits for its next token, and a round may read more.
        beside = len(reading) < len(self.running)
        room = max(self._most * (1 if beside else 8), self._step)
        while room > 0 and reading:
            with self._prefixes.round():
                pieces = self._take(reading, room)
                if not pieces:
                    break
                self._run(pieces)
                for sequence, piece in pieces:
                    self._pass(sequence, piece)
                    if piece.ends:
                        sequence.status = Status.DECODING
                        ended.append(sequence)
            room -= sum(len(piece.tokens) for _, piece in pieces)
            reading = self._those(Status.READING)
        return ended

    def _run(self, pieces: list[tuple[Sequence, Piece]]) -> None:
        """Reads pieces, and scores their tokens if the sequences want it."""
        packed = [piece for _, piece in pieces]
        if not pieces[0][0].is_scored:
            self._batch.prefill(packed)
            return
        following, places = array("q"), []
        for sequence, piece in pieces:
            start, count = sequence.passed + 1, len(piece.tokens)
            places.append(slice(len(following), len(following) + count))
            following += sequence.request.tokens[start : start + count]
            following += array("q", [0] * piece.ends)
        most = max(sequence.request.prompt_logprobs for sequence, _ in pieces)
        wait = self._batch.score(packed, following, most)
        for (sequence, _), place in zip(pieces, places, strict=True):
            sequence.scores.append((wait, place))

    def _take(self, reading: list[Sequence], room: int) -> list[tuple[Sequence, Piece]]:
        """Pieces to read at once, which are all scored or all not. Their sequences then move behind
        all others.
        """
        pieces: list[tuple[Sequence, Piece]] = []
        scored, most = reading[0].is_scored, self._batch.most_scored
        if scored:  # by itself, a sequence is always cut at the same places
            room = most if self._alone else min(room, most)
        for sequence in reading:
            if sequence.is_scored != scored:
                continue
            start, source = self._prefixes.find(sequence.keys, sequence.passed)
            if start == 0:
                start, source = sequence.passed, sequence.row if sequence.passed else None
            if self._prefixes.is_coming(sequence.keys, start):
                continue  # found in the next round, when this one has computed it
            stop = self._stop(sequence, start, room)
            if stop == start:
                break
            tokens = sequence.request.tokens
            kept: list[int] = []
            if self._whole and not scored:
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
        """The end of the next piece of a prompt; equal to its start if there is no room."""
        stop, every = len(sequence.request.tokens), self._prefixes.every
        if sequence.is_scored:
            return stop if stop - start <= room else start + room // CHUNK * CHUNK
        if not self._whole:
            stop = min(stop, (start // every + 1) * every)
        if not self._alone and stop - start > room:
            stop = start + room // self._step * self._step
        return stop

    def _begin(self, sequence: Sequence, start: int) -> None:
        """Counts a prompt at its first piece, and the tokens before `start` that need not be
        read.
        """
        if sequence.passed == 0:
            self._metrics.began(sequence)
        skipped = start - sequence.passed
        self._metrics.skipped(skipped)
        sequence.cached += skipped
        sequence.passed = start

    def _pass(self, sequence: Sequence, piece: Piece) -> None:
        """Counts the tokens read, and copies a checkpoint that `chunk_gla_` did not store."""
        sequence.passed += len(piece.tokens)
        if not self._whole:
            every, stop = self._prefixes.every, sequence.passed
            for row in self._prefixes.reserve(sequence.keys, stop - every, stop, every):
                if row != NONE:
                    self._batch.cache.keep(sequence.row, row)
