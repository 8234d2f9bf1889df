"""A sequence that an engine runs."""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Collection

import torch

from gla_ext.serve.request import Delta, Request, TokenLogprob
from gla_ext.serve.text import Detokenizer, StopStrings, Tokenizer

UNIFORMS = 64  # that are drawn at a time
BELOW_ONE = 1 - 2**-20  # so that no product with it rounds to the whole


class Status(enum.Enum):
    """Where a sequence stands."""

    WAITING = "it has no row"
    READING = "it has a row, and its prompt passes"
    DECODING = "a token passes in each step"
    FINISHED = "it gets nothing more"


class Sequence:
    """A request on its way.

    Attributes:
        status: see `Status`.
        row: of the engine's batch, or None while it waits.
        keys: of the prompt's beginnings, in the prefix cache.
        passed: tokens of the prompt that its row has had.
        cached: how many of these came from the prefix cache.
        drew: tokens that were asked for.
        new: tokens that it has got, the last one, if it ended the sequence, included.
        ending: why it shall end at the next step: 'cancelled', 'refresh' (its states are of an old
            model), or None.
        arrived, first, last: when it came, and when its first and last token did, seconds.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self.status = Status.WAITING
        self.row: int | None = None
        self.keys: list[bytes] = []
        self.passed, self.cached, self.drew, self.new = 0, 0, 0, 0
        self.ending: str | None = None
        self.arrived = time.monotonic()
        self.first = self.last = 0.0
        # What fp32 rounds to 0 is 0, and inf is its greatest number, as in Sampling.
        finite = torch.finfo(torch.float32)
        given = float(request.temperature)
        self.temperature = 0.0 if given < finite.tiny else min(given, finite.max)
        self._generator = torch.Generator()
        if self.temperature > 0:
            self._generator.manual_seed(request.seed_or_random())
        self._uniforms: list[float] = []
        self._text = None
        if tokenizer is not None:
            self._text = Detokenizer(tokenizer, request.tokens, request.skip_special_tokens)
        self._stops = StopStrings(request.stop)
        self._characters = 0  # of the tokens so far

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self.status is Status.FINISHED

    @property
    def drew_all(self) -> bool:
        """Whether all tokens that it may have are asked for."""
        return self.drew >= self.request.max_new_tokens

    def next_uniform(self) -> float:
        """The number that decides the next token: of the seed, and how many there were before."""
        if not self._uniforms:
            drawn = torch.rand(UNIFORMS, generator=self._generator, dtype=torch.float64)
            self._uniforms = (drawn * BELOW_ONE).tolist()[::-1]
        return self._uniforms.pop()

    def rest(self) -> str:
        """Text that was held back, as it may have been the start of a stop string."""
        return self._stops.flush()

    def add(self, token: int, logprob: TokenLogprob | None, ends: Collection[int]) -> Delta:
        """Takes a token, which may be the last."""
        self.new += 1
        if token in ends and not self.request.ignore_eos:
            return Delta(self._stops.flush(), finish_reason="stop")
        delta = Delta(tokens=[token])
        if logprob is not None:
            delta.logprobs.append(dataclasses.replace(logprob, offset=self._characters))
        if self._text is not None:
            text = self._text.push(token)
            self._characters += len(text)
            delta.text, stopped = self._stops.push(text)
            if stopped:
                delta.finish_reason = "stop"
                return delta
        if self.new == self.request.max_new_tokens:
            delta.text += self._stops.flush()
            delta.finish_reason = "length"
        return delta
