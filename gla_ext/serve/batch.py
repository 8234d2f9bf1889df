"""The rows that an engine decodes: buffers that never move, and graphs of token steps on them."""

from __future__ import annotations

import dataclasses
import functools
import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gla_ext.cache import StaticGLACache
from gla_ext.cache._tokens import TokenBuffers, are_faster
from gla_ext.decode import _capture
from gla_ext.decode._graph_key import GraphKeys
from gla_ext.decode._loop import check_place, place_of
from gla_ext.decode._prompts import CHUNK
from gla_ext.decode.language_model import LanguageModel
from gla_ext.layers.gated_linear_attention import GatedLinearAttention
from gla_ext.serve.choice import IDLE, Adjustments, Draw, choose, log_probabilities
from gla_ext.serve.prompts import Packed, Piece, PromptGraphs, Size, lay_out
from gla_ext.serve.request import Request, TokenLogprob
from gla_ext.serve.rows import RowCache, StateRows

SCORED_BYTES = 1 << 26  # of the logits of a prompt's tokens, at a time
BLOCK = 256  # tokens of a prompt whose log-probabilities become objects at a time


class Batch:
    """Rows for the sequences of one model, and for checkpoints of their states.

    On a GPU a token step is a CUDA graph, one for each power of two of rows up to all, so that few
    sequences cost little. Pieces of prompts have graphs too: see `PromptGraphs`. The first step of
    a size runs without a graph. The graph is captured before the second, or by `warm_up`.

    Args:
        model: a `GLAForCausalLM` without attention layers, in eval mode.
        rows: number of sequences at once.
        fixed: steps always have all rows, so that products always have the same shape. Pieces of
            prompts then have no graphs, whose sizes would vary.
        state_dtype: dtype in which recurrent states are stored. Default: None (their own).
        checkpoint_bytes: memory of the checkpoints. Default: 0.
        every: tokens between checkpoints in the middle of prompts, a multiple of 64. Default: 64.

    Attributes:
        cache: the memory of the layers.
        row_nbytes: memory of a row's states.
        checkpoints: the rows that hold checkpoints and no sequences.
        every: as above, but 0 if there can be no checkpoints in the middle of prompts: there are no
            rows for them, `fixed` is set, or a layer cannot process prompts by `chunk_gla_`.
        most_scored: number of tokens whose logits take `SCORED_BYTES`, at least a chunk.
        tokens: int64 `[rows]`, the last token of each row; there may be more rows than requested.
    """

    def __init__(
        self,
        model: LanguageModel,
        rows: int,
        cuda_graph: bool,
        fixed: bool,
        state_dtype: torch.dtype | None = None,
        checkpoint_bytes: int = 0,
        every: int = CHUNK,
    ) -> None:
        self._model = model
        # With one row, sums would be split differently, and in no fixed order.
        self._rows = max(rows, 2)
        self._place = device, _, vocab_size = place_of(model)
        self.most_scored = max(SCORED_BYTES // (4 * vocab_size) // CHUNK, 1) * CHUNK
        self._has_graphs = cuda_graph
        # By the number of rows, and whether tokens are kept in buffers.
        self._graphs = _capture.GraphsOnDemand(self._capture)
        self._keys = GraphKeys()
        self._memory = _capture.SharedMemory()
        graphs_of_prompts = cuda_graph and not fixed
        taken = self._rows + graphs_of_prompts  # one spare row for prompts' graphs
        with torch.inference_mode(False), torch.no_grad():
            self.tokens = torch.zeros(self._rows, dtype=torch.long, device=device)
            self._logits = torch.zeros(taken, vocab_size, device=device)
            self._adjustments = Adjustments(self._rows, vocab_size, device)
            tokens = None
            if not fixed and are_faster(self._rows, device):
                tokens = TokenBuffers(taken, device)
            states = self._make_states(taken, state_dtype, checkpoint_bytes, tokens)
            self.checkpoints = range(taken, states.batch_size)
            layers = _layers_of(model)
            self._layers = len(layers)
            in_chunks = len(states.states) == self._layers and _in_chunks(layers)
            self.every = every if len(self.checkpoints) > 0 and not fixed and in_chunks else 0
            self.cache: RowCache = StateRows(states, taken, self.every)
            self._active: list[int] = []
            # The row counts that steps may have, and a cache for each.
            powers = [] if fixed else [1 << n for n in range((self._rows - 1).bit_length())]
            self._caches = {count: self.cache.first(count) for count in (*powers, self._rows)}
            self._prompts: PromptGraphs | None = None
            if graphs_of_prompts:
                form = (self.every, self._rows, device)
                self._prompts = PromptGraphs(self._read, self._record, *form)

    def _make_states(
        self,
        taken: int,
        state_dtype: torch.dtype | None,
        checkpoint_bytes: int,
        tokens: TokenBuffers | None,
    ) -> StaticGLACache:
        """A cache of `taken` rows, plus as many rows for checkpoints as checkpoint_bytes hold."""
        one = StaticGLACache(1)
        one.state_dtype, one.buffers = state_dtype, tokens
        with one.prefill():
            self._model(self.tokens[:1].unsqueeze(0), past_key_values=one, use_cache=True)
        self.row_nbytes = sum(x.nbytes for x in one.tensors())
        states = StaticGLACache(taken + checkpoint_bytes // max(self.row_nbytes, 1))
        states.state_dtype, states.zeroed, states.buffers = state_dtype, taken, tokens
        with states.prefill(self.tokens[:1]):  # for row 0, whatever its states
            for layer_idx, entry in enumerate(one):
                states.update(layer_idx=layer_idx, **entry)
        return states

    def warm_up(self) -> None:
        """Captures the missing graphs, if graphs are used."""
        if self._prompts is not None:  # first, as all others fit into the memory of the largest
            self._prompts.warm_up()
        if self._has_graphs:
            self._graphs.warm_up((n, cache.begin_step()) for n, cache in self._caches.items())

    def refresh(self) -> None:
        """Drops the graphs if the model in its present state would give others.

        Raises:
            ValueError: for a model on another device, of another dtype or vocabulary, with another
                number of layers, or whose prompts could no longer leave checkpoints in their
                middle.
        """
        self._caches[self._rows].flush()  # what the layers are now may know of no buffers
        if not self._keys.fit(self._model):
            _capture.wait_for_replays(self.tokens.device)
            self._keys = GraphKeys()
            self._graphs.clear()
            if self._prompts is not None:
                self._prompts.clear()
            self._memory = _capture.SharedMemory()  # no graph may share that of dropped ones
        check_place(self._model, self._place, "Engine")
        layers = _layers_of(self._model)
        if len(layers) != self._layers or (self.every and not _in_chunks(layers)):
            wanted = f"{self._layers} layers" + " that pass prompts in chunks" * bool(self.every)
            raise ValueError(f"Engine: expected {wanted}, as before, got others; make a new Engine")

    def _capture(self, kind: tuple[int, bool]) -> _capture.Graph | None:
        """The graph of a step of `count` rows. All rows wait during the capture."""
        count, _ = kind
        self.cache.activate([])
        self._active = []
        return self._record(functools.partial(self._advance, self._caches[count], count))

    def _record(self, step: Callable[[], None]) -> _capture.Graph | None:
        self._keys.add(self._model)
        with torch.inference_mode(False), torch.no_grad():
            return _capture.capture(step, self.tokens.device, self._memory)

    def _advance(self, cache: Any, count: int) -> None:
        tokens = self.tokens[:count].unsqueeze(1)
        output = self._model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache.count_token()
        self._logits[:count].copy_(output.logits[:, -1])

    @torch.no_grad()
    def step(self, rows: Sequence[int]) -> None:
        """Processes the last token of the rows, and stores their logits for `draw`."""
        wanted = sorted(rows)
        count = self._size(wanted)
        cache = self._caches[count]
        kind = (count, cache.begin_step())
        graph = self._graphs.find(kind) if self._has_graphs else None
        if wanted != self._active:
            self.cache.activate(wanted)
            self._active = wanted
        if graph is None:
            self._advance(cache, count)
        else:
            graph.replay()

    def _size(self, rows: Sequence[int]) -> int:
        """The smallest step size that includes these rows; sizes are in ascending order."""
        highest = max(rows)
        return next(size for size in self._caches if size > highest)

    @torch.no_grad()
    def prefill(self, pieces: Sequence[Piece]) -> None:
        """Processes packed pieces of prompts, and stores the logits of their last tokens for
        `draw`.
        """
        if self._prompts is not None and self._prompts.replay(pieces):
            return
        self._read(self._pack(pieces), alone=len(pieces) == 1)

    @torch.no_grad()
    def score(
        self, pieces: Sequence[Piece], following: array[int], count: int
    ) -> Callable[[], list[Tensor]]:
        """Like `prefill`, without a graph, and with the log-probabilities of the tokens that follow
        the pieces' tokens.

        Args:
            pieces: of at most `most_scored` tokens together.
            following: the T tokens that follow, int64, in the order of the packed ones.
            count: number of most probable tokens.

        Returns:
            A function that waits for the tensors of `Scores`, of T tokens, and returns them.
        """
        packed = self._pack(pieces)
        logits = self._logits_of(packed, len(pieces) == 1, 0)
        self._logits.index_copy_(0, packed.rows, logits[packed.offsets[1:] - 1])
        tokens = torch.frombuffer(following, dtype=torch.long)
        tokens = tokens.to(logits.device, non_blocking=True)
        logprobs, best, ids = log_probabilities(logits, tokens, count)
        return _fetch([tokens, logits.amax(-1), logprobs, best, ids.int()])

    def _pack(self, pieces: Sequence[Piece]) -> Packed:
        size = Size.of(pieces)
        numbers = lay_out(pieces, size, self.every)
        return size.split(numbers.to(self.tokens.device, non_blocking=True))

    def _read(self, packed: Packed, alone: bool = False) -> None:
        """Processes the pieces, packed with offsets or a single one."""
        logits = self._logits_of(packed, alone, 1 if alone else packed.offsets[1:] - 1)
        self._logits.index_copy_(0, packed.rows, logits)

    def _logits_of(self, packed: Packed, alone: bool, keep: int | Tensor) -> Tensor:
        with self.cache.read(packed) as cache:
            output = self._model(
                packed.tokens.unsqueeze(0),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=keep,
                cu_seqlens=None if alone else packed.offsets,
            )
        return output.logits[0].float()

    def begin(self, row: int, request: Request) -> None:
        """Prepares a row for the draws of a request."""
        self._adjustments.begin(row, request)

    @torch.no_grad()
    def draw(
        self, draws: dict[int, Draw], uniforms: dict[int, float], with_logprobs: bool
    ) -> Callable[[], Drawn]:
        """Draws the next token of the given rows from the stored logits.

        Args:
            uniforms: for rows with a temperature above 0, the random number of this draw.

        Returns:
            A function that waits for the tokens and returns them on the host.
        """
        if not draws:
            return lambda: Drawn([], [])
        size = max(self._size([*draws]), 2)
        logits, tokens = self._logits[:size], self.tokens[:size]
        adjusted = self._adjustments.apply(logits, draws)
        if all(draw.temperature == 0 for draw in draws.values()):
            largest, chosen = adjusted.max(-1)
        else:
            every = [draws.get(row, IDLE) for row in range(size)]
            options = [[uniforms.get(row, 0.0) for row in range(size)]]
            options.append([draw.temperature for draw in every])
            options.append([draw.top_p for draw in every])
            options.append([draw.min_p for draw in every])
            options = torch.tensor(options).to(tokens.device, non_blocking=True)
            uniform, temperature, top_p, min_p = options
            top_k = None
            if any(draw.top_k is not None or draw.top_p < 1 for draw in draws.values()):
                most = logits.shape[-1]
                ranks = [most if draw.top_k is None else min(draw.top_k, most) for draw in every]
                top_k = torch.tensor(ranks).to(tokens.device, non_blocking=True)
            least = min_p if any(draw.min_p > 0 for draw in draws.values()) else None
            chosen, largest = choose(adjusted, uniform, temperature, top_k, top_p, least)
        tokens.copy_(chosen)
        self._adjustments.drew(tokens, draws)
        found = [tokens, largest, *(log_probabilities(logits, tokens) if with_logprobs else ())]
        fetched = _fetch(found)
        return lambda: Drawn.of(fetched())


@dataclasses.dataclass(frozen=True)
class Drawn:
    """The tokens of rows, or of places in prompts, on the host: see `choice.log_probabilities`."""

    tokens: list[int]
    largest: list[float]  # logits, as in `choice.choose`
    logprobs: list[float] | None = None
    best: list[list[float]] | None = None
    best_ids: list[list[int]] | None = None

    @classmethod
    def of(cls, found: Sequence[Tensor]) -> Drawn:
        return cls(*(x.tolist() for x in found))

    def is_finite(self, place: int) -> bool:
        return math.isfinite(self.largest[place])

    def logprob(self, place: int, count: int) -> TokenLogprob:
        """The log-probability of a token, and those of the `count` most probable ones."""
        best = zip(self.best_ids[place][:count], self.best[place][:count], strict=True)
        return TokenLogprob(self.tokens[place], self.logprobs[place], dict(best))


class Scores(Sequence[TokenLogprob]):
    """The log-probabilities of a prompt's tokens, as tensors on the host. They become objects, of
    ten times the memory, when they are read.

    Args:
        found: the lists of `Drawn`, as tensors.
    """

    def __init__(self, found: Sequence[Tensor]) -> None:
        self._found = found

    def __len__(self) -> int:
        return len(self._found[0])

    def __getitem__(self, place: int | slice) -> TokenLogprob | Scores:
        if isinstance(place, slice):
            return Scores([x[place] for x in self._found])
        at = range(len(self))[place]
        return next(iter(self[at : at + 1]))

    def __iter__(self) -> Iterator[TokenLogprob]:
        for block in zip(*(x.split(BLOCK) for x in self._found), strict=True):
            drawn = Drawn.of(block)
            for place, best in enumerate(drawn.best):
                yield drawn.logprob(place, len(best))


def _layers_of(model: LanguageModel) -> list[GatedLinearAttention]:
    return [layer for layer in model.modules() if isinstance(layer, GatedLinearAttention)]


def _in_chunks(layers: Sequence[GatedLinearAttention]) -> bool:
    """Whether each layer can process prompts by `chunk_gla_`, and no convolution is longer than a
    chunk.
    """
    return all(
        type(layer) is GatedLinearAttention
        and layer.mode != "fused_recurrent"
        and not (layer.use_short_conv and layer.conv_size > CHUNK)
        for layer in layers
    )


def _fetch(found: list[Tensor]) -> Callable[[], list[Tensor]]:
    if not found[0].is_cuda:
        return lambda: found
    copies = [x.to("cpu", non_blocking=True) for x in found]
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(found[0].device))

    def wait() -> list[Tensor]:
        arrived.synchronize()
        return copies

    return wait
