"""The newest tokens of rows, kept beside their recurrent states, which a step then only reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gla_ext.ops.chunk import is_batch_invariant
from gla_ext.ops.recurrent import recurrent_gla_commit_

LENGTH = 16  # tokens that a row's buffer holds: a state is written once in so many steps
FEWEST_ROWS = 33  # fewer have the kernels of `gla_ext.model.step`, which write the states
DEVICES = ("cuda",)
MOST_KEYS = 512  # of a head; steps with more were not timed, and GPUs such as 8.9 refuse them


def are_faster(rows: int, device: torch.device) -> bool:
    """Whether steps of so many rows are faster with buffers."""
    return rows >= FEWEST_ROWS and device.type in DEVICES


class TokenBuffers:
    """Keys, values and log gates of the tokens that the states of rows do not hold yet.

    A step of `recurrent_gla_buffered_step_` adds its token, and reads state and buffer. It writes a
    state, with all tokens of the row's buffer, when that is full.

    Args:
        rows: number of rows.

    Attributes:
        counts: int32 `[rows]`, number of tokens in each row's buffer; the same in every layer.
        filled: whether any count may be above 0.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.counts = torch.zeros(rows, dtype=torch.int32, device=device)
        self.filled = False
        # Of each layer: `[rows, LENGTH, HK, K]`, `[rows, LENGTH, HK, V]`, `[rows, LENGTH, HK, K]`.
        self._layers: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    @property
    def nbytes(self) -> int:
        """Memory, bytes."""
        return sum(x.nbytes for buffers in self._layers.values() for x in buffers)

    @property
    def allowed(self) -> bool:
        """False in batch-invariant mode, whose tokens are chunks, and under autocast, whose dtypes
        may not be those of the next step.
        """
        autocast = torch.is_autocast_enabled(self.counts.device.type)
        return not (is_batch_invariant() or autocast)

    def allow(self, k: Tensor) -> bool:
        """Whether tokens with such keys, `[B, T, HK, K]`, may be kept now."""
        return self.allowed and k.shape[-1] <= MOST_KEYS

    def fit(self, rows: int) -> bool:
        """Whether a step of the first so many rows uses the buffers now."""
        return self.allowed and are_faster(rows, self.counts.device)

    def of(self, layer_idx: int, k: Tensor, v: Tensor, gk: Tensor, rows: int) -> dict[str, Tensor]:
        """The layer's buffers and the counts of the first rows, as arguments of
        `recurrent_gla_buffered_step_`. The first call makes the buffers for tokens like k, v, gk.
        """
        if layer_idx not in self._layers:
            form = (len(self.counts), LENGTH)
            with torch.inference_mode(False):
                made = (x.new_zeros(*form, *x.shape[2:]) for x in (k, v, gk))
                self._layers[layer_idx] = tuple(x.detach() for x in made)
        buffers = zip("kvg", self._layers[layer_idx], strict=True)
        found = {f"buffer_{name}": x[:rows] for name, x in buffers}
        return found | {"count": self.counts[:rows]}

    def count_token(self, waits: Tensor) -> None:
        """Counts a step's token for the first rows, except where `waits`, bool `[B]`, is True."""
        counts = self.counts[: len(waits)]
        torch.where(waits, counts, counts % LENGTH + 1, out=counts)

    @torch.no_grad()
    def flush(self, states: Sequence[Mapping[str, Any]], rows: Tensor | None = None) -> None:
        """Moves the tokens into the states, given by layer, of all rows or of those in an int64
        tensor `[N]`.
        """
        if self.filled:
            accepted = self.counts
            if rows is not None:
                accepted = torch.zeros_like(accepted).index_copy_(0, rows, accepted[rows])
            for layer_idx, tokens in self._layers.items():
                state = states[layer_idx]["recurrent_state"][: len(accepted)]
                recurrent_gla_commit_(*tokens, state=state, accepted=accepted, state_v_first=True)
        self.drop(rows)

    def drop(self, rows: Tensor | None = None) -> None:
        """Empties the buffers of all rows, or of those in an int64 tensor `[N]`."""
        if rows is None:
            self.counts.zero_()
            self.filled = False
        else:
            self.counts.index_fill_(0, rows, 0)
