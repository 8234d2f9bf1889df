"""Whether this process has whole sequences or, with a cp_context, one rank's part of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from gla_ext.ops._door import several_ranks
from gla_ext.ops.cross_entropy import IGNORE_INDEX

# End of the error message of functions that take no mask together with a context.
NO_MASK = (
    "expected no attention_mask beside cp_context, got one; pack the sequences and give "
    "build_cp_context their cu_seqlens"
)


class LocalContext:
    """The context of one process, which has whole sequences. `gla_ext.distributed.CPContext` has
    the same methods for one rank's tokens, and also `chunk_gla`; one process calls the operator
    directly.

    shards: the dimensions of tokens `[B, T, H, D]` by which DTensors may be sharded, with their
    names.
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
        """Runs several convolutions over the same sequences, each with its own input and cache.
        Returns the outputs, and the caches after the tokens or None.
        """
        caches = [None] * len(inputs) if caches is None else caches
        results = [
            convolution(x, cache, output_final_state, cu_seqlens)
            for convolution, x, cache in zip(convolutions, inputs, caches, strict=True)
        ]
        outputs, states = zip(*results, strict=True)
        return outputs, states if output_final_state else None

    def next_labels(self, labels: Tensor, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """The label of the token after each token of x `[B, T, ...]`: `[B, T]` on x's device, -100
        at the last token of a sequence. `labels` are unshifted; cu_seqlens are offsets or None.
        """
        labels = labels[:, 1:].to(x.device)
        if cu_seqlens is not None:
            labels = labels.where(goes_on(cu_seqlens.to(x.device), x.shape[1]), IGNORE_INDEX)
        return F.pad(labels, (0, 1), value=IGNORE_INDEX)[:, : x.shape[1]]

    def mean(self, total: Tensor, count: Tensor | int, counted_here: bool) -> Tensor:
        """The mean loss: total, the sum over the labels of this process, divided by the number of
        labels. count is the number of labels of this process if counted_here, else of all.
        """
        return total / count

    def check_shards(self, op: str, mesh: Any, roles: Sequence[str | None]) -> None:
        """Raises if DTensor shards do not fit this context; roles are q's, per mesh dimension."""


_LOCAL = LocalContext()


def context_of(cp_context: Any) -> Any:
    """The context object for a cp_context argument. None means one process. FLA's own object is
    also accepted, with its split of the tokens.
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
    """Raises NotImplementedError(sentence) if there is a cp_context, that is, if sequences are
    split across ranks.
    """
    if cp_context is not None:
        raise NotImplementedError(sentence)


def goes_on(cu_seqlens: Tensor, T: int) -> Tensor:
    """Whether each of tokens 1 to T - 1 continues the previous token's sequence, bool `[T - 1]`."""
    tokens = torch.arange(T, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    # Sequences are numbered from 1; tokens after the last offset get the number len(cu_seqlens).
    sequences = torch.searchsorted(cu_seqlens, tokens, right=True)
    return (sequences[1:] == sequences[:-1]) & (sequences[1:] < len(cu_seqlens))
