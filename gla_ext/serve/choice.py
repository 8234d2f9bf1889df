"""The next token of every row, each by its own options, and log-probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from gla_ext.decode.sampling import distribution

MOST_LOGPROBS = 20  # limit of the most probable tokens in a reply, with log-probabilities


def choose(
    logits: Tensor,
    uniform: Tensor,
    temperature: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Chooses one token per row, by inverting the distribution function at a given number.

    A row's token depends only on its own logits, number and options, so it does not depend on
    whether other rows have a top_k or top_p.

    Args:
        logits: `[B, vocab_size]`, fp32.
        uniform: fp32 `[B]`, from 0 to below 1.
        temperature: fp32 `[B]`; 0 takes the most probable token.
        top_k: int64 `[B]`, at least 1; vocab_size is all of them. Default: None (all).
        top_p: fp32 `[B]`; 1 is all of them. Default: None (all).

    Returns:
        Tokens, int64 `[B]`, and the largest logit, fp32 `[B]`, as in
        `gla_ext.decode.sampling.choose`.
    """
    divisor = temperature.masked_fill(temperature == 0, 1).unsqueeze(-1)
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


def log_probabilities(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the tokens drawn, `[B]`, and those of the MOST_LOGPROBS most probable
    tokens, `[B, n]`, with their ids; all before temperature, top_k and top_p.
    """
    logits = logits - logits.logsumexp(-1, keepdim=True)
    best, ids = logits.topk(min(MOST_LOGPROBS, logits.shape[-1]))
    return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), best, ids
