"""A client's request and the reply to it."""

from __future__ import annotations

import dataclasses
import operator
import secrets
from array import array
from collections.abc import Collection, Mapping, Sequence
from typing import SupportsFloat

import torch

from gla_ext.decode.sampling import Sampling, check_int, is_int

MOST_LOGPROBS = 20  # limit of the most probable tokens in a reply, with log-probabilities
MOST_STOPS = 16
LONGEST_STOP = 256  # characters
MOST_BIASED = 1024  # tokens with a logit bias
NO_PENALTIES = (1.0, 0.0, 0.0)  # see Request.penalties


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of an engine.

    Args:
        rows: sequences that are decoded at once. On CUDA with more than 32, a row also has room for
            16 tokens beside its states, unless the engine was made inside `batch_invariant()`.
        waiting: sequences that may wait for a row; more are rejected.
        prompt_tokens: most tokens of a prompt.
        new_tokens: most new tokens that a request may ask for.
        prefill_tokens: tokens of prompts that are read between two token steps; below 64 it counts
            as 64.
        checkpoint_tokens: n of the prefix cache, a multiple of 64.
        cache_bytes: memory of the prefix cache, which is allocated when the engine is made; 0 turns
            the cache off.

    Raises:
        TypeError: for a value that is not an int.
        ValueError: for values out of range.
    """

    rows: int = 32
    waiting: int = 256
    prompt_tokens: int = 131_072
    new_tokens: int = 4096
    prefill_tokens: int = 2048
    checkpoint_tokens: int = 512
    cache_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            check_int("Limits", field.name, value, int(field.name not in _MAY_BE_ZERO))
            if value >= 2**63:
                raise ValueError(f"Limits: expected {field.name} below 2**63, got {value}")
        if self.checkpoint_tokens % 64:
            raise ValueError(
                "Limits: expected checkpoint_tokens to be a multiple of 64, got "
                f"{self.checkpoint_tokens}"
            )

    def check(self, request: Request, vocab_size: int) -> None:
        """Raises ValueError for a request over the limits, or with tokens outside of the
        vocabulary.
        """
        if len(request.tokens) > self.prompt_tokens:
            raise ValueError(
                f"expected a prompt of at most {self.prompt_tokens} tokens, got "
                f"{len(request.tokens)}"
            )
        if request.max_new_tokens > self.new_tokens:
            raise ValueError(
                f"expected at most {self.new_tokens} new tokens, got {request.max_new_tokens}"
            )
        tokens = torch.frombuffer(request.tokens, dtype=torch.long)  # fast also for 100,000 tokens
        ends = [x.item() for x in torch.aminmax(tokens)]
        for what, given in (("tokens", ends), ("tokens of logit_bias", request.logit_bias)):
            for token in given:
                if not 0 <= token < vocab_size:
                    raise ValueError(f"expected {what} from 0 to {vocab_size - 1}, got {token}")


_MAY_BE_ZERO = ("waiting", "cache_bytes")


def _check_number(name: str, value: object, least: float, most: float) -> None:
    if not isinstance(value, SupportsFloat):
        raise TypeError(f"Request: expected {name} to be a number, got {value!r}")
    if not least <= value <= most:
        raise ValueError(f"Request: expected {name} from {least} to {most}, got {value}")


@dataclasses.dataclass(frozen=True)
class Request:
    """One continuation of one prompt.

    Args:
        tokens: the prompt, at least one token; an `array("q")` is not copied.
        max_new_tokens: most tokens to draw; 0 only reads the prompt. Default: 16.
        temperature, top_k, top_p: as in `gla_ext.decode.Sampling`.
        seed: determines the draws, together with the logits. Default: None (another one each time).
        stop: the text ends before the first of these strings. Default: none.
        logprobs: number of most probable tokens to report for each token, in addition to the one
            drawn, at most 20. Default: None (no log-probabilities).
        ignore_eos: go on after the model's eos_token_id and after end_tokens. Default: False.
        skip_special_tokens: leave the tokenizer's special tokens out of the text. Default: True.
        min_p: from 0 to 1; leave out tokens whose probability, after temperature, is below min_p
            times the largest one. top_k and top_p then choose among the others. Default: 0.0.
        repetition_penalty: from 0.01 to 100; divides the logits above 0 of tokens that the prompt
            or the text so far has, and multiplies those below 0. Default: 1.0 (none).
        presence_penalty, frequency_penalty: from -2 to 2; subtracted from the logits of tokens that
            the text so far has, the first once, the second as often as the text has the token.
            Default: 0.0.
        logit_bias: numbers from -100 to 100 by token, at most 1,024 tokens, added to their logits
            before the penalties. Default: none.
        prompt_logprobs: as logprobs, for the tokens of the prompt but the first. Such a prompt does
            not start from the prefix cache. Default: None.
        end_tokens: tokens that end the text as the model's eos_token_id does. Default: none.

    Raises:
        TypeError: for options of another type.
        ValueError: for options out of range.
    """

    tokens: Sequence[int]
    max_new_tokens: int = 16
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int | None = None
    stop: Sequence[str] = ()
    logprobs: int | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    prompt_logprobs: int | None = None
    end_tokens: Collection[int] = ()

    def __post_init__(self) -> None:
        Sampling(self.temperature, self.top_k, self.top_p)
        try:
            if not (isinstance(self.tokens, array) and self.tokens.typecode == "q"):
                object.__setattr__(self, "tokens", array("q", self.tokens))
        except (TypeError, OverflowError) as error:
            raise TypeError(f"Request: expected tokens to be ints, got {error}") from error
        if len(self.tokens) < 1:
            raise ValueError("Request: expected a prompt of at least one token, got none")
        check_int("Request", "max_new_tokens", self.max_new_tokens, 0)
        _check_number("min_p", self.min_p, 0, 1)
        _check_number("repetition_penalty", self.repetition_penalty, 0.01, 100)
        _check_number("presence_penalty", self.presence_penalty, -2, 2)
        _check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        if len(self.logit_bias) > MOST_BIASED:
            raise ValueError(
                f"Request: expected logit_bias of at most {MOST_BIASED} tokens, got "
                f"{len(self.logit_bias)}"
            )
        for name in ("logit_bias", "end_tokens"):
            for token in getattr(self, name):
                if not is_int(token):
                    raise TypeError(f"Request: expected tokens of {name} to be ints, got {token!r}")
        for value in self.logit_bias.values():
            _check_number("logit_bias", value, -100, 100)
        if self.seed is not None and (not is_int(self.seed) or not -(2**63) <= self.seed < 2**64):
            raise ValueError(f"Request: expected seed to be an int of 64 bits, got {self.seed!r}")
        if isinstance(self.stop, str) or not all(isinstance(stop, str) for stop in self.stop):
            raise TypeError(f"Request: expected stop to be a list of strings, got {self.stop!r}")
        if len(self.stop) > MOST_STOPS:
            raise ValueError(
                f"Request: expected at most {MOST_STOPS} stop strings, got {len(self.stop)}"
            )
        for stop in self.stop:
            if not 1 <= len(stop) <= LONGEST_STOP:
                raise ValueError(
                    f"Request: expected stop strings of 1 to {LONGEST_STOP} characters, got one of "
                    f"{len(stop)}"
                )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and not (is_int(count) and 0 <= count <= MOST_LOGPROBS):
                raise ValueError(
                    f"Request: expected {name} from 0 to {MOST_LOGPROBS}, got {count!r}"
                )

    @property
    def penalties(self) -> tuple[float, float, float]:
        """Those of repetition, presence and frequency."""
        return self.repetition_penalty, self.presence_penalty, self.frequency_penalty

    def seed_or_random(self) -> int:
        """A seed in the range that torch accepts."""
        seed = secrets.randbits(63) if self.seed is None else operator.index(self.seed)
        return seed % 2**64


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of a token, and those of the most probable tokens, by token.

    offset: characters of new text before the token, including those that are not shown yet; 0 for
    tokens of a prompt.
    """

    token: int
    logprob: float
    best: dict[int, float]
    offset: int = 0


@dataclasses.dataclass(slots=True)
class Delta:
    """The tokens and text that a step added to a sequence.

    text: text of these tokens and of earlier ones that was held back; empty without a tokenizer.
    tokens: the tokens drawn, without the eos_token_id that ended the sequence.
    logprobs: one for each token drawn, if requested, with that which ended the sequence.
    prompt_logprobs: in the first delta, one for each token of the prompt but the first, if
    requested.
    finish_reason: 'stop', 'length', 'cancelled', 'refresh' (`Engine.refresh` ended it), 'error', or
    None (the sequence continues).
    error: with finish_reason 'error', what went wrong if only this sequence failed.
    """

    text: str = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    prompt_logprobs: Sequence[TokenLogprob] = ()
    finish_reason: str | None = None
    error: str | None = None
