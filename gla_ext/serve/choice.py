"""The next token of every row, each by its own options, and log-probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

MOST_LOGPROBS = 20  # most probable tokens whose log-probabilities a request may have


def choose(
    logits: Tensor,
    uniform: Tensor,
    temperature: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
) -> Tensor:
    """One token a row, by inverting the distribution function at the number given.

    A row's token depends on its own logits, number and options alone, and so not on whether other
    rows have a top_k or top_p.

    Args:
        logits: `[B, vocab_size]`, fp32.
        uniform: fp32 `[B]`, from 0 to below 1.
        temperature: fp32 `[B]`; 0 takes the most probable token.
        top_k: int64 `[B]`, at least 1; vocab_size is all of them. Default: None (all).
        top_p: fp32 `[B]`; 1 is all of them. Default: None (all).

    Returns:
        int64 `[B]`.
    """
    greedy = logits.argmax(-1)
    # Differences to the largest logit, which divided by a small temperature may become -inf.
    scores = logits - logits.amax(-1, keepdim=True)
    scores = scores / torch.where(temperature > 0, temperature, 1).unsqueeze(-1)
    chosen = _invert(scores.softmax(-1), uniform)
    if top_k is not None and top_p is not None:
        filtered = (top_k < logits.shape[-1]) | (top_p < 1)
        ordered, tokens = scores.sort(stable=True, dim=-1, descending=True)
        p = ordered.softmax(-1)
        rank = torch.arange(p.shape[-1], device=p.device)
        # A token stays if those before it do not reach top_p: the first one always does.
        leaves = (p.cumsum(-1) - p >= top_p.unsqueeze(-1)) | (rank >= top_k.unsqueeze(-1))
        leaves[:, 0] = False
        place = _invert(p.masked_fill(leaves, 0), uniform)
        chosen = torch.where(filtered, tokens.gather(-1, place.unsqueeze(-1)).squeeze(-1), chosen)
    return torch.where(temperature > 0, chosen, greedy)


def _invert(p: Tensor, uniform: Tensor) -> Tensor:
    """The first index at which the sum of p `[B, n]` passes uniform times the whole."""
    sums = p.cumsum(-1)
    passed = (sums > uniform.unsqueeze(-1) * sums[:, -1:]) & (p > 0)
    return passed.int().argmax(-1)


def log_probabilities(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of the tokens drawn `[B]`, and the MOST_LOGPROBS most probable ones `[B, n]` with their ids,
    before temperature, top_k and top_p."""
    logits = logits - logits.logsumexp(-1, keepdim=True)
    best, ids = logits.topk(min(MOST_LOGPROBS, logits.shape[-1]))
    return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), best, ids
