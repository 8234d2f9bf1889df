"""How the next token is chosen from its logits."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import SupportsFloat

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Sampling:
    """What `generate` takes under the same names.

    Args:
        temperature: divides the logits; 0, or what fp32 rounds to 0, takes the most probable token,
            inf draws alike among all of a probability above 0. Default: 1.0.
        top_k: sample among the k most probable tokens. Default: None (all).
        top_p: sample among the most probable tokens that together reach this probability, after
            top_k (Holtzman et al., 2020, arXiv:1904.09751). Default: None (all).

    Raises:
        TypeError: for options that are no numbers, and a top_k that is no int.
        ValueError: for options out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.temperature, SupportsFloat):
            raise TypeError(
                f"generate: expected temperature to be a number, got {self.temperature!r}"
            )
        if self.top_k is not None and not is_int(self.top_k):
            raise TypeError(f"generate: expected top_k to be an int or None, got {self.top_k!r}")
        if self.top_p is not None and not isinstance(self.top_p, SupportsFloat):
            raise TypeError(f"generate: expected top_p to be a number or None, got {self.top_p!r}")
        if not self.temperature >= 0:
            raise ValueError(
                f"generate: expected temperature to be at least 0, got {self.temperature}"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"generate: expected top_k to be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"generate: expected top_p to be in (0, 1], got {self.top_p}")

    @property
    def divisor(self) -> float:
        """The temperature, finite in fp32: -inf / inf would be no logit."""
        return min(float(self.temperature), torch.finfo(torch.float32).max)

    @property
    def greedy(self) -> bool:
        return self.temperature < torch.finfo(torch.float32).tiny

    def candidates(self, vocab_size: int) -> int:
        """Number of tokens among which one is drawn, before top_p."""
        return vocab_size if self.top_k is None else min(self.top_k, vocab_size)


def is_int(value: object) -> bool:
    """Whether it counts, as NumPy's integers and tensors of one do; a bool does not."""
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


def read_end_tokens(
    eos_token_id: int | Sequence[int] | Tensor | None, vocab_size: int
) -> tuple[int, ...]:
    """The tokens that end a row, none for None.

    Raises:
        TypeError: for what is neither an int nor a sequence of ints.
        ValueError: for a token that the model does not have.
    """
    if eos_token_id is None:
        return ()
    given = [eos_token_id] if is_int(eos_token_id) else eos_token_id
    if not isinstance(given, (Sequence, Tensor)) or not all(is_int(token) for token in given):
        raise TypeError(
            "generate: expected eos_token_id to be an int, a list of ints or None, got "
            f"{eos_token_id!r}"
        )
    tokens = tuple(operator.index(token) for token in given)
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"generate: expected eos_token_id from 0 to {vocab_size - 1}, got {token}"
            )
    return tokens


def choose(
    logits: Tensor,
    noise: Tensor | None,
    temperature: float | Tensor,
    top_k: int | None = None,
    top_p: float | Tensor | None = None,
) -> Tensor:
    """One token a row, with the randomness given.

    `argmax(p / noise)` with noise from Exp(1) draws from p: of exponential variables with rates p
    the smallest is the i-th with probability p_i.

    Args:
        logits: `[B, vocab_size]`.
        noise: fp32 `[B, Sampling.candidates(vocab_size)]`; None takes the most probable token.
        temperature: `Sampling.divisor`, or a scalar tensor of it, which a CUDA graph reads anew.
        top_p: as in `Sampling`, or a scalar tensor.
        top_k: as in `Sampling`.

    Returns:
        int64 `[B]`.
    """
    if noise is None:
        return logits.argmax(-1)
    logits, tokens = logits.float(), None
    if top_k is not None:
        logits, tokens = logits.topk(min(top_k, logits.shape[-1]))
    elif top_p is not None:
        logits, tokens = logits.sort(-1, descending=True)
    probabilities = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)
    if top_p is not None:
        # A token stays if those before it do not reach top_p: the first one always does.
        before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities.masked_fill(before >= top_p, 0)
    # Noise may round to 0, and 0 / 0 would win.
    scores = (probabilities / noise).masked_fill(probabilities == 0, -1)
    choice = scores.argmax(-1, keepdim=True)
    return (choice if tokens is None else tokens.gather(-1, choice)).squeeze(-1)


def sample(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draws one token a row.

    Args:
        logits: `[B, vocab_size]`.
        temperature, top_k, top_p: as in `Sampling`.
        generator: source of randomness, on the device of logits. Default: torch's own.

    Returns:
        int64 `[B, 1]`.

    Raises:
        TypeError: for options that are no numbers, and a top_k that is no int.
        ValueError: for options out of range.
    """
    options = Sampling(temperature, top_k, top_p)
    noise = None
    if not options.greedy:
        B, vocab_size = logits.shape
        noise = logits.new_empty(B, options.candidates(vocab_size), dtype=torch.float32)
        noise.exponential_(generator=generator)
    return choose(logits, noise, options.divisor, top_k, top_p).unsqueeze(-1)
