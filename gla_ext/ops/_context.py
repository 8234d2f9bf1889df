"""Where the tokens of a call stand in their text: all are here, unless a cp_context says else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from gla_ext.ops._door import several_ranks
from gla_ext.ops.cross_entropy import IGNORE_INDEX

# Ends the sentence of who takes no mask beside a context.
NO_MASK = (
    "expected no attention_mask beside cp_context, got one; pack the sequences and give "
    "build_cp_context their cu_seqlens"
)


class LocalContext:
    """A text that one process has whole. `gla_ext.distributed.CPContext` has the same methods for
    one rank's tokens, and `chunk_gla`, which in one process is the operator itself.

    shards: the dimensions of tokens `[B, T, H, D]` that DTensors may be sharded by, by name.
    """

    shards: ClassVar[dict[str, int]] = {"batch": 0, "heads": 2}

    def convolve(
        self,
        convolutions: Sequence[Callable[..., tuple[Tensor, Tensor | None]]],
        inputs: Sequence[Tensor],
        caches: Sequence[Tensor | None] | None,
        output_final_state: bool,
        cu_seqlens: Tensor | None,
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...] | None]:
        """Several convolutions over the same sequences, one input and one cache each; returns the
        outputs, and the caches to go on from or None.
        """
        caches = [None] * len(inputs) if caches is None else caches
        results = [
            convolution(x, cache, output_final_state, cu_seqlens)
            for convolution, x, cache in zip(convolutions, inputs, caches, strict=True)
        ]
        outputs, states = zip(*results, strict=True)
        return outputs, states if output_final_state else None

    def next_labels(self, labels: Tensor, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """The label that follows each token of x `[B, T, ...]`, `[B, T]` on its device; -100 after
        the last of a sequence. The labels given are unshifted, cu_seqlens offsets or None.
        """
        labels = labels[:, 1:].to(x.device)
        if cu_seqlens is not None:
            labels = labels.where(goes_on(cu_seqlens.to(x.device), x.shape[1]), IGNORE_INDEX)
        return F.pad(labels, (0, 1), value=IGNORE_INDEX)[:, : x.shape[1]]

    def mean(self, total: Tensor, count: Tensor | int, counted_here: bool) -> Tensor:
        """The mean loss, from the sum over the labels that are here and the number of labels, of
        those here where counted_here, else of all.
        """
        return total / count

    def check_shards(self, op: str, mesh: Any, roles: Sequence[str | None]) -> None:
        """Refuses DTensors of q's mesh and roles, by dimension, that are no parts of the text."""


_LOCAL = LocalContext()


def context_of(cp_context: Any) -> Any:
    """What stands behind a cp_context: None is one process; FLA's own object is taken too, with its
    cuts as they are.
    """
    if cp_context is None:
        return _LOCAL
    if isinstance(cp_context, LocalContext):
        return cp_context
    if type(cp_context).__name__ == "FLACPContext":
        return several_ranks().from_fla(cp_context)
    raise TypeError(
        "cp_context: expected what gla_ext.distributed.build_cp_context or FLA's build_cp_context "
        f"returns, got {type(cp_context)}"
    )


def refuse_context(cp_context: Any, sentence: str) -> None:
    """Raises NotImplementedError for a text that is cut over ranks."""
    if cp_context is not None:
        raise NotImplementedError(sentence)


def goes_on(cu_seqlens: Tensor, T: int) -> Tensor:
    """Whether tokens 1 to T - 1 are of the sequence of the token before, bool `[T - 1]`."""
    tokens = torch.arange(T, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    # Sequences count from 1; after the last offset the number is that of offsets.
    sequences = torch.searchsorted(cu_seqlens, tokens, right=True)
    return (sequences[1:] == sequences[:-1]) & (sequences[1:] < len(cu_seqlens))
