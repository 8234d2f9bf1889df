"""The buffers of a batch that is decoded, a token step on them, and its CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gla_ext.cache import StaticGLACache
from gla_ext.cache._key_values import FEWEST, room_for
from gla_ext.cache._tokens import TokenBuffers, are_faster
from gla_ext.decode import _capture
from gla_ext.decode._graph_key import GraphKeys
from gla_ext.decode._prompts import SEGMENT_TOKENS, Prompts
from gla_ext.decode.language_model import LanguageModel
from gla_ext.decode.sampling import Sampling, choose


def device_of(model: LanguageModel) -> torch.device:
    return next(model.parameters()).device


Place = tuple[torch.device, torch.dtype, int]


def place_of(model: LanguageModel) -> Place:
    """Device, dtype and vocabulary size, on which states and buffers depend. Device and dtype are
    those of the first parameter.
    """
    first = next(model.parameters())
    return first.device, first.dtype, model.config.vocab_size


def check_place(model: LanguageModel, before: Place, kind: str) -> None:
    """Raises ValueError if `place_of(model)` is not `before`; `kind` is the class in the
    message.
    """
    if (now := place_of(model)) != before:
        raise ValueError(
            f"{kind}: expected a model on {before[0]} in {before[1]} of {before[2]} tokens, as "
            f"before, got one on {now[0]} in {now[1]} of {now[2]}; make a new {kind}"
        )


class DecodeLoop:
    """The buffers of a batch and, optionally, CUDA graphs of a token step that uses them.

    Random numbers are drawn outside the graph, into a buffer that it reads. So a graph works with
    any generator and gives the same tokens as a step without one.
    """

    def __init__(self, model: LanguageModel, batch_size: int, sampling: Sampling) -> None:
        device = device_of(model)
        self.top_k = sampling.top_k
        # By the number of keys that a step reads (`cache.bucket`, None without attention), and
        # whether it keeps its token in buffers (`cache.buffering`).
        self.graphs: dict[tuple[int | None, bool], _capture.Graph | None] = {}
        self.has_graphs = False
        self.keys = GraphKeys()
        self._moves = 0  # value of cache.moves at the last capture
        with torch.inference_mode(False), torch.no_grad():
            self.tokens = torch.zeros(batch_size, dtype=torch.long, device=device)
            self.done = torch.zeros(batch_size, dtype=torch.bool, device=device)
            # For each row, the sum of the largest logits since its prompt: finite if all of them
            # were.
            self.sums = torch.zeros(batch_size, device=device)
            self.cache = StaticGLACache(batch_size, self.done)
            self.cache.counts = False
            if are_faster(batch_size, device):
                self.cache.buffers = TokenBuffers(batch_size, device)
            self.cache.begin_step()
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
        """The graph of the next step, or None."""
        return self.graphs.get(self._kind)

    @property
    def _kind(self) -> tuple[int | None, bool]:
        return self.cache.bucket, self.cache.buffering

    def set_options(self, sampling: Sampling, end_tokens: Sequence[int]) -> None:
        if not sampling.greedy:
            self.temperature.fill_(sampling.divisor)
        if self.top_p is not None:
            self.top_p.fill_(sampling.top_p)
        self.ends.zero_()
        if end_tokens:
            self.ends[list(end_tokens)] = True

    def draw(self, generator: torch.Generator | None) -> None:
        """Draws new random numbers for the next choice of tokens."""
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
        """Processes prompts and sets the states, tokens and done of their rows. With keep, prompts
        continue from the rows' states. Returns the first tokens.
        """
        # All at once: offsets that are copied to a GPU later would wait for the earlier segments.
        segments = list(prompts.segments(segment_tokens))
        before = self.cache.longest if keep else 0  # upper bound of the tokens of these rows
        others = 0 if rows is None else self.cache.longest
        if len(segments) > 1 and not keep:
            self.cache.reset(rows)  # a segment may mix starts with a piece that goes on
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
        """One token step of the model, or of its compiled form, from buffers to buffers."""
        logits = model(
            self.tokens.unsqueeze(1), past_key_values=self.cache, use_cache=True, logits_to_keep=1
        ).logits[:, -1]
        self.cache.count_token()
        tokens, largest = self._choose(logits)
        self.sums.add_(largest.masked_fill(self.done, 0))
        torch.where(self.done, self.tokens, tokens, out=self.tokens)
        self.done.logical_or_(self.ends[self.tokens])
        self.cache.skip_done()

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        noise = None if self.noise is None else self.noise[: logits.shape[0]]
        return choose(logits, noise, self.temperature, self.top_k, self.top_p)

    def prepare(self, model: LanguageModel, stepping: Callable[..., Any]) -> None:
        """Captures the next step's graph if graphs are used and this one is missing. With
        attention, first makes room; a graph then reads at most twice as many keys as the longest
        row has.
        """
        cache = self.cache
        cache.begin_step()
        if cache.attends:
            self._make_room()
        if self.has_graphs and self._kind not in self.graphs:
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
        # On a CPU, reusing few different numbers has no benefit.
        cache.bucket = room_for(count) if self.tokens.is_cuda else count

    def refresh(self, model: LanguageModel) -> None:
        """Drops the graphs if the model in its present state would give others."""
        self.cache.flush()  # what the model's layers are now may know of no buffers
        if not self.keys.fit(model):
            _capture.wait_for_replays(self.tokens.device)
            self.keys = GraphKeys()
            self.graphs.clear()

    def capture(self, model: LanguageModel, stepping: Callable[..., Any]) -> None:
        """Records a step of `stepping`. Warm-up steps run before, on dummy sequences if there are
        no states yet; otherwise all rows wait.

        A step that draws random numbers itself, for example for dropout, gets no graph.
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
            self.graphs[self._kind] = graph
            if done is not None:
                self.done.copy_(done)
                self.cache.skip_done()
