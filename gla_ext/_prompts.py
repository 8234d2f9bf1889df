"""Prompts as the model takes them: a rectangle of tokens, or packed in one row."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Prompts:
    """The tokens of B prompts.

    input_ids: int `[B, T]`, or packed, `[1, sum of the lengths]`.
    cu_seqlens: int64 `[B + 1]`, the offsets of packed prompts, or None.
    last: where the prompts end, as `GLAForCausalLM.forward` takes logits_to_keep.
    batch_size: B.
    """

    input_ids: Tensor
    cu_seqlens: Tensor | None
    last: int | Tensor
    batch_size: int

    @classmethod
    def pack(cls, packed: Tensor, lengths: Tensor) -> Prompts:
        """From the tokens of all prompts, `[sum of lengths]`, and lengths, int64 `[B]`."""
        cu_seqlens = F.pad(lengths.cumsum(0), (1, 0))
        return cls(packed.unsqueeze(0), cu_seqlens, cu_seqlens[1:] - 1, lengths.shape[0])


def read_prompts(
    input_ids: Tensor | Sequence[Tensor | Sequence[int]],
    attention_mask: Tensor | None,
    device: torch.device,
) -> tuple[Prompts, list[Tensor] | Tensor]:
    """The prompts that `generate` was given, and the same as tensors on `device`.

    Raises:
        TypeError: tokens that are neither int64 nor int32.
        ValueError: shapes that do not fit, and prompts without a token.
    """
    if not isinstance(input_ids, Tensor):
        if attention_mask is not None:
            raise ValueError(
                "generate: expected no attention_mask beside a list of prompts, got one"
            )
        return _read_list(input_ids, device)
    if input_ids.ndim != 2 or input_ids.shape[1] < 1:
        raise ValueError(
            "generate: expected input_ids to have shape [B, at least 1], got "
            f"{list(input_ids.shape)}"
        )
    _check_tokens(input_ids)
    input_ids = input_ids.to(device)
    whole = Prompts(input_ids, None, 1, input_ids.shape[0])
    if attention_mask is None:
        return whole, input_ids
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"generate: expected attention_mask to have shape {list(input_ids.shape)}, got "
            f"{list(attention_mask.shape)}"
        )
    valid = attention_mask.to(device) != 0
    if valid.all():
        return whole, input_ids
    lengths = valid.sum(1)
    if not lengths.all():
        raise ValueError(
            "generate: expected a token in every prompt, got a row of attention_mask without a 1"
        )
    return Prompts.pack(input_ids[valid], lengths), input_ids


def _read_list(
    given: Sequence[Tensor | Sequence[int]], device: torch.device
) -> tuple[Prompts, list[Tensor]]:
    prompts = [torch.as_tensor(prompt, device=device) for prompt in given]
    if not prompts:
        raise ValueError("generate: expected at least one prompt, got an empty list")
    for n, prompt in enumerate(prompts):
        if prompt.ndim != 1 or prompt.shape[0] < 1:
            raise ValueError(
                f"generate: expected prompt {n} to have shape [at least 1], got "
                f"{list(prompt.shape)}"
            )
    lengths = [prompt.shape[0] for prompt in prompts]
    # Those of several dtypes have one together.
    packed = torch.cat(prompts)
    _check_tokens(packed)
    if min(lengths) == max(lengths):
        return Prompts(packed.view(len(prompts), -1), None, 1, len(prompts)), prompts
    return Prompts.pack(packed, torch.tensor(lengths, device=device)), prompts


def _check_tokens(input_ids: Tensor) -> None:
    if input_ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(
            f"generate: expected tokens to be torch.int64 or torch.int32, got {input_ids.dtype}"
        )
