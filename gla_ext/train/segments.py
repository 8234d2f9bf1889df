"""Training on sequences longer than those of one step: truncated backpropagation, packed documents.

A window of `segments * seq_len` tokens is trained on in as many steps. Each step starts from the
states at the end of the one before, and no gradient passes between them (Williams and Peng, 1990;
the GLA paper trains this way on 24K tokens, in 12 segments of 2K). With packing, every document
starts from a zero state: a batch is one row, and `cu_seqlens` are the offsets of its documents.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gla_ext.cache import GLACache
from gla_ext.cache._key_values import map_entry, tensors_in
from gla_ext.train.data import DOCUMENT_START

States = list[dict[str, Any]]  # one entry per layer, as in a GLACache


class PackedRows(NamedTuple):
    """The documents of a batch `[B, T]` that is read as one row `[1, B * T]`.

    cu_seqlens: int32 `[N + 1]`, offsets of the documents; the last ones may be empty.
    first, last: int64 `[B]`, the index of each row's first and last document.
    goes_on: bool `[B]`, whether a row's first document started before the row.
    """

    cu_seqlens: Tensor
    first: Tensor
    last: Tensor
    goes_on: Tensor


def pack_rows(inputs: Tensor, capacity: int, start: int = DOCUMENT_START) -> PackedRows:
    """Finds the documents of a batch; nothing is read back from a GPU.

    Args:
        inputs: int64 `[B, T]`; a document starts at every token `start`, and one at each row's
            start.
        capacity: N, at least the number of documents.
        start: the token that starts a document. Default: byte 0.
    """
    B, T = inputs.shape
    starts = inputs == start
    goes_on = ~starts[:, 0]
    starts = F.pad(starts[:, 1:], (1, 0), value=True).flatten()
    number = starts.cumsum(0) - 1
    cu_seqlens = torch.full((capacity + 1,), B * T, dtype=torch.int32, device=inputs.device)
    tokens = torch.arange(B * T, dtype=torch.int32, device=inputs.device)
    # Tokens inside a document write B * T to the last offset, which has that value already.
    cu_seqlens.scatter_(0, number.where(starts, capacity), tokens.where(starts, B * T))
    number = number.view(B, T)
    return PackedRows(cu_seqlens, number[:, 0], number[:, -1], goes_on)


def forward(
    model: nn.Module, inputs: Tensor, states: States | None, rows: PackedRows | None
) -> tuple[Tensor, States]:
    """Logits `[B, T, vocab_size]` for inputs, int64 `[B, T]`, and the states of each row after its
    last token.

    Args:
        states: states of each row before its first token, from the previous call. None: zero.
        rows: result of `pack_rows`. None: each row is one sequence.
    """
    B, T = inputs.shape
    cache, cu_seqlens = GLACache(), None
    if rows is not None:
        inputs, cu_seqlens = inputs.view(1, B * T), rows.cu_seqlens
        if states is not None:
            states = [map_entry(lambda x: _spread(x, rows), entry) for entry in states]
    for layer_idx, entry in enumerate(states or ()):
        cache.update(layer_idx=layer_idx, offset=0, **entry)
    logits = model(
        inputs, past_key_values=cache, use_cache=True, cu_seqlens=cu_seqlens
    ).logits.view(B, T, -1)
    if rows is not None:
        cache.batch_select_indices(rows.last)
    return logits, list(cache)


class SegmentedLoss:
    """The loss of a step whose rows continue where the previous step ended.

    Args:
        loss: `loss(logits, targets)`, a scalar, for `[B, T, vocab_size]` and int64 `[B, T]`.
        segments: steps per window; with 1, no states are passed on.
        documents: the largest number of documents in a batch, if each document starts from a zero
            state; 0 if states continue from one document to the next. Default: 0.
        compiled: whether a step is compiled, in one graph. Default: False.
        autocast: makes a context for the model's call. Default: none.
        in_place: keep states in tensors that never move, as a CUDA graph needs. Default: False.
        document_start: the token that starts a document. Default: byte 0.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        segments: int,
        documents: int = 0,
        compiled: bool = False,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        in_place: bool = False,
        document_start: int = DOCUMENT_START,
    ) -> None:
        self.model, self.segments, self.documents = model, segments, documents
        self._in_place, self._document_start = in_place, document_start
        self._kept: States = []
        self._of_logits, self._autocast = loss, autocast
        self._run = torch.compile(self._step, fullgraph=True) if compiled else self._step
        self.states: States | None = None

    def __call__(self, step: int, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of a step, counted from 0, which must follow the previous one; keeps the
        states.
        """
        if step % self.segments == 0:
            self.states = None
        rows = None
        if self.documents:
            rows = pack_rows(inputs, self.documents, self._document_start)
        states = self.states
        if self._in_place and states:  # backward reads them after they are overwritten
            states = [map_entry(Tensor.clone, entry) for entry in states]
        loss, states = self._run(inputs, targets, states, rows)
        if self.segments > 1:
            self.states = self._keep([map_entry(Tensor.detach, entry) for entry in states])
        return loss

    def _keep(self, states: States) -> States:
        """The states, or with in_place the permanent tensors, into which they are copied."""
        if not self._in_place:
            return states
        if not self._kept:
            self._kept = [map_entry(Tensor.clone, entry) for entry in states]
        for own, new in zip(self._kept, states, strict=True):
            for kept, x in zip(tensors_in(own), tensors_in(new), strict=True):
                kept.copy_(x)
        return self._kept

    def _step(
        self, inputs: Tensor, targets: Tensor, states: States | None, rows: PackedRows | None
    ) -> tuple[Tensor, States]:
        with self._autocast():
            if self.segments > 1:
                logits, states = forward(self.model, inputs, states, rows)
            else:
                row = inputs.view(1, -1)
                logits = self.model(row, cu_seqlens=rows.cu_seqlens).logits.view(*inputs.shape, -1)
        return self._of_logits(logits, targets), states or []

    def tensors(self, step: int) -> dict[str, Tensor]:
        """The states that the next step needs and a checkpoint must hold; none at a window's
        start.
        """
        if self.states is None or step % self.segments == 0:
            return {}
        found = {}
        for layer, entry in enumerate(self.states):
            found[f"{layer}.recurrent_state"] = entry["recurrent_state"]
            for place, x in enumerate(entry["conv_state"] or ()):
                found[f"{layer}.conv_state.{place}"] = x
        return found

    def load(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        """Restores the states that `tensors` returned."""
        self.states = [] if tensors else None
        layers = 1 + max((int(name.split(".")[0]) for name in tensors), default=-1)
        for layer in range(layers):
            places = range(sum(name.startswith(f"{layer}.conv_state.") for name in tensors))
            conv_state = tuple(tensors[f"{layer}.conv_state.{i}"].to(device) for i in places)
            state = tensors[f"{layer}.recurrent_state"].to(device)
            self.states.append({"recurrent_state": state, "conv_state": conv_state or None})


def _spread(x: Tensor, rows: PackedRows) -> Tensor:
    """Copies states of rows, `[B, ..]`, to the rows' first documents, `[N, ..]`; other states are
    0.
    """
    goes_on = rows.goes_on.view(-1, *(1,) * (x.ndim - 1))
    spread = x.new_zeros(len(rows.cu_seqlens) - 1, *x.shape[1:])
    return spread.index_copy(0, rows.first, x.where(goes_on, 0))
