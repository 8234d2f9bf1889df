"""Prompts in the form that the model takes: read, packed in one row, and cut into segments."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from gla_ext.decode.sampling import is_int

SEGMENT_TOKENS = 16_384  # enough to fill a large GPU; an activation is about 100 MB
CHUNK = 64  # tokens of a chunk in chunk_gla


@dataclasses.dataclass(frozen=True)
class Segment:
    """Tokens that pass through the model in one call.

    input_ids: int `[N, T]`, or packed, `[1, sum of the lengths]`.
    cu_seqlens: int64 `[N + 1]`, the offsets of packed pieces, or None.
    last: the positions where the pieces end, as logits_to_keep of `GLAForCausalLM.forward`.
    prompts: the indices of the prompts to which the N pieces belong.
    before: number of tokens of its prompt before the first piece; the other pieces are starts.
    longest: tokens of the longest piece.
    ended: number of pieces that end their prompt: N, or all but the last.
    """

    input_ids: Tensor
    cu_seqlens: Tensor | None
    last: int | Tensor
    prompts: range
    before: int
    longest: int
    ended: int

    @property
    def goes_on(self) -> bool:
        return self.before > 0


@dataclasses.dataclass(frozen=True)
class Prompts:
    """The tokens of B prompts, int `[sum of the lengths]`, one after the other, at least one
    each.
    """

    tokens: Tensor
    lengths: Sequence[int]

    @property
    def batch_size(self) -> int:
        return len(self.lengths)

    def segments(self, most: int) -> Iterator[Segment]:
        """Yields the prompts in order, at most `most` tokens at once. `most` is a multiple of 64.

        A prompt is cut only at multiples of 64 of its tokens, so its chunks are the same as uncut.
        """
        start, prompt, done = 0, 0, 0  # tokens of all segments before; of this prompt
        while prompt < self.batch_size:
            first, before, room = prompt, done, most
            counts: list[int] = []
            while prompt < self.batch_size:
                left = self.lengths[prompt] - done
                count = left if left <= room else room // CHUNK * CHUNK
                if count == 0:
                    break
                counts.append(count)
                room -= count
                if count < left:
                    done += count
                    break
                prompt, done = prompt + 1, 0
            stop = start + sum(counts)
            prompts = range(first, first + len(counts))
            input_ids, cu_seqlens, last = _together(self.tokens[start:stop], counts)
            ended = prompt - first
            yield Segment(input_ids, cu_seqlens, last, prompts, before, max(counts), ended)
            start = stop


def _together(tokens: Tensor, counts: list[int]) -> tuple[Tensor, Tensor | None, int | Tensor]:
    """Makes input_ids, cu_seqlens and last of a `Segment`."""
    if min(counts) == max(counts):
        return tokens.view(len(counts), -1), None, 1
    cu_seqlens = torch.tensor([0, *itertools.accumulate(counts)], device=tokens.device)
    return tokens.unsqueeze(0), cu_seqlens, cu_seqlens[1:] - 1


def check_segment_tokens(segment_tokens: int) -> None:
    if not is_int(segment_tokens):
        raise TypeError(f"generate: expected segment_tokens to be an int, got {segment_tokens!r}")
    if segment_tokens < 1 or segment_tokens % CHUNK:
        raise ValueError(
            f"generate: expected segment_tokens to be a multiple of {CHUNK} above 0, got "
            f"{segment_tokens}"
        )


def read_prompts(
    input_ids: Tensor | Sequence[Tensor | Sequence[int]],
    attention_mask: Tensor | None,
    device: torch.device,
    vocab_size: int,
    first: Tensor | None = None,
) -> tuple[Prompts, list[Tensor] | Tensor]:
    """The prompts passed to `generate`, and the same as tensors on `device`; raises the errors that
    `generate` documents for them. `first`, int64 `[B]`, are tokens to put before the prompts, which
    may then be empty.

    Prompts on the host are checked there; for prompts on a GPU the host waits, once.
    """
    fewest = 1 if first is None else 0
    if isinstance(input_ids, Tensor):
        tokens, lengths = _read_tensor(input_ids, attention_mask, fewest)
        given: list[Tensor] | Tensor = input_ids.to(device)
    elif attention_mask is not None:
        raise ValueError("generate: expected no attention_mask beside a list of prompts, got one")
    else:
        tokens, lengths = _read_list(input_ids, fewest)
        given = list(tokens.to(device).split(lengths))
    _check_tokens(tokens, vocab_size)
    tokens = tokens.to(device)
    if first is not None:
        if first.shape[0] != len(lengths):
            raise ValueError(
                f"generate: expected a prompt for each of {first.shape[0]} sequences, got "
                f"{len(lengths)}"
            )
        parts = zip(first.to(device).split(1), tokens.split(lengths), strict=True)
        tokens = torch.cat([*itertools.chain(*parts)])
        lengths = [length + 1 for length in lengths]
    return Prompts(tokens, lengths), given


def _read_tensor(
    input_ids: Tensor, attention_mask: Tensor | None, fewest: int
) -> tuple[Tensor, list[int]]:
    """All tokens in one row, and the lengths of the prompts."""
    if input_ids.ndim != 2 or input_ids.shape[1] < fewest:
        raise ValueError(
            f"generate: expected input_ids to have shape [B, at least {fewest}], got "
            f"{list(input_ids.shape)}"
        )
    B, T = input_ids.shape
    if attention_mask is None:
        return input_ids.flatten(), [T] * B
    if not isinstance(attention_mask, Tensor):
        raise TypeError(
            f"generate: expected attention_mask to be a tensor, got {type(attention_mask)}"
        )
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"generate: expected attention_mask to have shape {list(input_ids.shape)}, got "
            f"{list(attention_mask.shape)}"
        )
    attention_mask = attention_mask.to(input_ids.device)
    if not ((attention_mask == 0) | (attention_mask == 1)).all():
        raise ValueError("generate: expected attention_mask to be of 0 and 1, got other values")
    valid = attention_mask != 0
    lengths = valid.sum(1).tolist()
    if min(lengths, default=fewest) < fewest:
        raise ValueError(
            "generate: expected a token in every prompt, got a row of attention_mask without a 1"
        )
    return input_ids[valid], lengths


def _read_list(given: Sequence[Tensor | Sequence[int]], fewest: int) -> tuple[Tensor, list[int]]:
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise TypeError(
            "generate: expected input_ids to be tokens, a tensor or a list of prompts, got "
            f"{_a_word_for(given)}"
        )
    prompts = [_as_tokens(prompt, n) for n, prompt in enumerate(given)]
    if not prompts:
        raise ValueError("generate: expected at least one prompt, got an empty list")
    for n, prompt in enumerate(prompts):
        if prompt.ndim != 1 or prompt.shape[0] < fewest:
            raise ValueError(
                f"generate: expected prompt {n} to have shape [at least {fewest}], got "
                f"{list(prompt.shape)}"
            )
    # Prompts of several dtypes are promoted; prompts on several devices go to the first one's.
    device = prompts[0].device
    return torch.cat([x.to(device) for x in prompts]), [x.shape[0] for x in prompts]


def _as_tokens(prompt: Tensor | Sequence[int], n: int) -> Tensor:
    if isinstance(prompt, Tensor):
        return prompt
    if not isinstance(prompt, (str, bytes)):
        try:
            tokens = torch.as_tensor(prompt)
        except (TypeError, ValueError, RuntimeError):
            pass
        else:
            return tokens if tokens.numel() else tokens.long()
    raise TypeError(f"generate: expected prompt {n} to be tokens, got {_a_word_for(prompt)}")


def _a_word_for(value: object) -> str:
    if isinstance(value, (str, bytes)):
        return f"a {type(value).__name__}: encode it with the model's tokenizer"
    return f"{type(value)}"


def _check_tokens(tokens: Tensor, vocab_size: int) -> None:
    if tokens.dtype not in (torch.int64, torch.int32):
        raise TypeError(
            f"generate: expected tokens to be torch.int64 or torch.int32, got {tokens.dtype}"
        )
    if tokens.numel() == 0:
        return
    for extreme in torch.stack(torch.aminmax(tokens)).tolist():
        if not 0 <= extreme < vocab_size:
            raise ValueError(f"generate: expected tokens from 0 to {vocab_size - 1}, got {extreme}")
