"""Text from a GLA language model: a packed prefill, then one token step per token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypedDict, Unpack, overload

import torch
from torch import Tensor

from gla_ext.cache import GLACache, StaticGLACache
from gla_ext.decode._capture import wait_for_replays
from gla_ext.decode._loop import device_of
from gla_ext.decode._prompts import SEGMENT_TOKENS, Prompts, check_segment_tokens, read_prompts
from gla_ext.decode.decoder import Decoder, uses_graph
from gla_ext.decode.language_model import LanguageModel
from gla_ext.decode.sampling import Sampling, check_int, read_end_tokens

STEPS_BETWEEN_LOOKS = 16  # checks for done rows, at which the host waits for the GPU
# Defaults of the options that a decoder has too: temperature, top_k, top_p, eos_token_id, generator
# and cuda_graph.
_UNNAMED = (1.0, None, None, None, None, None)


class _Options(TypedDict, total=False):
    """Keyword-only options of both overloads of `generate`, for type checkers."""

    top_p: float | None
    eos_token_id: int | Sequence[int] | None
    attention_mask: Tensor | None
    generator: torch.Generator | None
    cuda_graph: bool | None
    past_key_values: GLACache | None
    segment_tokens: int
    decoder: Decoder | None


@overload
def generate(
    model: LanguageModel,
    input_ids: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    **options: Unpack[_Options],
) -> Tensor: ...
@overload
def generate(
    model: LanguageModel,
    input_ids: Sequence[Tensor | Sequence[int]],
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    **options: Unpack[_Options],
) -> list[Tensor]: ...
@torch.no_grad()
def generate(
    model: LanguageModel,
    input_ids: Tensor | Sequence[Tensor | Sequence[int]],
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    attention_mask: Tensor | None = None,
    generator: torch.Generator | None = None,
    cuda_graph: bool | None = None,
    past_key_values: GLACache | None = None,
    segment_tokens: int = SEGMENT_TOKENS,
    decoder: Decoder | None = None,
) -> Tensor | list[Tensor]:
    """Continues every prompt by sampling from the model.

    The prompts pass through the model once; prompts of different lengths are packed in one row
    without padding. This gives their recurrent states. Each new token then costs one step on these
    states, with the same time and memory at any length. On a GPU a step is one CUDA graph, which is
    captured in this call and dropped after it. For many calls, make a `Decoder`, which keeps graph
    and buffers, and pass it:

        decoder = Decoder(model, batch_size=8, temperature=0)
        for prompts in batches:  # of 8
            tokens = model.generate(prompts, 32, decoder=decoder)

    Several threads may generate from one model, each on its own stream, but not under autocast,
    whose cache of cast weights all threads share. While one captures, no other thread may wait for
    the whole device (`torch.cuda.synchronize`), which CUDA then rejects.

    Long or many prompts pass in segments, so that memory does not grow with them. Inside
    `batch_invariant` the operators give the same bits as without segments.

    With a cache, a dialogue continues from its states, and a call only costs its new tokens:

        cache = GLACache()
        tokens = model.generate([first], 100, eos_token_id=2, past_key_values=cache)
        tokens = model.generate([second], 100, eos_token_id=2, past_key_values=cache)

    When a call returns, the model has not yet processed the last token drawn. The cache holds it as
    `cache.pending`, and the next call processes it first, before its prompts.

    Args:
        model: a `GLAForCausalLM`. Its mode, train or eval, is not changed.
        input_ids: int64 `[B, T]`, T >= 1, or a list of B prompts of any lengths from 1, each an
            int64 tensor `[T_b]` or a list of ints.
        max_new_tokens: number of tokens to add.
        temperature: divides the logits. 0, or a number that fp32 rounds to 0, takes the most
            probable token; inf draws uniformly among all tokens with a probability above 0.
            Default: 1.0.
        top_k: sample from the k most probable tokens. Default: None (all).
        top_p: sample from the most probable tokens that together reach this probability, after
            top_k (Holtzman et al., 2020, arXiv:1904.09751). Default: None (all).
        eos_token_id: a token, or a list of tokens; a row that drew one is done. Default: None.
        attention_mask: `[B, T]` of 0 and 1, if input_ids is a tensor; tokens at a 0 are left out,
            at any position. Default: None.
        generator: source of randomness, on the model's device. Default: torch's own.
        cuda_graph: whether a step runs as a CUDA graph, if one can be captured, see `Decoder`.
            Default: None (on a CUDA device).
        past_key_values: a cache, empty or with B sequences. The prompts start from its states, and
            the states after all tokens but the last are stored in it. A prompt may be empty if
            another `generate` has stored its last token. With max_new_tokens = 0 only the prompts
            are processed. Default: None.
        segment_tokens: the most tokens of prompts in one call of the model; a multiple of 64, at
            which prompts are cut. Default: 16,384.
        decoder: a `Decoder` of this model with a row for each prompt. Its options replace
            temperature, top_k, top_p, eos_token_id, generator and cuda_graph, which must not be
            given; its rows start again. Default: None (a new one for this call).

    Returns:
        The prompts and the new tokens, on the model's device. If input_ids is a tensor: int64 `[B,
        <= T + max_new_tokens]`, new tokens from column T on. A row that is done is filled with the
        token that ended it, and columns in which all rows are done are left out. If input_ids is a
        list: a list of B int64 tensors `[<= T_b + max_new_tokens]`, each up to the token that ended
        it.

    Raises:
        ValueError: for a prompt without a token, tokens outside of the vocabulary, shapes that do
            not fit, options out of range, a cache of other sequences or of another model, a decoder
            of another model or number of rows, or options given together with a decoder.
        TypeError: for tokens that are neither int64 nor int32, options that are not numbers, a
            max_new_tokens, top_k, eos_token_id or segment_tokens that is not an int, and a cache
            that is not a `GLACache`.
        RuntimeError: if the model's logits have NaN or inf, or are -inf for all tokens.
        ChangedError: if it notices a change of the model since the decoder's graph was captured.
    """
    options = (temperature, top_k, top_p, eos_token_id, generator, cuda_graph)
    _check_options(model, max_new_tokens, segment_tokens, decoder, options)
    prompts, given = _read(model, input_ids, attention_mask, past_key_values, decoder)
    if prompts.batch_size == 0 or (max_new_tokens == 0 and past_key_values is None):
        return given.clone() if isinstance(given, Tensor) else [prompt.clone() for prompt in given]
    if decoder is None:
        decoder = _make(model, prompts, max_new_tokens, options)
    _start(decoder, prompts, past_key_values, segment_tokens)
    new = _continue(decoder, max_new_tokens)
    lengths = _lengths(new, decoder.end_tokens)
    if past_key_values is not None:
        passed = max(prompts.lengths) + max(0, max(lengths) - 1)
        decoder.save(past_key_values, passed, drew=max_new_tokens > 0)
    if isinstance(given, Tensor):
        return torch.cat([given, new[:, : max(lengths)]], 1)
    return [torch.cat([a, b[:n]]) for a, b, n in zip(given, new, lengths, strict=True)]


def generate_stream(
    model: LanguageModel,
    input_ids: Tensor | Sequence[Tensor | Sequence[int]],
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    attention_mask: Tensor | None = None,
    generator: torch.Generator | None = None,
    cuda_graph: bool | None = None,
    past_key_values: GLACache | None = None,
    segment_tokens: int = SEGMENT_TOKENS,
    decoder: Decoder | None = None,
) -> Iterator[Tensor]:
    """Like `generate`, but yields the tokens one by one.

        for tokens in generate_stream(model, [[1, 5, 7], [1, 9]], 100, temperature=0.8):
            print(tokens.tolist())  # the next token of both rows

    On a GPU the next step already runs while the caller has a token, except with past_key_values.
    That cache gets the states at the end, or when the iterator is closed: the states for the tokens
    yielded so far.

    The model must stay as it is until the iterator ends.

    The arguments and their errors, which are raised at the call, are those of `generate`. With
    max_new_tokens = 0 nothing is processed. Autocast and `batch_invariant` apply as they are set
    where the iterator is advanced.

    Yields:
        int64 `[B]` on the CPU, one token of every row; a row that is done repeats its last token.
        Ends after max_new_tokens, or when all rows are done. Stacked, they are the new tokens that
        `generate` returns.
    """
    options = (temperature, top_k, top_p, eos_token_id, generator, cuda_graph)
    _check_options(model, max_new_tokens, segment_tokens, decoder, options)
    prompts, _ = _read(model, input_ids, attention_mask, past_key_values, decoder)
    if max_new_tokens == 0 or prompts.batch_size == 0:
        return iter(())
    args = (prompts, max_new_tokens, past_key_values, segment_tokens)
    return _stream(decoder, model, options, *args)


def _check_options(
    model: LanguageModel,
    max_new_tokens: int,
    segment_tokens: int,
    decoder: Decoder | None,
    options: tuple[Any, ...],
) -> None:
    temperature, top_k, top_p, eos_token_id, _, cuda_graph = options
    Sampling(temperature, top_k, top_p)
    read_end_tokens(eos_token_id, model.config.vocab_size)
    check_int("generate", "max_new_tokens", max_new_tokens, 0)
    check_segment_tokens(segment_tokens)
    uses_graph(model, cuda_graph)
    if decoder is not None and options != _UNNAMED:
        raise ValueError(
            "generate: expected no temperature, top_k, top_p, eos_token_id, generator or "
            "cuda_graph beside decoder, which has its own"
        )


def _make(model: LanguageModel, prompts: Prompts, count: int, options: tuple[Any, ...]) -> Decoder:
    """The decoder of a call, without a graph if there are no token steps."""
    *others, cuda_graph = options
    return Decoder(model, prompts.batch_size, *others, cuda_graph if count > 1 else False)


def _read(
    model: LanguageModel,
    input_ids: Tensor | Sequence[Tensor | Sequence[int]],
    attention_mask: Tensor | None,
    cache: GLACache | None,
    decoder: Decoder | None,
) -> tuple[Prompts, Tensor | list[Tensor]]:
    """The prompts, with the cache's pending tokens before them; raises the errors of `generate`."""
    first = None
    if cache is not None:
        if isinstance(cache, StaticGLACache) or not isinstance(cache, GLACache):
            raise TypeError(
                f"generate: expected past_key_values to be a GLACache, got {type(cache)}"
            )
        first = cache.pending
    vocab_size = model.config.vocab_size
    prompts, given = read_prompts(input_ids, attention_mask, device_of(model), vocab_size, first)
    if cache is not None and len(cache) > 0:
        if len(cache) != model.config.num_hidden_layers:
            raise ValueError(
                "generate: expected past_key_values of num_hidden_layers = "
                f"{model.config.num_hidden_layers}, got {len(cache)}"
            )
        B = cache.num_sequences
        if prompts.batch_size != B:
            raise ValueError(
                f"generate: expected a prompt for each of {B} sequences, got {prompts.batch_size}"
            )
    if decoder is not None:
        decoder.check(model, prompts.batch_size)
    return prompts, given


def _start(decoder: Decoder, prompts: Prompts, cache: GLACache | None, segment_tokens: int) -> None:
    """Draws the first tokens, starting from the states of the cache if it has any."""
    keep = cache is not None and len(cache) > 0
    if keep:
        decoder.load(cache)
    decoder.start(prompts, segment_tokens, keep=keep)


def _continue(decoder: Decoder, count: int) -> Tensor:
    """New tokens `[B, <= count]`, the first being the decoder's; fewer when all rows are done."""
    new = decoder.tokens.new_empty(decoder.tokens.shape[0], count)
    between = STEPS_BETWEEN_LOOKS if new.is_cuda else 1
    for n in range(count):
        if decoder.end_tokens and n > 0 and n % between == 0:
            done, finite = torch.stack([decoder.done.all(), decoder.finite.all()]).tolist()
            if done or not finite:
                new = new[:, :n]
                break
        new[:, n] = decoder.step() if n > 0 else decoder.tokens
    if count > 0:
        _check_finite(decoder.finite)
    return new


def _check_finite(finite: Tensor) -> None:
    if not finite.all():
        rows = finite.logical_not().nonzero().flatten().tolist()
        raise RuntimeError(
            "generate: expected the model's logits to be finite, got NaN or inf, or -inf of all "
            f"tokens, in rows {rows}"
        )


def _lengths(new: Tensor, ends: tuple[int, ...]) -> list[int]:
    """Number of new tokens of every row, up to the first that ends it."""
    B, count = new.shape
    if not ends or count == 0:
        return [count] * B
    drawn = torch.isin(new, torch.tensor(ends, device=new.device))
    return torch.where(drawn.any(1), drawn.int().argmax(1) + 1, count).tolist()


def _stream(
    decoder: Decoder | None,
    model: LanguageModel,
    options: tuple[Any, ...],
    prompts: Prompts,
    count: int,
    cache: GLACache | None,
    segment_tokens: int,
) -> Iterator[Tensor]:
    """The iterator that `generate_stream` returns."""
    if decoder is None:
        decoder = _make(model, prompts, count, options)
    _start(decoder, prompts, cache, segment_tokens)
    steps = 0

    def save() -> None:
        if cache is not None:
            decoder.save(cache, max(prompts.lengths) + steps)

    try:
        for more in reversed(range(count)):
            ahead = decoder.tokens.is_cuda and more > 0 and cache is None
            tokens, done, sums = _fetch(decoder, ahead)
            _check_finite(sums.isfinite())
            yield tokens
            if done.all():
                break
            if more and not ahead:
                decoder.step()
                steps += 1
        save()
    except GeneratorExit:
        save()
        raise
    finally:
        wait_for_replays(decoder.tokens.device)  # the graph may be freed after this


def _fetch(decoder: Decoder, step: bool) -> list[Tensor]:
    """Copies tokens, done and `DecodeLoop.sums` to the host. With `step`, a GPU gets its next step
    before the host waits for them.
    """
    wanted = [decoder.tokens, decoder.done, decoder._loop.sums]
    if not decoder.tokens.is_cuda:
        return [x.clone() for x in wanted]
    found = [x.to("cpu", non_blocking=True) for x in wanted]
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(decoder.tokens.device))
    if step:
        decoder.step()
    arrived.synchronize()
    return found
