"""Decoding a batch step by step in fixed buffers; on a GPU a step is a CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gla_ext.cache import GLACache
from gla_ext.decode._capture import can_capture
from gla_ext.decode._loop import DecodeLoop, check_place, device_of, place_of
from gla_ext.decode._prompts import SEGMENT_TOKENS, Prompts, check_segment_tokens, read_prompts
from gla_ext.decode._stamp import Stamp
from gla_ext.decode.language_model import LanguageModel
from gla_ext.decode.sampling import Sampling, read_end_tokens
from gla_ext.layers._options import check_sizes
from gla_ext.layers.attention import Attention


class Decoder:
    """Decodes B sequences of one model together, one token each per step.

    `generate` uses this class; use it directly in a server, or pass one to many calls of
    `generate`. States, tokens and options are in buffers that never move. On a GPU a step can
    therefore be one CUDA graph, captured in the constructor, and memory does not grow with the
    number of tokens. Attention layers of a hybrid model read and keep at most twice the tokens of
    the longest row: their room is a power of two of tokens, at least 256, and each size needs its
    own graph. `prefill(prompts, rows=...)` puts new sequences in the place of finished ones, while
    the other rows wait.

    With more than 32 rows on a CUDA device a step reads the recurrent states and keeps its token
    beside them; it writes a state only once in 16 tokens. These tokens take memory: see "Tokens
    beside the states" on the page on serving. In batch-invariant mode, under autocast, and for
    heads of more than 512 keys, every step writes the states.

        decoder = Decoder(model, batch_size=2, temperature=0.8, top_k=50)
        first = decoder.prefill([[1, 5, 7], [1, 9]])  # [2], the first token of each
        for _ in range(99):
            tokens = decoder.step()  # [2], the same tensor every time

    Call `refresh` after the model changed: rows have states of the old model, and a graph repeats
    what was recorded. Until then `prefill` raises ChangedError if it notices a change. It does not
    notice all changes, such as those of `AdamW(fused=True)`: see there. `step` does not check.

    Only one thread at a time may use a decoder, on one CUDA stream or on streams that wait for each
    other. Several threads may share the model, each with its own decoder, but not under autocast,
    whose cache of cast weights all threads share. While a decoder is made, no other thread may wait
    for the whole device (`torch.cuda.synchronize`), which CUDA rejects during a capture; all other
    work can go on. From the first decoder on, a patch of `torch.cuda.CUDAGraph.capture_begin` makes
    captures in the whole process begin one at a time.

    Args:
        model: a `GLAForCausalLM`. Its mode, train or eval, is not changed.
        batch_size: B, number of rows.
        temperature, top_k, top_p: as in `generate`.
        eos_token_id: a token, or a list of tokens. A row that drew one is done: from then on its
            token and its states do not change. Default: None.
        generator: source of randomness, on the model's device. Default: torch's own.
        cuda_graph: whether steps run as a CUDA graph, if one can be captured. That is not possible
            with PYTORCH_NO_CUDA_MEMORY_CACHING in the environment, or, before torch 2.14, for a
            step that draws random numbers itself, for example for dropout. Default: None (on a
            CUDA device).
        compiled: whether a step is compiled by `torch.compile`, which fuses its many small kernels
            but first takes a minute. Prompts are not compiled. Default: False.

    Attributes:
        tokens: int64 `[B]`, the last token of every row.
        done: bool `[B]`, which rows have drawn one of eos_token_id.
        finite: bool `[B]`, which rows' logits were finite at every token since the prompt. Other
            rows had a NaN or inf, or -inf for all tokens, and their tokens have no meaning.
        end_tokens: the tokens of eos_token_id, a tuple.

    Raises the errors of `generate`, and NotImplementedError for compiled with a model that has
    attention.
    """

    def __init__(
        self,
        model: LanguageModel,
        batch_size: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        generator: torch.Generator | None = None,
        cuda_graph: bool | None = None,
        compiled: bool = False,
    ) -> None:
        check_sizes("Decoder", batch_size=batch_size)
        sampling = Sampling(temperature, top_k, top_p)
        self.end_tokens = read_end_tokens(eos_token_id, model.config.vocab_size)
        if compiled and any(isinstance(module, Attention) for module in model.modules()):
            raise NotImplementedError(
                "Decoder: compiled = True is not implemented for a model with attention, whose "
                "steps have other shapes as rows grow"
            )
        self.model, self._generator = model, generator
        # The shapes of a step never change.
        self._stepping = torch.compile(model, dynamic=False) if compiled else model
        self._started: set[int] = set()  # rows that have had a prompt
        self._place = place_of(model)
        self._stamp: Stamp | None = None  # of the model that made graphs and rows
        self._loop = DecodeLoop(model, batch_size, sampling)
        if uses_graph(model, cuda_graph, "Decoder"):
            self._loop.capture(model, self._stepping)
            self._stamp = Stamp(model)
        self._loop.set_options(sampling, self.end_tokens)

    @property
    def tokens(self) -> Tensor:
        return self._loop.tokens

    @property
    def done(self) -> Tensor:
        return self._loop.done

    @property
    def finite(self) -> Tensor:
        return self._loop.sums.isfinite()

    @property
    def nbytes(self) -> int:
        """Memory of the states and of the tokens beside them, bytes."""
        return self._loop.cache.nbytes

    def prefill(
        self,
        input_ids: Tensor | Sequence[Tensor | Sequence[int]],
        attention_mask: Tensor | None = None,
        rows: Tensor | Sequence[int] | None = None,
        keep: bool = False,
        segment_tokens: int = SEGMENT_TOKENS,
    ) -> Tensor:
        """Starts or continues sequences: processes their prompts and draws a token of each.

        With keep, the next turn of a dialogue only costs its own tokens. The model has not yet
        processed the last token that a row drew; this call does so, before the prompt.

        Args:
            input_ids: as in `generate`; prompts of different lengths are packed.
            attention_mask: as in `generate`. Default: None.
            rows: the rows for the N prompts, N distinct indices from 0 to B - 1; other rows do not
                change. Default: None (all B).
            keep: continue from the rows' states, done or not; a prompt may be empty.
                Default: False.
            segment_tokens: as in `generate`. Default: 16,384.

        Returns:
            int64 `[N]`, the tokens.

        Raises:
            ChangedError: if it notices that the model has changed since the first prompt or graph,
                or since `refresh`.
            ValueError: for rows that are not distinct or do not exist, another number of prompts,
                or, with keep, rows that have had no prompt.

        Invalid prompts and segment_tokens raise the errors of `generate`.
        """
        check_segment_tokens(segment_tokens)
        if self._stamp is not None:
            self._stamp.check("Decoder")
        device, B = self.tokens.device, self.tokens.shape[0]
        chosen = list(range(B)) if rows is None else torch.as_tensor(rows).tolist()
        if rows is not None:
            if len(set(chosen)) < len(chosen) or not all(0 <= row < B for row in chosen):
                raise ValueError(
                    f"Decoder: expected rows to be distinct, from 0 to {B - 1}, got {chosen}"
                )
            rows = torch.tensor(chosen, dtype=torch.long, device=device)
        first = None
        if keep:
            if new := sorted(set(chosen) - self._started):
                raise ValueError(
                    f"Decoder: expected rows that have had a prompt with keep = True, got {new}"
                )
            first = self.tokens if rows is None else self.tokens[rows]
        vocab_size = self.model.config.vocab_size
        prompts, _ = read_prompts(input_ids, attention_mask, device, vocab_size, first)
        if prompts.batch_size != len(chosen):
            raise ValueError(f"Decoder: expected {len(chosen)} prompts, got {prompts.batch_size}")
        tokens = self.start(prompts, segment_tokens, rows, keep)
        self._started.update(chosen)
        if self._stamp is None:
            self._stamp = Stamp(self.model)
        return tokens

    def refresh(self, keep_running: bool = False) -> None:
        """Tells the decoder that the model has changed.

        If only the values of tensors changed, the graph is kept; the check takes a few
        milliseconds. If tensors have moved in memory, if modules, attributes or hooks were
        replaced, or if attributes cannot be compared (torchao's weights, DTensors, closures), the
        next step captures a new graph.

        Args:
            keep_running: rows continue from their states, which the old model computed.
                Default: False (rows are as before their first prompt).

        Raises:
            ValueError: if the model's device, dtype or vocabulary size has changed. Make a new
                decoder instead.
        """
        self._loop.refresh(self.model)
        if not keep_running:
            self._started.clear()
        check_place(self.model, self._place, "Decoder")
        if self._stamp is not None:
            self._stamp = self._stamp.renewed(self.model)

    def check(self, model: LanguageModel, batch_size: int) -> None:
        """Raises the errors that `generate` documents for a decoder that does not fit, and
        ChangedError.
        """
        if model is not self.model:
            raise ValueError("generate: expected a decoder of this model, got one of another")
        if batch_size != self.tokens.shape[0]:
            raise ValueError(
                f"generate: expected a decoder of {batch_size} rows, as there are prompts, got "
                f"{self.tokens.shape[0]}"
            )
        if self._stamp is not None:
            self._stamp.check("generate")

    @torch.no_grad()
    def start(
        self,
        prompts: Prompts,
        segment_tokens: int,
        rows: Tensor | None = None,
        keep: bool = False,
    ) -> Tensor:
        """`prefill` for prompts that have been read already."""
        if rows is None:
            self._started.update(range(prompts.batch_size))
        self._loop.draw(self._generator)
        return self._loop.prefill(self.model, prompts, rows, segment_tokens, keep)

    def load(self, cache: GLACache) -> None:
        """Loads the states of a cache."""
        self._loop.cache.load(cache)

    def save(self, cache: GLACache, offset: int, drew: bool = True) -> None:
        """Saves the states to a cache, `offset` tokens further, and the last tokens if any were
        drawn.
        """
        self._loop.cache.save(cache, offset)
        with torch.inference_mode(False):
            cache.pending = self.tokens.clone() if drew else None

    @torch.no_grad()
    def step(self) -> Tensor:
        """Draws the next token of every row.

        Returns:
            int64 `[B]`: `self.tokens`, which the next step overwrites. A row that is done keeps its
            token. The token of a row that never had a prompt has no meaning.

        Raises:
            ValueError: before the first `prefill`.
        """
        if not self._started:
            raise ValueError("Decoder: expected prefill before step, got no prompt yet")
        loop = self._loop
        loop.prepare(self.model, self._stepping)
        loop.draw(self._generator)
        if loop.graph is None:
            loop.advance(self._stepping)
        else:
            loop.graph.replay()
        return loop.tokens


def uses_graph(model: LanguageModel, cuda_graph: bool | None, asker: str = "generate") -> bool:
    """Whether steps of the model run as a CUDA graph, if they draw no random numbers themselves.

    cuda_graph is the caller's wish, None for: on a CUDA device. Raises ValueError, with the asker's
    name, for True with a model on another device.
    """
    device = device_of(model)
    if cuda_graph and device.type != "cuda":
        raise ValueError(
            f"{asker}: expected a model on a CUDA device with cuda_graph = True, got {device}"
        )
    wanted = device.type == "cuda" if cuda_graph is None else cuda_graph
    return wanted and can_capture()
