"""The buffers in which a batch is decoded, a step on them, and its CUDA graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gla_ext._prompts import Prompts
from gla_ext.cache import StaticGLACache
from gla_ext.sampling import Sampling, choose

if TYPE_CHECKING:
    from gla_ext.model import CausalLMOutput, GLAForCausalLM

NO_EOS = -1  # no token has this id
WARMUP_STEPS = 2  # before a capture, in which no library may start up


def device_of(model: GLAForCausalLM) -> torch.device:
    return next(model.parameters()).device


class DecodeLoop:
    """The buffers of a batch and, if wanted, the graph of a step on them.

    It refers to no model, so that it can be kept beside one without keeping it alive. Randomness is
    drawn into a buffer outside of the graph, which therefore serves any generator, and gives the
    tokens that the same step gives without a graph.
    """

    def __init__(self, model: GLAForCausalLM, batch_size: int, sampling: Sampling) -> None:
        device = device_of(model)
        self.top_k = sampling.top_k
        self.cache = StaticGLACache(batch_size)
        self.graph: torch.cuda.CUDAGraph | None = None
        with torch.inference_mode(False), torch.no_grad():
            self.tokens = torch.zeros(batch_size, dtype=torch.long, device=device)
            self.done = torch.zeros(batch_size, dtype=torch.bool, device=device)
            self.eos = torch.full((), NO_EOS, device=device)
            self.temperature = torch.ones((), dtype=torch.float32, device=device)
            self.top_p = None if sampling.top_p is None else torch.ones_like(self.temperature)
            self.noise = None
            if not sampling.greedy:
                count = sampling.candidates(model.config.vocab_size)
                self.noise = self.temperature.new_ones(batch_size, count)

    def set_options(self, sampling: Sampling, eos_token_id: int | None) -> None:
        if not sampling.greedy:
            self.temperature.fill_(sampling.temperature)
        if self.top_p is not None:
            self.top_p.fill_(sampling.top_p)
        self.eos.fill_(NO_EOS if eos_token_id is None else eos_token_id)

    def draw(self, generator: torch.Generator | None) -> None:
        """New randomness for the next choice."""
        if self.noise is not None:
            self.noise.exponential_(generator=generator)

    def prefill(self, model: GLAForCausalLM, prompts: Prompts, rows: Tensor | None) -> Tensor:
        """States, tokens and done of the rows, from their prompts."""
        with self.cache.prefill(rows):
            logits = model(
                prompts.input_ids,
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=prompts.last,
                cu_seqlens=prompts.cu_seqlens,
            ).logits.flatten(0, 1)
        tokens = self._choose(logits)
        if rows is None:
            self.tokens.copy_(tokens)
            self.done.copy_(tokens == self.eos)
        else:
            self.tokens.index_copy_(0, rows, tokens)
            self.done.index_copy_(0, rows, tokens == self.eos)
        return tokens

    def advance(self, model: Callable[..., CausalLMOutput]) -> None:
        """One step of the model, or of what it was compiled to, from buffers to buffers."""
        logits = model(
            self.tokens.unsqueeze(1), past_key_values=self.cache, use_cache=True, logits_to_keep=1
        ).logits[:, -1]
        self.tokens.copy_(torch.where(self.done, self.eos, self._choose(logits)))
        self.done.logical_or_(self.tokens == self.eos)

    def _choose(self, logits: Tensor) -> Tensor:
        noise = None if self.noise is None else self.noise[: logits.shape[0]]
        return choose(logits, noise, self.temperature, self.top_k, self.top_p)

    def capture(self, model: GLAForCausalLM, stepping: Callable[..., CausalLMOutput]) -> None:
        """Records a step of `stepping`, after some on sequences that nobody asked for."""
        device = self.tokens.device
        first = Prompts(self.tokens.unsqueeze(1), None, 1, self.tokens.shape[0])
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            torch.cuda.device(device),
            _without_autocast_cache(),
        ):
            self.prefill(model, first, None)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARMUP_STEPS):
                    self.advance(stepping)
            graph = torch.cuda.CUDAGraph()
            # Other threads of a server may allocate meanwhile.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self.advance(stepping)
            torch.cuda.current_stream().wait_stream(stream)
        self.graph = graph


@contextlib.contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Inside, autocast keeps no casts of weights: a graph would go on reading them after autocast
    has freed them.
    """
    enabled = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
