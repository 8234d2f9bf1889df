"""The context-parallel operator: the one function in which a rank's tokens meet the others'."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def chunk_gla_across_ranks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    gv: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float | None,
    output_final_state: bool,
    state_v_first: bool,
    batch_invariant: bool,
    for_backward_bytes: int,
    rank: int,
    size: int,
    group_name: str,
    counts: Sequence[int],
    before: Sequence[int],
    after: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """`chunk_gla` of this rank's parts of a text; differentiable in tensors, over all ranks.

    A rank holds P parts, one, or in the zigzag layout two: part r, or parts r and 2 size - 1 - r of
    the text. What a part's last sequence leaves goes to the `after` parts that follow it in the
    text; its first sequence begins with what the `before` parts ahead of it leave. All ranks call
    it, forward and backward, each with one all-gather in the group.

    Args:
        q to gv: as `chunk_gla`'s. Without offsets every part has R rows, and rows p, p + P, ... are
            those of part p: `[R * P, T, ...]`. With them B = 1, and the parts follow each other.
        initial_state: `[N, H, K, V]` (or V first), read where a sequence begins; rows that come
            from before are not looked at, and get a gradient of 0.
        cu_seqlens: int32 `[N + 1]`, offsets of the own sequences of this rank's parts, or None.
        counts: own sequences of each part, N in all with offsets; R each without.
        before, after: one a part; 0 where the first sequence begins in it, the last ends in it, and
            for a part without sequences.

    Returns:
        o, and the final states `[N, H, K, V]`: of a sequence that goes on after this part 0,
        without gradient.
    """
    raise NotImplementedError(
        "chunk_gla: cp_context is not supported by this build of gla_ext on more than one rank: it "
        "has no operators chunk_gla_summary and chunk_gla_apply"
    )
