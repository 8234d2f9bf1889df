"""Text from a GLA language model: a packed prefill, then one step a token on the states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gla_ext._decode_loop import device_of
from gla_ext._prompts import Prompts, read_prompts
from gla_ext.decode import Decoder, uses_graph
from gla_ext.sampling import Sampling, is_int

if TYPE_CHECKING:
    from gla_ext.model import GLAForCausalLM

STEPS_BETWEEN_LOOKS = 16  # at which rows are done; a look makes the host wait for the GPU


@torch.no_grad()
def generate(
    model: GLAForCausalLM,
    input_ids: Tensor | Sequence[Tensor | Sequence[int]],
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_token_id: int | None = None,
    attention_mask: Tensor | None = None,
    generator: torch.Generator | None = None,
    cuda_graph: bool | None = None,
) -> Tensor | list[Tensor]:
    """Continues every prompt by sampling from the model.

    The prompts pass through the model once, those of different lengths packed in one row without
    padding, and leave their recurrent states; each new token then costs one step on these, in the
    same time and memory at any length. On a GPU a step is one CUDA graph. The last two graphs, with
    their states, stay with the model for calls with the same batch size and kind of sampling, until
    its weights move or `gla_ext.decode.free_decoders(model)`; `Decoder` is the form in which a
    server holds one itself.

    Args:
        model: a `GLAForCausalLM`. It is run in the mode, train or eval, it is in.
        input_ids: int64 `[B, T]`, T >= 1, or a list of B prompts of any lengths from 1, each an
            int64 tensor `[T_b]` or a list of ints.
        max_new_tokens: number of tokens to add.
        temperature: divides the logits; 0 takes the most probable token. Default: 1.0.
        top_k: sample among the k most probable tokens. Default: None (all).
        top_p: sample among the most probable tokens that together reach this probability, after
            top_k. Default: None (all).
        eos_token_id: a row that drew it is done. Default: None.
        attention_mask: `[B, T]` of 0 and 1 beside a tensor; tokens at a 0 are left out, wherever
            they stand. Default: None.
        generator: source of randomness, on the model's device. Default: torch's own.
        cuda_graph: whether a step is a CUDA graph. Default: None (on a CUDA device).

    Returns:
        The prompts, continued, on the model's device. Of a tensor: int64 `[B, <= T +
        max_new_tokens]`, new tokens from column T on; a row that is done is filled up with
        eos_token_id, and columns in which all are done are left out. Of a list: a list of B int64
        tensors `[<= T_b + max_new_tokens]`, each up to its eos_token_id.

    Raises:
        ValueError: for a prompt without a token, shapes that do not fit, options out of range.
        TypeError: for tokens that are neither int64 nor int32, options that are no numbers, and a
            max_new_tokens, top_k or eos_token_id that is no int.
    """
    sampling = Sampling(temperature, top_k, top_p)
    _check_eos(eos_token_id)
    prompts, given = _read(model, input_ids, attention_mask, max_new_tokens, cuda_graph)
    if max_new_tokens == 0 or prompts.batch_size == 0:
        return given.clone() if isinstance(given, Tensor) else [prompt.clone() for prompt in given]
    form = (model, prompts.batch_size, sampling, eos_token_id, generator, cuda_graph)
    with Decoder.borrowed(*form) as decoder:
        new = _continue(decoder, prompts, max_new_tokens, eos_token_id is not None)
    if eos_token_id is None:
        lengths = [new.shape[1]] * new.shape[0]
    else:
        drawn = new == eos_token_id
        ends = torch.where(drawn.any(1), drawn.int().argmax(1) + 1, new.shape[1])
        lengths = ends.tolist()
    if isinstance(given, Tensor):
        return torch.cat([given, new[:, : max(lengths)]], 1)
    return [torch.cat([a, b[:n]]) for a, b, n in zip(given, new, lengths, strict=True)]


def generate_stream(
    model: GLAForCausalLM,
    input_ids: Tensor | Sequence[Tensor | Sequence[int]],
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_token_id: int | None = None,
    attention_mask: Tensor | None = None,
    generator: torch.Generator | None = None,
    cuda_graph: bool | None = None,
) -> Iterator[Tensor]:
    """`generate`, token by token as they come.

        for tokens in generate_stream(model, [[1, 5, 7], [1, 9]], 100, temperature=0.8):
            print(tokens.tolist())  # the next token of both rows

    On a GPU the next step is under way while the caller has a token.

    The arguments, and what is raised for them at the call, are those of `generate`. Autocast and
    `batch_invariant` are those of where the iterator is advanced.

    Yields:
        int64 `[B]` on the CPU, one token of every row; a row that is done gets eos_token_id. Ends
        after max_new_tokens, or when all rows are done. Stacked they are the new tokens that
        `generate` returns.
    """
    sampling = Sampling(temperature, top_k, top_p)
    _check_eos(eos_token_id)
    prompts, _ = _read(model, input_ids, attention_mask, max_new_tokens, cuda_graph)
    if max_new_tokens == 0 or prompts.batch_size == 0:
        return iter(())
    form = (model, prompts.batch_size, sampling, eos_token_id, generator, cuda_graph)
    return _stream(form, prompts, max_new_tokens, eos_token_id)


def _read(
    model: GLAForCausalLM,
    input_ids: Tensor | Sequence[Tensor | Sequence[int]],
    attention_mask: Tensor | None,
    max_new_tokens: int,
    cuda_graph: bool | None,
) -> tuple[Prompts, Tensor | list[Tensor]]:
    """The prompts; raises what `generate` documents."""
    if not is_int(max_new_tokens):
        raise TypeError(f"generate: expected max_new_tokens to be an int, got {max_new_tokens!r}")
    if max_new_tokens < 0:
        raise ValueError(
            f"generate: expected max_new_tokens to be at least 0, got {max_new_tokens}"
        )
    uses_graph(model, cuda_graph)
    return read_prompts(input_ids, attention_mask, device_of(model))


def _check_eos(eos_token_id: int | None) -> None:
    if eos_token_id is not None and not isinstance(eos_token_id, int):
        raise TypeError(
            f"generate: expected eos_token_id to be an int or None, got {eos_token_id!r}"
        )


def _continue(decoder: Decoder, prompts: Prompts, count: int, may_end: bool) -> Tensor:
    """New tokens `[B, <= count]`; fewer when all rows are done."""
    first = decoder.start(prompts)
    new = first.new_empty(first.shape[0], count)
    new[:, 0] = first
    between = STEPS_BETWEEN_LOOKS if new.is_cuda else 1
    for n in range(1, count):
        if may_end and n % between == 0 and decoder.done.all():
            return new[:, :n]
        new[:, n] = decoder.step()
    return new


def _stream(
    form: tuple, prompts: Prompts, count: int, eos_token_id: int | None
) -> Iterator[Tensor]:
    """What `generate_stream` returns, from the arguments of `Decoder.borrowed`."""
    with Decoder.borrowed(*form) as decoder:
        decoder.start(prompts)
        done = torch.zeros(prompts.batch_size, dtype=torch.bool, device="cpu")
        for more in reversed(range(count)):
            ahead = decoder.tokens.is_cuda and more > 0
            tokens = _fetch(decoder, ahead)
            yield tokens
            if eos_token_id is not None:
                done |= tokens == eos_token_id
                if done.all():
                    return
            if more and not ahead:
                decoder.step()


def _fetch(decoder: Decoder, step: bool) -> Tensor:
    """The tokens on the host; on a GPU, `step` queues the next ones before it waits for these."""
    if not decoder.tokens.is_cuda:
        return decoder.tokens.clone()
    tokens = decoder.tokens.to("cpu", non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(decoder.tokens.device))
    if step:
        decoder.step()
    arrived.synchronize()
    return tokens
