"""A cache of recurrent states whose tensors never move, for CUDA graphs and long decoding."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gla_ext.cache._key_values import KeyValues, map_entry, map_tensors, tensors_in
from gla_ext.cache._rows import Checkpoints, Gathered
from gla_ext.cache._tokens import TokenBuffers
from gla_ext.cache.states import GLACache


class StaticGLACache(GLACache):
    """A cache of B sequences whose tensors never move, for CUDA graphs and long decoding.

    The first states are copied into new buffers, and all later states over them. A layer that
    decodes one token writes its recurrent state there directly. No gradient passes through the
    cache.

    With `buffers`, a step may leave recurrent states as they are and keep its token beside them;
    `flush` makes the states whole.

    Only the keys and values of attention layers move, if `reserve` makes more room for them.

    Args:
        batch_size: B.
        done: bool `[B]`, read at every token step: the states of rows with True do not change.
            Default: None (every row goes on).

    Attributes:
        longest: with attention, an upper bound of the tokens of every row; the decoding code counts
            it.
        moves: how often keys and values have moved.
        attends: whether an attention layer has stored keys and values here.
        buffers: tokens that the states do not hold yet, if the decoding code uses them: it then
            calls `begin_step` before each step and `count_token` after it. Default: None.
    """

    in_place = True
    room = 0  # tokens that keys and values have room for initially
    state_dtype: torch.dtype | None = None  # dtype of the states in the buffers, if not their own
    counts = True  # False if the decoding code counts tokens and makes room
    zeroed: int | None = None  # number of rows of the buffers that are zeroed first, if not all

    def __init__(self, batch_size: int, done: Tensor | None = None) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.longest, self.moves, self.attends = 0, 0, False
        self.buffers: TokenBuffers | None = None
        self._done, self._slots = done, None
        if done is not None:
            self._every_row = torch.arange(batch_size, device=done.device)
            self._slots = self._every_row.clone()
            self._no_row = torch.full_like(self._every_row, -1)
        self._prefills, self._starts = False, False
        self._rows: Tensor | None = None
        self._sources: Tensor | None = None
        self._goes_on: Tensor | None = None
        self._checkpoints: Checkpoints | None = None

    def __len__(self) -> int:
        return 0 if self._starts else len(self.states)

    def __getitem__(self, layer_idx: int) -> Mapping[str, Any]:
        entry = self.states[layer_idx]
        if self._rows is None:
            return entry
        return Gathered(entry, self._sources, self._goes_on)

    def prompt_rows(self, layer_idx: int | None) -> dict[str, Any] | None:
        """Arguments of `chunk_gla_` that let a layer process prompts in place: the buffer, the
        prompts' rows, whether they start from a state, and checkpoints. None outside of `prefill`,
        and before the buffer exists.
        """
        if not self._prefills or layer_idx is None or layer_idx >= len(self.states):
            return None
        buffer, rows = self.states[layer_idx]["recurrent_state"], self._rows
        if buffer is None:
            return None
        if self._starts and self._goes_on is None:
            count = self.batch_size if rows is None else rows.shape[0]
            self._goes_on = torch.zeros(count, dtype=torch.bool, device=buffer.device)
        found = {"state": buffer, "slots": self._sources, "has_initial_state": self._goes_on}
        if self._sources is not rows:
            found["write_slots"] = rows
        if (kept := self._checkpoints) is not None:
            found |= {"checkpoint_every": kept.every, "checkpoint_slots": kept.rows}
            found["checkpoint_cu_starts"] = kept.cu_starts
        return found

    def token_buffers(
        self, layer_idx: int | None, k: Tensor, v: Tensor, gk: Tensor
    ) -> dict[str, Tensor] | None:
        """Arguments of `recurrent_gla_buffered_step_` for a layer's tokens; None if they go into
        the state directly. The first prompt makes the buffers.
        """
        if self.buffers is None or layer_idx is None or not self.buffers.allow(k):
            return None
        found = self.buffers.of(layer_idx, k, v, gk, self.batch_size)
        return None if self._prefills or not self.buffering else found

    def begin_step(self) -> bool:
        """Decides whether the next step uses the buffers, and returns that. If not, the states
        become whole.
        """
        if self.buffers is None:
            return False
        self.buffering = self.buffers.fit(self.batch_size)
        if not self.buffering:
            self.flush()
        self.buffers.filled |= self.buffering
        return self.buffering

    def count_token(self) -> None:
        """Counts a step's token, after the model; rows that are done have none."""
        if self.buffering:
            self.buffers.count_token(self._done)

    def flush(self, rows: Tensor | None = None) -> None:
        """Makes recurrent states whole: all rows, or the rows in an int64 tensor `[N]`."""
        if self.buffers is not None:
            self.buffers.flush(self.states, rows)

    def keep_inputs(self, layer_idx: int, inputs: Sequence[Tensor]) -> None:
        """Stores the inputs of a layer's convolutions, `[1, T, D]` each, that checkpoints need."""
        if self._checkpoints is not None:
            for buffer, x in zip(self.states[layer_idx]["conv_state"], inputs, strict=True):
                self._checkpoints.keep_inputs(buffer, x)

    @property
    def attention(self) -> list[KeyValues]:
        """The keys and values of every attention layer."""
        return [entry["attn_state"] for entry in self.states if "attn_state" in entry]

    def expect_token(self, kept: KeyValues) -> None:
        """Makes room for the keys and values of a token step, unless the decoding code does
        that.
        """
        if self.counts:
            kept.longest += 1
            self.moves += kept.reserve(kept.longest)

    def reserve(self, count: int) -> None:
        """Makes room for rows of `count` tokens, rounded up to a power of two."""
        moved = [kept.reserve(count) for kept in self.attention]
        self.moves += any(moved)

    def count_longest(self) -> None:
        """Sets `longest` to the length of the longest row; waits for the device."""
        self.longest = max((int(kept.lengths.max()) for kept in self.attention[:1]), default=0)

    @property
    def slots(self) -> Tensor | None:
        return None if self._prefills else self._slots

    def skip_done(self) -> None:
        """Updates `slots` from `done`."""
        torch.where(self._done, self._no_row, self._every_row, out=self._slots)

    @contextlib.contextmanager
    def prefill(
        self,
        rows: Tensor | None = None,
        keep: bool = False,
        before: int = 0,
        max_seqlen: int | None = None,
        *,
        sources: Tensor | None = None,
        goes_on: Tensor | None = None,
        checkpoints: Checkpoints | None = None,
    ) -> Iterator[None]:
        """While active, sequences use the given rows, done or not, and layers overwrite their
        states.

        The last three arguments are for models without attention.

        Args:
            rows: int64 `[N]`, the rows of the N sequences; other rows do not change. Default: None
                (all B rows).
            keep: whether sequences start from the states of the rows instead of zero.
                Default: False.
            before: with keep, an upper bound of the tokens of each row so far; only used with
                attention. Default: 0.
            max_seqlen: an upper bound of the length of the sequences. Default: None (unknown).
            sources: int64 `[N]`, with keep, the rows whose states sequences start from; they are
                not changed, and must be whole. Default: None (rows).
            goes_on: bool `[N]`, with keep: a sequence with False starts from zero. Default: None
                (all True).
            checkpoints: rows that store states in the middle of the prompts. All layers must be GLA
                and not in mode 'fused_recurrent'. Default: None.
        """
        if keep and sources is None:
            self.flush(rows)
        elif self.buffers is not None:
            self.buffers.drop(rows)
        self._prefills, self._starts, self._rows = True, not keep, rows
        self._sources = rows if sources is None else sources
        self._goes_on, self._checkpoints = goes_on, checkpoints
        for kept in self.attention:
            kept.longest = before
        self.max_seqlen = max_seqlen
        try:
            yield
        finally:
            self._prefills, self._starts, self._rows = False, False, None
            self._sources = self._goes_on = self._checkpoints = None
            self.max_seqlen = None

    @torch.no_grad()
    def load(self, cache: GLACache) -> None:
        """Overwrites the states with those of a cache of B sequences."""
        with self.prefill():
            for layer_idx, entry in enumerate(cache):
                self.update(layer_idx=layer_idx, **entry)
        self.longest = max((kept.longest for kept in self.attention), default=0)

    @torch.no_grad()
    def save(self, cache: GLACache, offset: int) -> None:
        """Copies the states into a cache, and adds `offset` tokens to its count."""
        for kept in self.attention:
            kept.longest = self.longest
        self.flush()
        with torch.inference_mode(False):
            for layer_idx, entry in enumerate(self):
                cache.update(layer_idx=layer_idx, **map_entry(Tensor.clone, entry), offset=offset)

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
        """Like `GLACache.update`, but copies into the buffers; offset is ignored.

        Raises:
            ValueError: if the shapes of states and buffers differ.
        """
        # Tokens are not counted: a CUDA graph would not do so, and torch.compile would recompile
        # each time.
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
        """Zeroes the buffers, as before a first token: all rows, or the rows in an int64 tensor
        `[N]`.
        """
        if self.buffers is not None:
            self.buffers.drop(rows)
        for x in self.tensors():
            _clear(x, rows)

    def tensors(self) -> list[Tensor]:
        """Every buffer of states; those of tokens are not among them."""
        return [x for entry in self.states for x in tensors_in(entry)]

    @property
    def nbytes(self) -> int:
        """Memory of states and tokens, bytes."""
        tokens = 0 if self.buffers is None else self.buffers.nbytes
        return sum(x.nbytes for x in self.tensors()) + tokens

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Not implemented: rows may be at different tokens, and a CUDA graph does not count
        tokens.
        """
        raise NotImplementedError("StaticGLACache: get_seq_length is not implemented")

    def batch_select_indices(self, indices: Tensor) -> None:
        """Like `GLACache.batch_select_indices`; there must be as many indices as rows."""
        self.flush()
        for x in self.tensors():
            x.copy_(x.index_select(0, indices.to(x.device)))

    def activate_past_recording(self) -> None:
        """Not implemented: states are overwritten."""
        raise NotImplementedError("StaticGLACache: activate_past_recording is not implemented")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Not implemented: the number of rows is fixed."""
        raise NotImplementedError("StaticGLACache: batch_repeat_interleave is not implemented")

    def _buffer(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A buffer with the shape of `like` but B rows, of which the first `zeroed` are 0. It can
        also be used outside of inference mode.
        """
        with torch.inference_mode(False):
            buffer = like.new_empty((self.batch_size, *like.shape[1:]), dtype=dtype)
            buffer[: self.zeroed].zero_()
            return buffer

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
            if room < own.room:  # earlier tokens may have left NaN, and 0 × NaN is NaN
                _clear(getattr(own, name)[:, room:], self._rows)
        self._write(own.lengths, new.lengths)

    def _write(self, buffer: Any, new: Any) -> None:
        if isinstance(buffer, (tuple, list)):
            for one, value in zip(buffer, new, strict=True):
                self._write(one, value)
            return
        if buffer is new:  # already written, or None for a missing convolution
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


def _clear(x: Tensor, rows: Tensor | None) -> None:
    """Zeroes all rows, or only the given ones."""
    if rows is None:
        x.zero_()
    else:
        x.index_fill_(0, rows, 0)
