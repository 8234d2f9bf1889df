"""Sampling from a GLA language model, one token at a time on the recurrent state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gla_ext.cache import GLACache

if TYPE_CHECKING:
    from gla_ext.model import GLAForCausalLM


@torch.no_grad()
def generate(
    model: GLAForCausalLM,
    input_ids: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_token_id: int | None = None,
    attention_mask: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continues every row of input_ids by sampling from the model.

    The prompt passes through the model once and leaves its recurrent state; each new token then
    costs one step on that state, whatever the length before it.

    Args:
        model: a `GLAForCausalLM`. It is run in the mode, train or eval, it is in.
        input_ids: int64 `[B, T]`, T >= 1.
        max_new_tokens: number of tokens to add.
        temperature: divides the logits; 0 takes the most probable token. Default: 1.0.
        top_k: sample among the k most probable tokens. Default: None (all).
        top_p: sample among the most probable tokens that together reach this probability.
            Default: None (all).
        eos_token_id: a row that drew it is done and filled up with it; when all rows are done
            the result may be shorter. Default: None.
        attention_mask: `[B, T]` of 0 and 1 for prompts padded on the left. Default: None.
        generator: source of randomness, on the model's device. Default: torch's own.

    Returns:
        int64 `[B, <= T + max_new_tokens]`, prompt included.

    Raises:
        ValueError: for an empty prompt, a prompt padded on the right, or options out of range.
    """
    _check(input_ids, max_new_tokens, temperature, top_k, top_p, attention_mask)
    cache = GLACache()
    tokens, mask = input_ids, attention_mask
    pieces = [input_ids]
    done = torch.zeros_like(input_ids[:, :1], dtype=torch.bool)
    for _ in range(max_new_tokens):
        logits = model(
            tokens, attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits[:, -1]
        tokens, mask = sample(logits, temperature, top_k, top_p, generator), None
        if eos_token_id is not None:
            tokens = tokens.masked_fill(done, eos_token_id)
            done |= tokens == eos_token_id
        pieces.append(tokens)
        if eos_token_id is not None and done.all():
            break
    return torch.cat(pieces, dim=1)


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
        temperature, top_k, top_p, generator: as in `generate`; top_k applies before top_p.

    Returns:
        int64 `[B, 1]`.
    """
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits = logits.float()
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature
    probabilities, tokens = logits.softmax(-1).sort(-1, descending=True)
    if top_k is not None:
        probabilities, tokens = probabilities[:, :top_k], tokens[:, :top_k]
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    if top_p is not None:
        # A token stays if those before it do not reach top_p: the first one always does.
        before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities.masked_fill(before >= top_p, 0)
    return tokens.gather(-1, torch.multinomial(probabilities, 1, generator=generator))


def _check(
    input_ids: Tensor,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    attention_mask: Tensor | None,
) -> None:
    """Raises what `generate` documents."""
    if input_ids.ndim != 2 or input_ids.shape[1] < 1:
        raise ValueError(
            "generate: expected input_ids to have shape [B, at least 1], got "
            f"{list(input_ids.shape)}"
        )
    if max_new_tokens < 0:
        raise ValueError(
            f"generate: expected max_new_tokens to be at least 0, got {max_new_tokens}"
        )
    if not temperature >= 0:
        raise ValueError(f"generate: expected temperature to be at least 0, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"generate: expected top_k to be at least 1, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"generate: expected top_p to be in (0, 1], got {top_p}")
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"generate: expected attention_mask to have shape {list(input_ids.shape)}, got "
            f"{list(attention_mask.shape)}"
        )
    if attention_mask is not None and not attention_mask[:, -1].all():
        raise ValueError(
            "generate: expected prompts padded on the left, got an attention_mask that ends with 0"
        )
