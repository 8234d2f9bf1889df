"""The choice of the next token from its logits."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import SupportsFloat

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Options of `generate` with the same names; raises its errors for them."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.temperature, SupportsFloat):
            raise TypeError(
                f"generate: expected temperature to be a number, got {self.temperature!r}"
            )
        if not self.temperature >= 0:
            raise ValueError(
                f"generate: expected temperature to be at least 0, got {self.temperature}"
            )
        # Convert a torch number to an int: `distribution` would take a tensor as one value per row.
        if self.top_k is not None:
            check_int("generate", "top_k", self.top_k, 1, "an int or None")
            object.__setattr__(self, "top_k", operator.index(self.top_k))
        if self.top_p is not None:
            if not isinstance(self.top_p, SupportsFloat):
                raise TypeError(
                    f"generate: expected top_p to be a number or None, got {self.top_p!r}"
                )
            if not 0 < self.top_p <= 1:
                raise ValueError(f"generate: expected top_p to be in (0, 1], got {self.top_p}")
            object.__setattr__(self, "top_p", float(self.top_p))

    @property
    def divisor(self) -> float:
        """The temperature, limited to finite fp32 numbers: -inf / inf would be NaN."""
        return min(float(self.temperature), torch.finfo(torch.float32).max)

    @property
    def greedy(self) -> bool:
        return self.temperature < torch.finfo(torch.float32).tiny

    def candidates(self, vocab_size: int) -> int:
        """Number of tokens from which one is drawn, before top_p."""
        return vocab_size if self.top_k is None else min(self.top_k, vocab_size)


def is_int(value: object) -> bool:
    """Whether a value is an integer, also of NumPy or a tensor with one element; a bool is not."""
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


def check_int(owner: str, name: str, value: object, least: int, kind: str = "an int") -> None:
    """Raises TypeError if value is not an int, called `kind`, and ValueError if it is below
    `least`.
    """
    if not is_int(value):
        raise TypeError(f"{owner}: expected {name} to be {kind}, got {value!r}")
    if value < least:
        raise ValueError(f"{owner}: expected {name} to be at least {least}, got {value}")


def read_end_tokens(
    eos_token_id: int | Sequence[int] | Tensor | None, vocab_size: int
) -> tuple[int, ...]:
    """The tokens that end a row, () for None; raises the errors that `generate` documents."""
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


def distribution(
    logits: Tensor,
    temperature: float | Tensor,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The distribution from which a token of each row is drawn.

    Args:
        logits: `[B, vocab_size]`.
        temperature: above 0 and finite in fp32; a number, or a tensor that broadcasts with `[B,
            1]`.
        top_k: at least 1; one number for all rows or int64 `[B, 1]`. Default: None (all).
        top_p: in (0, 1], shaped like temperature; a share of the sum of the top_k. Default: None
            (all).

    Returns:
        Probabilities, fp32 `[B, n]`, whose sum may be below 1 with top_p; their tokens, int64 `[B,
        n]`, or None for 0 to vocab_size - 1; and the largest logit, fp32 `[B]`, see `choose`.
    """
    logits, tokens = logits.float(), None
    if isinstance(top_k, Tensor) or (top_k is None and top_p is not None):
        logits, tokens = logits.sort(stable=True, dim=-1, descending=True)
    elif top_k is not None:
        logits, tokens = logits.topk(min(top_k, logits.shape[-1]))
    largest = logits.amax(-1, keepdim=True)
    # At most 0, so that a small temperature can make them -inf, but never inf.
    scores = (logits - largest) / temperature
    if isinstance(top_k, Tensor):
        rank = torch.arange(scores.shape[-1], device=scores.device)
        scores = scores.masked_fill(rank >= top_k, -torch.inf)
    p = scores.softmax(-1)
    if top_p is not None:
        # A token stays if the ones before it do not reach top_p, so the first one always stays.
        leaves = (p.cumsum(-1) - p >= top_p) & (top_p < 1)
        leaves[:, 0] = False
        p = p.masked_fill(leaves, 0)
    return p, tokens, largest.squeeze(-1)


def choose(
    logits: Tensor,
    noise: Tensor | None,
    temperature: float | Tensor,
    top_k: int | None = None,
    top_p: float | Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Chooses one token per row, with the given random numbers.

    `argmax(p / noise)` with noise from Exp(1) draws from p: among exponential variables with rates
    p, the i-th is the smallest with probability p_i.

    Args:
        logits: `[B, vocab_size]`.
        noise: fp32 `[B, Sampling.candidates(vocab_size)]`; None takes the most probable token.
        temperature: `Sampling.divisor`, or a scalar tensor of it, which a CUDA graph reads each
            time.
        top_k, top_p: as in `Sampling`; top_p may be a scalar tensor.

    Returns:
        Tokens, int64 `[B]`, and the largest logit, `[B]`. If that is not finite, a logit is NaN or
        inf, or all are -inf, and the token has no meaning.
    """
    if noise is None:
        largest, tokens = logits.max(-1)
        return tokens, largest
    p, tokens, largest = distribution(logits, temperature, top_k, top_p)
    # Noise may round to 0, and 0 / 0 would win.
    choice = (p / noise).masked_fill(p == 0, -1).argmax(-1, keepdim=True)
    return (choice if tokens is None else tokens.gather(-1, choice)).squeeze(-1), largest


def sample(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draws one token per row.

    The logits are not checked for being finite, as the host would have to wait for a GPU. The token
    of a row with NaN or inf, or with -inf for all tokens, has no meaning.

    Args:
        logits: `[B, vocab_size]`.
        temperature, top_k, top_p: as in `generate`. Default: 1.0, None, None.
        generator: source of randomness, on the device of logits. Default: torch's own.

    Returns:
        int64 `[B, 1]`.

    Raises the errors of `generate` for these options.
    """
    options = Sampling(temperature, top_k, top_p)
    noise = None
    if not options.greedy:
        B, vocab_size = logits.shape
        noise = logits.new_empty(B, options.candidates(vocab_size), dtype=torch.float32)
        noise.exponential_(generator=generator)
    tokens, _ = choose(logits, noise, options.divisor, options.top_k, options.top_p)
    return tokens.unsqueeze(-1)
