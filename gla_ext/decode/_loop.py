"""The buffers in which a batch is decoded, a step on them, and its CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gla_ext.cache import StaticGLACache
from gla_ext.cache._key_values import FEWEST, room_for
from gla_ext.decode import _capture
from gla_ext.decode._graph_key import GraphKeys
from gla_ext.decode._prompts import SEGMENT_TOKENS, Prompts
from gla_ext.decode.language_model import LanguageModel
from gla_ext.decode.sampling import Sampling, choose


def device_of(model: LanguageModel) -> torch.device:
    return next(model.parameters()).device


Place = tuple[torch.device, torch.dtype, int]


def place_of(model: LanguageModel) -> Place:
    """Device and dtype of the first parameter, and the vocabulary's size, which states and buffers
    share.
    """
    first = next(model.parameters())
    return first.device, first.dtype, model.config.vocab_size


def check_place(model: LanguageModel, before: Place, kind: str) -> None:
    """Raises ValueError, in the name of the class `kind`, if `place_of(model)` is not `before`."""
    if (now := place_of(model)) != before:
        raise ValueError(
            f"{kind}: expected a model on {before[0]} in {before[1]} of {before[2]} tokens, as "
            f"before, got one on {now[0]} in {now[1]} of {now[2]}; make a new {kind}"
        )


class DecodeLoop:
    """The buffers of a batch and, if wanted, the graph of a step on them.

    Randomness is drawn into a buffer outside of the graph, which therefore serves any generator,
    and gives the tokens that the same step gives without a graph.
    """

    def __init__(self, model: LanguageModel, batch_size: int, sampling: Sampling) -> None:
        device = device_of(model)
        self.top_k = sampling.top_k
        # By the bucket of keys that a step reads; of a model without attention there is one, None.
        self.graphs: dict[int | None, _capture.Graph | None] = {}
        self.has_graphs = False
        self.keys = GraphKeys()
        self._moves = 0  # of the cache, which the graphs have seen
        with torch.inference_mode(False), torch.no_grad():
            self.tokens = torch.zeros(batch_size, dtype=torch.long, device=device)
            self.done = torch.zeros(batch_size, dtype=torch.bool, device=device)
            # Each row's largest logits since its prompt, added up: finite if all of them were.
            self.sums = torch.zeros(batch_size, device=device)
            self.cache = StaticGLACache(batch_size, self.done)
            self.cache.counts = False
            vocab_size = model.config.vocab_size
            self.ends = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self.temperature = torch.ones((), dtype=torch.float32, device=device)
            self.top_p = None if sampling.top_p is None else torch.ones_like(self.temperature)
            self.noise = None
            if not sampling.greedy:
                count = sampling.candidates(vocab_size)
                self.noise = self.temperature.new_ones(batch_size, count)

    @property
    def graph(self) -> _capture.Graph | None:
        """That of the next step, if it has one."""
        return self.graphs.get(self.cache.bucket)

    def set_options(self, sampling: Sampling, end_tokens: Sequence[int]) -> None:
        if not sampling.greedy:
            self.temperature.fill_(sampling.divisor)
        if self.top_p is not None:
            self.top_p.fill_(sampling.top_p)
        self.ends.zero_()
        if end_tokens:
            self.ends[list(end_tokens)] = True

    def draw(self, generator: torch.Generator | None) -> None:
        """New randomness for the next choice."""
        if self.noise is not None:
            self.noise.exponential_(generator=generator)

    def prefill(
        self,
        model: LanguageModel,
        prompts: Prompts,
        rows: Tensor | None,
        segment_tokens: int = SEGMENT_TOKENS,
        keep: bool = False,
    ) -> Tensor:
        """States, tokens and done of the rows, from their prompts and, with keep, their states."""
        # All now: offsets that are copied to a GPU later would wait for the segments before.
        segments = list(prompts.segments(segment_tokens))
        before = self.cache.longest if keep else 0  # tokens of these rows, at most
        others = 0 if rows is None else self.cache.longest
        if len(segments) > 1 and not keep:
            self.cache.reset(rows)  # a start may stand beside a piece that goes on
        found = []
        for segment in segments:
            own = self._rows_of(segment.prompts, rows)
            lengths = (before + segment.before, segment.longest)
            with self.cache.prefill(own, keep or segment.goes_on, *lengths):
                logits = model(
                    segment.input_ids,
                    past_key_values=self.cache,
                    use_cache=True,
                    logits_to_keep=segment.last,
                    cu_seqlens=segment.cu_seqlens,
                ).logits.flatten(0, 1)
            found.append(logits[: segment.ended])
        tokens, largest = self._choose(torch.cat(found) if len(found) > 1 else found[0])
        chosen = slice(None) if rows is None else rows
        self.tokens[chosen] = tokens
        self.sums[chosen] = largest.float()
        self.done[chosen] = self.ends[tokens]
        self.cache.skip_done()
        self.cache.longest = max(others, before + max(prompts.lengths))
        return tokens

    def _rows_of(self, prompts: range, rows: Tensor | None) -> Tensor | None:
        if rows is not None:
            return rows[prompts.start : prompts.stop]
        if len(prompts) == self.tokens.shape[0]:
            return None
        return torch.arange(prompts.start, prompts.stop, device=self.tokens.device)

    def advance(self, model: Callable[..., Any]) -> None:
        """One step of the model, or of what it was compiled to, from buffers to buffers."""
        logits = model(
            self.tokens.unsqueeze(1), past_key_values=self.cache, use_cache=True, logits_to_keep=1
        ).logits[:, -1]
        tokens, largest = self._choose(logits)
        self.sums.add_(largest.masked_fill(self.done, 0))
        torch.where(self.done, self.tokens, tokens, out=self.tokens)
        self.done.logical_or_(self.ends[self.tokens])
        self.cache.skip_done()

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        noise = None if self.noise is None else self.noise[: logits.shape[0]]
        return choose(logits, noise, self.temperature, self.top_k, self.top_p)

    def prepare(self, model: LanguageModel, stepping: Callable[..., Any]) -> None:
        """Captures the next step's graph, if steps have graphs and this one is missing. With
        attention it first makes room; a graph then reads at most twice the keys of the longest row.
        """
        cache = self.cache
        if cache.attends:
            self._make_room()
        if self.has_graphs and cache.bucket not in self.graphs:
            self.capture(model, stepping)
        if cache.attends:
            cache.longest += 1

    def _make_room(self) -> None:
        cache = self.cache
        if room_for(cache.longest + 1) > (cache.bucket or 0):
            cache.count_longest()
        count = cache.longest + 1
        cache.reserve(count)
        if cache.moves != self._moves:
            self.graphs.clear()
            self._moves = cache.moves
        # On a CPU nothing is gained by few different numbers.
        cache.bucket = room_for(count) if self.tokens.is_cuda else count

    def refresh(self, model: LanguageModel) -> None:
        """Gives up the graphs if the model, as it is now, would give others."""
        if not self.keys.fit(model):
            _capture.wait_for_replays(self.tokens.device)
            self.keys = GraphKeys()
            self.graphs.clear()

    def capture(self, model: LanguageModel, stepping: Callable[..., Any]) -> None:
        """Records a step of `stepping`, after some on sequences that nobody asked for, or while
        all that there are wait.

        A step that draws random numbers itself, as dropout in train mode does, gets no graph.
        """
        self.has_graphs = True
        self.keys.add(model)
        with (
            _capture.one_at_a_time,
            torch.inference_mode(False),
            torch.no_grad(),
            torch.cuda.device(self.tokens.device),
        ):
            done = self.done.clone() if self.cache.states else None
            if done is None:
                self.prefill(model, Prompts(self.tokens, [1] * self.tokens.shape[0]), None)
                self._moves = self.cache.moves
                if self.cache.attends:
                    self.cache.bucket = FEWEST
                    self.cache.longest += _capture.WARMUPS
            else:
                self.done.fill_(True)
                self.cache.skip_done()
            graph = _capture.capture(lambda: self.advance(stepping), self.tokens.device)
            self.graphs[self.cache.bucket] = graph
            if done is not None:
                self.done.copy_(done)
                self.cache.skip_done()
