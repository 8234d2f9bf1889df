"""Caches of recurrent states, one entry a layer: a plain one, and one whose tensors never move."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gla_ext._key_values import KeyValues, map_tensors, tensors_in
from gla_ext._past import Past


class GLACache:
    """The states of a stack of layers.

    The layers of GLA ask for `len(cache)`, `cache[layer_idx]["recurrent_state"]` and
    `cache.update(...)` alone, so any cache that has these serves as well (FLA's does). The
    memory of an entry does not depend on the number of tokens seen: `H * V * K * 4` bytes a
    sequence. An attention layer of a hybrid model keeps its keys and values here, in room that
    doubles when it is full, or of a window; they are written in place, so a copy of a cache is made
    by `copy.deepcopy`.

    Attributes:
        in_place: whether a layer that decodes writes the next state over the one it finds here.
        slots: int64 `[B]`, the rows of a batch in place, -1 for one that waits; None where all go
            on.
    """

    in_place = False
    slots: Tensor | None = None
    bucket: int | None = None  # number of keys that a step reads, where not all that there are
    max_seqlen: int | None = None  # of the packed sequences that pass now, if it is known
    is_compileable = False  # generate() of transformers asks: entries are added as layers run
    # It asks too, from 5.24 on, by layer, and goes by get_seq_length() only where not all say so.
    is_linear = (False,)

    def __init__(self) -> None:
        self.states: list[dict[str, Any]] = []
        self.lengths: list[int] = []
        self._pending: Tensor | None = None
        self._pending_at = 0
        self.past: Past | None = None

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, layer_idx: int) -> dict[str, Any]:
        return self.states[layer_idx]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.states)

    @property
    def num_sequences(self) -> int | None:
        """How many sequences there are states of; None before any has one."""
        for entry in self.states:
            if entry["recurrent_state"] is not None:
                return entry["recurrent_state"].shape[0]
            if "attn_state" in entry:
                return len(entry["attn_state"].lengths)
        return None

    def update(
        self,
        *,
        layer_idx: int = 0,
        recurrent_state: Tensor | None = None,
        conv_state: Any | None = None,
        attn_state: KeyValues | None = None,
        offset: int = 1,
    ) -> dict[str, Any]:
        """Replaces what is given of one layer's state; what is None stays as it was.

        Args:
            layer_idx: index of the layer. Entries below it that are not there yet are empty.
            recurrent_state: `[N, H, V, K]`, fp32. Default: None.
            conv_state: the last inputs of the short convolutions. Default: None.
            attn_state: keys and values of an attention layer. Default: None.
            offset: number of tokens these states are further on. Default: 1.

        Returns:
            The layer's entry, with the keys 'recurrent_state' and 'conv_state', and of an
            attention layer 'attn_state'.
        """
        while len(self.states) <= layer_idx:
            self.states.append({"recurrent_state": None, "conv_state": None})
            self.lengths.append(0)
        entry = self.states[layer_idx]
        if recurrent_state is not None:
            entry["recurrent_state"] = recurrent_state
        if conv_state is not None:
            entry["conv_state"] = conv_state
        if attn_state is not None:
            entry["attn_state"] = attn_state
        self.lengths[layer_idx] += offset
        return entry

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of tokens that a layer has seen, padding included; 0 without an entry."""
        return self.lengths[layer_idx] if layer_idx < len(self.lengths) else 0

    @property
    def pending(self) -> Tensor | None:
        """The last token that `generate` drew of each sequence, int64 `[B]`. It has not passed the
        model: the next `generate` feeds it first. None, once other calls have moved the states on.
        """
        return self._pending if self._pending_at == self.get_seq_length() else None

    @pending.setter
    def pending(self, tokens: Tensor | None) -> None:
        self._pending, self._pending_at = tokens, self.get_seq_length()

    def reset(self) -> None:
        """Empties the cache."""
        self.states.clear()
        self.lengths.clear()
        self.pending = self.past = None

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the sequences named by indices, int64 `[N']`, in that order; repeats allowed."""
        self._map(lambda state: state.index_select(0, indices.to(state.device)))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """`batch_select_indices` under the name that beam search knows."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every sequence `repeats` times, its copies next to each other."""
        self._map(lambda state: state.repeat_interleave(repeats, dim=0))

    def activate_past_recording(self) -> None:
        """Makes `crop` possible, for 64 tokens back: transformers' assisted decoding calls it.

        Models of `gla_ext.hf` alone keep what it takes.
        """
        self.past = Past(self)

    @property
    def is_croppable(self) -> bool:
        return self.past is not None

    def crop(self, count: int) -> None:
        """Takes back the last tokens, so many below 0 of them, or all after the first count.

        Raises:
            NotImplementedError: without `activate_past_recording` before.
            ValueError: for more tokens than are kept.
        """
        now = self.get_seq_length()
        length = max(now + count, 0) if count <= 0 else count
        if length >= now:
            return
        if self.past is None:
            raise NotImplementedError(
                "GLACache: crop is not implemented without activate_past_recording() before the "
                "tokens that are to be taken back"
            )
        self.past.crop(self, length)

    def detach(self) -> None:
        """Cuts the states from the graph that made them, for truncated backpropagation."""
        self._map(torch.Tensor.detach)

    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        for entry in self.states:
            for key, value in entry.items():
                entry[key] = map_tensors(function, value)
        if self._pending is not None:
            self._pending = function(self._pending)
        if self.past is not None:
            if self.past.behind:
                raise NotImplementedError("GLACache: expected a forward call after crop, got none")
            self.past = Past(self)  # no further back than this


class StaticGLACache(GLACache):
    """A cache of B sequences whose tensors never move, for CUDA graphs and long decoding.

    The first states that come are copied into buffers, and all later ones over them; a layer that
    decodes one token writes its recurrent state there itself. No gradient passes through it.

    Only the keys and values of attention layers move, when `reserve` makes more room for them.

    Args:
        batch_size: B.
        done: bool `[B]`, which is read at every step: the states of these rows stay as they are.
            Default: None (every row goes on).

    Attributes:
        longest: at least the number of tokens of every row, where there is attention: whoever
            decodes counts them.
        moves: how often keys and values have moved.
        attends: whether an attention layer has stored here.
    """

    in_place = True
    room = 0  # tokens that keys and values have room for from the start
    state_dtype: torch.dtype | None = None  # of recurrent states in the buffers, if not theirs
    counts = True  # False where who decodes counts tokens and makes room

    def __init__(self, batch_size: int, done: Tensor | None = None) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.longest, self.moves, self.attends = 0, 0, False
        self._done, self._slots = done, None
        if done is not None:
            self._every_row = torch.arange(batch_size, device=done.device)
            self._slots = self._every_row.clone()
            self._no_row = torch.full_like(self._every_row, -1)
        self._prefills, self._starts = False, False
        self._rows: Tensor | None = None

    def __len__(self) -> int:
        return 0 if self._starts else len(self.states)

    def __getitem__(self, layer_idx: int) -> Mapping[str, Any]:
        entry = self.states[layer_idx]
        return entry if self._rows is None else _Gathered(entry, self._rows)

    def prompt_rows(self, layer_idx: int | None) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Where a layer's prompts pass in place: the buffer, their rows in it, and, if they start
        from nothing, so many False. None where there is no buffer yet, or no rows are named.
        """
        if self._rows is None or layer_idx is None or layer_idx >= len(self.states):
            return None
        buffer = self.states[layer_idx]["recurrent_state"]
        if buffer is None:
            return None
        goes_on = torch.zeros_like(self._rows, dtype=torch.bool) if self._starts else None
        return buffer, self._rows, goes_on

    @property
    def attention(self) -> list[KeyValues]:
        """What every attention layer keeps."""
        return [entry["attn_state"] for entry in self.states if "attn_state" in entry]

    def expect_token(self, kept: KeyValues) -> None:
        """Makes room for a step's keys and values, unless that is done elsewhere."""
        if self.counts:
            kept.longest += 1
            self.moves += kept.reserve(kept.longest)

    def reserve(self, count: int) -> None:
        """Makes room for rows of so many tokens, in powers of two."""
        moved = [kept.reserve(count) for kept in self.attention]
        self.moves += any(moved)

    def count_longest(self) -> None:
        """Sets `longest` to the length of the longest row, which it waits for."""
        self.longest = max((int(kept.lengths.max()) for kept in self.attention[:1]), default=0)

    @property
    def slots(self) -> Tensor | None:
        return None if self._prefills else self._slots

    def skip_done(self) -> None:
        """Makes `slots` follow `done`."""
        torch.where(self._done, self._no_row, self._every_row, out=self._slots)

    @contextlib.contextmanager
    def prefill(
        self,
        rows: Tensor | None = None,
        keep: bool = False,
        before: int = 0,
        max_seqlen: int | None = None,
    ) -> Iterator[None]:
        """Inside, sequences take rows, done or not, and what layers store replaces these.

        Args:
            rows: int64 `[N]`, the rows of the N sequences; the others stay as they are. Default:
                None (all B of them).
            keep: layers find the rows' states, and not none. Default: False.
            before: with keep, at least the number of tokens that each of the rows has had; read
                where there is attention. Default: 0.
            max_seqlen: at least the length of each of the sequences. Default: None (unknown).
        """
        self._prefills, self._starts, self._rows = True, not keep, rows
        for kept in self.attention:
            kept.longest = before
        self.max_seqlen = max_seqlen
        try:
            yield
        finally:
            self._prefills, self._starts, self._rows = False, False, None
            self.max_seqlen = None

    @torch.no_grad()
    def load(self, cache: GLACache) -> None:
        """Copies the states of a cache of B sequences over these."""
        with self.prefill():
            for layer_idx, entry in enumerate(cache):
                self.update(layer_idx=layer_idx, **entry)
        self.longest = max((kept.longest for kept in self.attention), default=0)

    @torch.no_grad()
    def save(self, cache: GLACache, offset: int) -> None:
        """Puts copies of the states into a cache, as of so many more tokens."""
        for kept in self.attention:
            kept.longest = self.longest
        with torch.inference_mode(False):
            for layer_idx, entry in enumerate(self):
                copies = {key: map_tensors(Tensor.clone, entry[key]) for key in entry}
                cache.update(layer_idx=layer_idx, **copies, offset=offset)

    @torch.no_grad()
    def update(
        self,
        *,
        layer_idx: int = 0,
        recurrent_state: Tensor | None = None,
        conv_state: Any | None = None,
        attn_state: KeyValues | None = None,
        offset: int = 1,
    ) -> dict[str, Any]:
        """As `GLACache.update`, by copies into the buffers; offset is not looked at.

        Raises:
            ValueError: states of other shapes than the buffers'.
        """
        # No token is counted: a CUDA graph would not, and torch.compile would start again at each.
        entry = super().update(layer_idx=layer_idx, offset=0)
        for key, new in (("recurrent_state", recurrent_state), ("conv_state", conv_state)):
            if new is not None and entry[key] is None:
                dtype = self.state_dtype if key == "recurrent_state" else None
                entry[key] = map_tensors(lambda x, dtype=dtype: self._buffer(x, dtype), new)
            if new is not None:
                self._write(entry[key], new)
        if attn_state is not None:
            self._write_attention(entry, attn_state)
        return entry

    def reset(self, rows: Tensor | None = None) -> None:
        """Zeroes the buffers, of all rows or of those in an int64 tensor `[N]`: the state before a
        first token.
        """
        for entry in self.states:
            # Of keys and values without a length nothing is seen.
            kept = {"lengths": entry["attn_state"].lengths} if "attn_state" in entry else entry
            for x in tensors_in(kept):
                if rows is None:
                    x.zero_()
                else:
                    x.index_fill_(0, rows, 0)

    def tensors(self) -> list[Tensor]:
        """Every buffer."""
        return [x for entry in self.states for x in tensors_in(entry)]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Refused: rows may be at different tokens, and a CUDA graph counts none."""
        raise NotImplementedError("StaticGLACache: get_seq_length is not implemented")

    def batch_select_indices(self, indices: Tensor) -> None:
        """As `GLACache.batch_select_indices`, with as many indices as there are rows."""
        for x in self.tensors():
            x.copy_(x.index_select(0, indices.to(x.device)))

    def activate_past_recording(self) -> None:
        """Refused: states are written over."""
        raise NotImplementedError("StaticGLACache: activate_past_recording is not implemented")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refused: the number of rows is fixed."""
        raise NotImplementedError("StaticGLACache: batch_repeat_interleave is not implemented")

    def _buffer(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Zeros of the shape of `like` with B rows; usable outside of inference mode too."""
        with torch.inference_mode(False):
            return like.new_zeros((self.batch_size, *like.shape[1:]), dtype=dtype)

    def _write_attention(self, entry: dict[str, Any], new: KeyValues) -> None:
        own = entry.get("attn_state")
        if own is new:
            return
        if own is None:
            own = KeyValues.empty(new.keys, self.batch_size, new.window)
            own.even = False
            entry["attn_state"], self.attends = own, True
        self.moves += own.reserve(max(new.longest, self.room))
        own.longest = max(own.longest, new.longest)
        room = min(new.room, own.room)
        for name in ("keys", "values"):
            self._write(getattr(own, name)[:, :room], getattr(new, name)[:, :room])
        self._write(own.lengths, new.lengths)

    def _write(self, buffer: Any, new: Any) -> None:
        if isinstance(buffer, (tuple, list)):
            for one, value in zip(buffer, new, strict=True):
                self._write(one, value)
            return
        if buffer is new:  # written there already, or None for a convolution that is not there
            return
        rows = self.batch_size if self._rows is None else self._rows.shape[0]
        if buffer is None or new is None or new.shape != (rows, *buffer.shape[1:]):
            raise ValueError(
                "StaticGLACache: expected a state of shape "
                f"{None if buffer is None else [rows, *buffer.shape[1:]]}, got "
                f"{None if new is None else list(new.shape)}"
            )
        if self.slots is not None:
            done = self._done.view(-1, *(1,) * (new.ndim - 1))
            torch.where(done, buffer, new.to(buffer.dtype), out=buffer)
        elif self._rows is None:
            buffer.copy_(new)
        else:
            buffer.index_copy_(0, self._rows, new.to(buffer.dtype))


class _Gathered(Mapping[str, Any]):
    """Some rows of a layer's entry, each state copied when it is asked for."""

    def __init__(self, entry: dict[str, Any], rows: Tensor) -> None:
        self._entry, self._of_rows = entry, lambda x: x.index_select(0, rows)

    def __getitem__(self, key: str) -> Any:
        return map_tensors(self._of_rows, self._entry[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._entry)

    def __len__(self) -> int:
        return len(self._entry)
