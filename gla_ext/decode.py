"""Decoding a batch step by step in fixed buffers: a CUDA graph a step on a GPU."""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gla_ext._prompts import Prompts, read_prompts
from gla_ext.cache import StaticGLACache
from gla_ext.ops import is_batch_invariant
from gla_ext.sampling import Sampling, choose

if TYPE_CHECKING:
    from gla_ext.model import GLAForCausalLM

NO_EOS = -1  # no token has this id
WARMUP_STEPS = 2  # before a capture, in which no library may start up
KEPT_LOOPS = 2  # graphs with their buffers that stay with a model after `generate`


class Decoder:
    """B sequences of one model that go on together, one token each a step.

    What `generate` runs on, for a server that holds it. States, tokens and options lie in buffers
    that never move, so on a GPU a step is one CUDA graph, captured here, and takes the same memory
    after any number of tokens. New sequences take the place of finished ones with
    `prefill(prompts, rows=...)`, while the other rows wait.

        decoder = Decoder(model, batch_size=2, temperature=0.8, top_k=50)
        first = decoder.prefill([[1, 5, 7], [1, 9]])  # [2], the first token of each
        for _ in range(99):
            tokens = decoder.step()  # [2], the same tensor every time

    The graph holds what the model was when it was captured. Its parameters may change in place, but
    after they are replaced (`model.to(...)`), or modules, hooks or modes change, make a new one.

    Args:
        model: a `GLAForCausalLM`. It is run in the mode, train or eval, it is in.
        batch_size: B, number of rows.
        temperature, top_k, top_p: as in `generate`.
        eos_token_id: a row that drew it is done, and gets nothing else from then on. Default: None.
        generator: source of randomness, on the model's device. Default: torch's own.
        cuda_graph: whether steps are a CUDA graph. Default: None (on a CUDA device).

    Attributes:
        tokens: int64 `[B]`, the last token of every row.
        done: bool `[B]`, which rows have drawn eos_token_id.

    Raises:
        ValueError: for options out of range, or cuda_graph on another device.
    """

    def __init__(
        self,
        model: GLAForCausalLM,
        batch_size: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        eos_token_id: int | None = None,
        generator: torch.Generator | None = None,
        cuda_graph: bool | None = None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"Decoder: expected batch_size to be at least 1, got {batch_size}")
        sampling = Sampling(temperature, top_k, top_p)
        loop = _Loop(model, batch_size, sampling, uses_graph(model, cuda_graph))
        self._take(model, loop, sampling, eos_token_id, generator)

    @classmethod
    @contextlib.contextmanager
    def borrowed(
        cls,
        model: GLAForCausalLM,
        batch_size: int,
        sampling: Sampling,
        eos_token_id: int | None,
        generator: torch.Generator | None,
        cuda_graph: bool | None,
    ) -> Iterator[Decoder]:
        """A decoder whose graph and buffers stay with the model for the next call of this form."""
        decoder = cls.__new__(cls)
        if not uses_graph(model, cuda_graph):
            loop = _Loop(model, batch_size, sampling, False)
            decoder._take(model, loop, sampling, eos_token_id, generator)
            yield decoder
            return
        kept = _kept.setdefault(model, _Kept())
        form = (batch_size, sampling.greedy, sampling.top_k, sampling.top_p is None)
        key = (form, _what_a_graph_holds(model))
        # Taken out while it is in use, so that a second call meanwhile gets one of its own.
        loop = kept.take(key) or _Loop(model, batch_size, sampling, True)
        decoder._take(model, loop, sampling, eos_token_id, generator)
        try:
            yield decoder
        finally:
            kept.put(key, loop)

    def _take(
        self,
        model: GLAForCausalLM,
        loop: _Loop,
        sampling: Sampling,
        eos_token_id: int | None,
        generator: torch.Generator | None,
    ) -> None:
        self.model, self._loop, self._generator = model, loop, generator
        loop.set_options(sampling, eos_token_id)

    @property
    def tokens(self) -> Tensor:
        return self._loop.tokens

    @property
    def done(self) -> Tensor:
        return self._loop.done

    @property
    def nbytes(self) -> int:
        """Memory of the states, bytes."""
        return sum(x.nbytes for x in self._loop.cache.tensors())

    def prefill(
        self,
        input_ids: Tensor | Sequence[Tensor | Sequence[int]],
        attention_mask: Tensor | None = None,
        rows: Tensor | Sequence[int] | None = None,
    ) -> Tensor:
        """Starts sequences: reads their prompts and draws the first token of each.

        Args:
            input_ids: as in `generate`; prompts of different lengths are packed.
            attention_mask: as in `generate`. Default: None.
            rows: which rows the N prompts take, N distinct indices; the others stay as they are.
                Default: None (all B).

        Returns:
            int64 `[N]`, the tokens.

        Raises:
            ValueError: for prompts that do not fit, or not as many as rows.
        """
        device = self.tokens.device
        prompts, _ = read_prompts(input_ids, attention_mask, device)
        if rows is not None:
            rows = torch.as_tensor(rows, dtype=torch.long, device=device)
        wanted = self.tokens.shape[0] if rows is None else rows.numel()
        if prompts.batch_size != wanted:
            raise ValueError(f"Decoder: expected {wanted} prompts, got {prompts.batch_size}")
        return self.start(prompts, rows)

    @torch.no_grad()
    def start(self, prompts: Prompts, rows: Tensor | None = None) -> Tensor:
        """`prefill` of prompts that were read."""
        self._loop.draw(self._generator)
        return self._loop.prefill(self.model, prompts, rows)

    @torch.no_grad()
    def step(self) -> Tensor:
        """Draws the next token of every row.

        Returns:
            int64 `[B]`: `self.tokens`, which the next step overwrites. A row that is done gets
            eos_token_id again.
        """
        loop = self._loop
        loop.draw(self._generator)
        if loop.graph is None:
            loop.advance(self.model)
        else:
            loop.graph.replay()
            loop.cache.lengths = [length + 1 for length in loop.cache.lengths]
        return loop.tokens


