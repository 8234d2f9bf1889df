"""A sequence that an engine runs."""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from gla_ext.serve.batch import Scores
from gla_ext.serve.choice import Draw
from gla_ext.serve.request import Delta, Request, TokenLogprob
from gla_ext.serve.text import Detokenizer, StopStrings, Tokenizer

UNIFORMS = 64  # random numbers drawn at a time
BELOW_ONE = 1 - 2**-20  # largest factor, so that no product with it rounds up to the other factor


class Status(enum.Enum):
    """The state of a sequence in the engine."""

    WAITING = "it has no row"
    READING = "it has a row, and its prompt passes"
    DECODING = "a token passes in each step"
    FINISHED = "it gets nothing more"


class Sequence:
    """A request in the engine.

    Attributes:
        status: see `Status`.
        row: row of the engine's batch, or None while it waits.
        keys: keys of the prompt's prefixes, for the prefix cache.
        passed: tokens of the prompt that its row's state includes.
        cached: how many of these came from the prefix cache.
        draw: how its tokens are drawn.
        drew: number of tokens whose draw was requested.
        scores: of each piece of a prompt with prompt_logprobs, a function that waits for the
            tensors of several pieces, and the places of this piece's tokens in them.
        new: number of tokens that it has got, including one that ended it.
        ending: why it will end at the next step: 'cancelled', 'refresh' (its states are of an old
            model), or None.
        arrived, first, last: times of its arrival, its first and its last token, in seconds.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self.status = Status.WAITING
        self.row: int | None = None
        self.keys: list[bytes] = []
        self.passed, self.cached, self.drew, self.new = 0, 0, 0, 0
        self.scores: list[tuple[Callable[[], list[Tensor]], slice]] = []
        self.ending: str | None = None
        self.arrived = time.monotonic()
        self.first = self.last = 0.0
        # As in Sampling, what fp32 rounds to 0 is 0, and inf becomes the largest fp32 number.
        finite = torch.finfo(torch.float32)
        given = float(request.temperature)
        self.draw = Draw.of(request, 0.0 if given < finite.tiny else min(given, finite.max))
        self._generator = torch.Generator()
        if self.draw.temperature > 0:
            self._generator.manual_seed(request.seed_or_random())
        self._uniforms: list[float] = []
        self._text = None
        if tokenizer is not None:
            self._text = Detokenizer(tokenizer, request.tokens, request.skip_special_tokens)
        self._stops = StopStrings(request.stop)
        self._characters = 0  # of the text so far

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self.status is Status.FINISHED

    @property
    def is_scored(self) -> bool:
        """Whether log-probabilities of its prompt are wanted."""
        return self.request.prompt_logprobs is not None

    @property
    def drew_all(self) -> bool:
        """Whether all tokens that it may have were requested."""
        return self.drew >= self.request.max_new_tokens

    def next_uniform(self) -> float:
        """The random number for the next token, which depends on the seed and the count so far."""
        if not self._uniforms:
            drawn = torch.rand(UNIFORMS, generator=self._generator, dtype=torch.float64)
            self._uniforms = (drawn * BELOW_ONE).tolist()[::-1]
        return self._uniforms.pop()

    def rest(self) -> str:
        """The text that was held back: it may be the start of a stop string, or have come with a
        part of a character.
        """
        text, stopped = self._stops.push("" if self._text is None else self._text.rest())
        return text if stopped else text + self._stops.flush()

    def take_scores(self) -> Scores | tuple[()] | None:
        """The log-probabilities of the prompt's tokens, once; None if logits are not finite."""
        scores, self.scores = self.scores, []
        if not scores:
            return ()
        count = self.request.prompt_logprobs
        cut = [
            [x[places] if x.dim() == 1 else x[places, :count] for x in wait()]
            for wait, places in scores
        ]
        found = [torch.cat(parts) for parts in zip(*cut, strict=True)]
        if not found[1].isfinite().all():
            return None
        return Scores([x[:-1] for x in found])  # the last is followed by the first that is drawn

    def add(self, token: int, logprob: TokenLogprob | None, ends: Collection[int]) -> Delta:
        """Adds a token, which may be the last."""
        self.new += 1
        delta = Delta()
        if logprob is not None:
            delta.logprobs.append(dataclasses.replace(logprob, offset=self._characters))
        is_end = token in ends or token in self.request.end_tokens
        if is_end and not self.request.ignore_eos:
            delta.text, delta.finish_reason = self.rest(), "stop"
            return delta
        delta.tokens.append(token)
        if self._text is not None:
            text = self._text.push(token)
            self._characters += len(text)
            delta.text, stopped = self._stops.push(text)
            if stopped:
                delta.finish_reason = "stop"
                return delta
        if self.new == self.request.max_new_tokens:
            delta.text += self.rest()
            delta.finish_reason = "length"
        return delta
