"""The next token of every row, each by its own options, and log-probabilities."""

from __future__ import annotations

import dataclasses
from array import array

import torch
from torch import Tensor

from gla_ext.decode.sampling import distribution
from gla_ext.serve.request import MOST_LOGPROBS, NO_PENALTIES, Request


@dataclasses.dataclass(frozen=True)
class Draw:
    """How to draw the tokens of a row: the options of `choose`, and what its request changes about
    logits: see `Adjustments`.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    penalties: tuple[float, float, float] = NO_PENALTIES
    is_penalized: bool = False
    is_biased: bool = False

    @classmethod
    def of(cls, request: Request, temperature: float) -> Draw:
        filters, penalties = (request.top_k, request.top_p, request.min_p), request.penalties
        changes = (penalties, penalties != NO_PENALTIES, bool(request.logit_bias))
        return cls(temperature, *filters, *changes)


IDLE = Draw()  # of a row without a sequence


class Adjustments:
    """What requests change about logits before tokens are chosen: a bias, then penalties, in vLLM's
    order. Keeps the bias of each row, and the tokens that it has had.

    These are two tensors `[rows, vocab_size]` of 4 bytes an element; each is made for the first
    request that needs it.
    """

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self._shape, self._device = (rows, vocab_size), device
        self._bias: Tensor | None = None
        # int32: 2 for each time that the row drew the token, plus 1 if its prompt has the token.
        self._had: Tensor | None = None

    def begin(self, row: int, request: Request) -> None:
        """Starts a row anew, before the first draw of a request."""
        if request.logit_bias and self._bias is None:
            self._bias = self._zeros(torch.float32)
        if self._bias is not None:
            self._bias[row] = 0
        if request.logit_bias:
            values = torch.tensor(
                [float(x) for x in request.logit_bias.values()], device=self._device
            )
            self._bias[row, self._indices(array("q", request.logit_bias))] = values
        if request.penalties != NO_PENALTIES:
            if self._had is None:
                self._had = self._zeros(torch.int32)
            self._had[row] = 0
            self._had[row, self._indices(request.tokens)] = 1

    def _zeros(self, dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):
            return torch.zeros(self._shape, dtype=dtype, device=self._device)

    def _indices(self, tokens: array[int]) -> Tensor:
        return torch.frombuffer(tokens, dtype=torch.long).to(self._device, non_blocking=True)

    def apply(self, logits: Tensor, draws: dict[int, Draw]) -> Tensor:
        """The logits `[n, vocab_size]` of rows 0 to n - 1, changed for these draws."""
        n = len(logits)
        if any(draw.is_biased for draw in draws.values()):
            logits = logits + self._bias[:n]
        if any(draw.is_penalized for draw in draws.values()):
            columns = [draws.get(row, IDLE).penalties for row in range(n)]
            columns = torch.tensor(columns).to(self._device, non_blocking=True)
            repetition, presence, frequency = columns.unsqueeze(1).unbind(-1)
            had = self._had[:n]
            weaker = torch.where(logits > 0, logits / repetition, logits * repetition)
            logits = torch.where(had > 0, weaker, logits)
            logits = logits - frequency * (had >> 1) - presence * (had > 1)
        return logits

    def drew(self, tokens: Tensor, draws: dict[int, Draw]) -> None:
        """Counts the tokens `[n]` that rows 0 to n - 1 drew."""
        if any(draw.is_penalized for draw in draws.values()):
            tokens = tokens.unsqueeze(1)
            self._had.scatter_add_(1, tokens, torch.full_like(tokens, 2, dtype=torch.int32))


def choose(
    logits: Tensor,
    uniform: Tensor,
    temperature: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Chooses one token per row, by inverting the distribution function at a given number.

    A row's token depends only on its own logits, number and options, so it does not depend on
    whether other rows have a top_k, top_p or min_p.

    Args:
        logits: `[B, vocab_size]`, fp32.
        uniform: fp32 `[B]`, from 0 to below 1.
        temperature: fp32 `[B]`; 0 takes the most probable token.
        top_k: int64 `[B]`, at least 1; vocab_size is all of them. Default: None (all).
        top_p: fp32 `[B]`; 1 is all of them. Default: None (all).
        min_p: fp32 `[B]`; before top_k, tokens are left out whose probability is below min_p times
            the largest one. Default: None (none).

    Returns:
        Tokens, int64 `[B]`, and the largest logit, fp32 `[B]`, as in
        `gla_ext.decode.sampling.choose`.
    """
    divisor = temperature.masked_fill(temperature == 0, 1).unsqueeze(-1)
    if min_p is not None:
        scores = (logits - logits.amax(-1, keepdim=True)) / divisor
        logits = logits.masked_fill(scores < min_p.log().unsqueeze(-1), -torch.inf)
    p, _, largest = distribution(logits, divisor)
    chosen = _invert(p, uniform)
    if top_k is not None and top_p is not None:
        filtered = (top_k < logits.shape[-1]) | (top_p < 1)
        p, tokens, _ = distribution(logits, divisor, top_k.unsqueeze(-1), top_p.unsqueeze(-1))
        place = _invert(p, uniform).unsqueeze(-1)
        chosen = torch.where(filtered, tokens.gather(-1, place).squeeze(-1), chosen)
    return torch.where(temperature > 0, chosen, logits.argmax(-1)), largest


def _invert(p: Tensor, uniform: Tensor) -> Tensor:
    """The first index at which the cumulative sum of p `[B, n]` exceeds `uniform` times the
    total.
    """
    sums = p.cumsum(-1)
    passed = (sums > uniform.unsqueeze(-1) * sums[:, -1:]) & (p > 0)
    return passed.int().argmax(-1)


def log_probabilities(
    logits: Tensor, tokens: Tensor, count: int = MOST_LOGPROBS
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the tokens, `[B]`, and those of the `count` most probable tokens, `[B,
    n]`, with their ids; all of the model's own logits.
    """
    logits = logits - logits.logsumexp(-1, keepdim=True)
    best, ids = logits.topk(min(count, logits.shape[-1]))
    return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), best, ids