class _Loop:
    """The buffers of a batch and, if wanted, the graph of a step on them.

    It refers to no model, so that it can be kept beside one without keeping it alive. Randomness is
    drawn into a buffer outside of the graph, which therefore serves any generator, and gives the
    tokens that the same step gives without a graph.
    """

    def __init__(
        self, model: GLAForCausalLM, batch_size: int, sampling: Sampling, graphed: bool
    ) -> None:
        device = _device(model)
        self.top_k = sampling.top_k
        self.cache = StaticGLACache(batch_size)
        self.graph: torch.cuda.CUDAGraph | None = None
        with torch.inference_mode(False), torch.no_grad():
            self.tokens = torch.zeros(batch_size, dtype=torch.long, device=device)
            self.done = torch.zeros(batch_size, dtype=torch.bool, device=device)
            self.eos = torch.full((), NO_EOS, device=device)
            self.temperature = torch.ones((), device=device)
            self.top_p = None if sampling.top_p is None else torch.ones((), device=device)
            self.noise = None
            if not sampling.greedy:
                count = sampling.candidates(model.config.vocab_size)
                self.noise = torch.ones(batch_size, count, device=device)
            if graphed:
                self._capture(model)

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

    def advance(self, model: GLAForCausalLM) -> None:
        """One step, from buffers to buffers."""
        logits = model(
            self.tokens.unsqueeze(1), past_key_values=self.cache, use_cache=True, logits_to_keep=1
        ).logits[:, -1]
        self.tokens.copy_(torch.where(self.done, self.eos, self._choose(logits)))
        self.done.logical_or_(self.tokens == self.eos)

    def _choose(self, logits: Tensor) -> Tensor:
        noise = None if self.noise is None else self.noise[: logits.shape[0]]
        return choose(logits, noise, self.temperature, self.top_k, self.top_p)

    def _capture(self, model: GLAForCausalLM) -> None:
        """Records a step, after some on a sequence that nobody asked for."""
        device = self.tokens.device
        first = Prompts(self.tokens.unsqueeze(1), None, 1, self.tokens.shape[0])
        with torch.cuda.device(device), _without_autocast_cache():
            self.prefill(model, first, None)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARMUP_STEPS):
                    self.advance(model)
            self.graph = torch.cuda.CUDAGraph()
            # Other threads of a server may allocate meanwhile.
            with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                self.advance(model)
            torch.cuda.current_stream().wait_stream(stream)


class _Kept:
    """Loops that `generate` used, the last ones, by what they serve."""

    def __init__(self) -> None:
        self.loops: OrderedDict[Hashable, tuple[_Loop, torch.cuda.Event]] = OrderedDict()

    def take(self, key: Hashable) -> _Loop | None:
        loop, event = self.loops.pop(key, (None, None))
        if loop is not None:  # whose last use may still be queued on another stream
            event.wait(torch.cuda.current_stream(loop.tokens.device))
        return loop

    def put(self, key: Hashable, loop: _Loop) -> None:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(loop.tokens.device))
        self.loops[key] = loop, event
        while len(self.loops) > KEPT_LOOPS:
            _, (_, event) = self.loops.popitem(last=False)
            event.synchronize()  # before its memory goes


_kept: weakref.WeakKeyDictionary[GLAForCausalLM, _Kept] = weakref.WeakKeyDictionary()


def free_decoders(model: GLAForCausalLM) -> None:
    """Frees the buffers and CUDA graphs that `generate` has kept with the model."""
    _kept.pop(model, None)


def uses_graph(model: GLAForCausalLM, cuda_graph: bool | None) -> bool:
    """Whether steps of the model are a CUDA graph."""
    device = _device(model)
    if cuda_graph and device.type != "cuda":
        raise ValueError(
            f"generate: expected a model on a CUDA device with cuda_graph = True, got {device}"
        )
    return device.type == "cuda" if cuda_graph is None else cuda_graph


def _device(model: GLAForCausalLM) -> torch.device:
    return next(model.parameters()).device


def _what_a_graph_holds(model: GLAForCausalLM) -> Hashable:
    """All that a captured step has taken in and that may be otherwise by the next call."""
    kind = _device(model).type
    tensors = [*model.parameters(), *model.buffers()]
    return (
        tuple((x.data_ptr(), x.dtype, x.shape, x.stride()) for x in tensors),
        tuple(module.training for module in model.modules()),
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
        is_batch_invariant(),
        torch.get_float32_matmul_precision(),
    )


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
