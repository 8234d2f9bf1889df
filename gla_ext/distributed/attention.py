"""`chunk_gla` with a context of context parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gla_ext.distributed import _operator
from gla_ext.distributed.context import Cut, as_context

_fwd = torch.ops.gla_ext.chunk_gla_fwd.default


def chunk_gla_with_context(
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
    cp_context: Any,
) -> tuple[Tensor, Tensor | None]:
    """`gla_ext.chunk_gla` of this rank's tokens, see there.

    Raises:
        ValueError: cu_seqlens beside the context; shapes that do not fit it, or other ranks.
        NotImplementedError: this build has no operators for it.
    """
    context = as_context(cp_context)
    if q.ndim != 4:
        raise ValueError(
            f"chunk_gla: expected q to have 4 dimensions [B, T, H, K], got {q.ndim} with shape "
            f"{list(q.shape)}"
        )
    B, T = q.shape[:2]
    cut = context.cut(T, q.device)
    check_offsets_are_the_contexts("chunk_gla", cu_seqlens, cut)
    if cut.cu_seqlens is not None and B != 1:
        raise ValueError(
            f"chunk_gla: expected a batch of one beside a cp_context with cu_seqlens, got B = {B}"
        )
    gates = {"g": g, "gv": gv}
    context.compare(
        "chunk_gla",
        **{name: _kind(t) for name, t in {"q": q, "k": k, "v": v, **gates}.items()},
        tokens=T if context.lengths is None else None,
        scale=scale,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        batch_invariant=batch_invariant,
        gradients=torch.is_grad_enabled() and _any_requires_grad(q, k, v, g, gv, initial_state),
    )
    options = (scale, output_final_state, state_v_first, batch_invariant, for_backward_bytes)
    if context.size == 1:
        o, state, *_ = _fwd(q, k, v, g, gv, initial_state, cut.cu_seqlens, *options)
        return o, state if output_final_state else None
    counts, P = cut.counts, len(cut.parts)
    by_rows = cut.cu_seqlens is None
    if by_rows:
        if initial_state is not None:
            _check_rows(initial_state, B)
            if counts[0] == 0:  # no tokens here, and nothing begins; its gradient is 0
                initial_state = initial_state.masked_fill(initial_state.new_ones(()).bool(), 0)
        counts = (B,) * P
    if by_rows and P == 2:
        q, k, v, g, gv = (rows_of_parts(t) for t in (q, k, v, g, gv))
        if initial_state is not None:  # a row begins in its first part
            nothing = torch.zeros_like(initial_state)
            initial_state = torch.stack([initial_state, nothing], 1).flatten(0, 1)
    o, state = _operator.chunk_gla_across_ranks(
        q, k, v, g, gv, initial_state, cut.cu_seqlens, *options,
        context.rank, context.size, context.group_name, counts, cut.before, cut.after,
    )  # fmt: skip
    if by_rows and P == 2:
        o, state = o.unflatten(0, (B, 2)).flatten(1, 2), state[1::2]
    return o, state if output_final_state else None


def check_offsets_are_the_contexts(op: str, cu_seqlens: Tensor | None, cut: Cut) -> None:
    """Raises ValueError for offsets beside a context that are not its own."""
    if cu_seqlens is not None and cu_seqlens is not cut.cu_seqlens:
        raise ValueError(
            f"{op}: expected cu_seqlens to be None beside cp_context, which has the offsets of the "
            "whole text, got a tensor"
        )


def rows_of_parts(x: Tensor | None) -> Tensor | None:
    """`[B, T, ...]`, two parts a row, as rows of one part, `[2 B, T / 2, ...]`."""
    return None if x is None else x.unflatten(1, (2, x.shape[1] // 2)).flatten(0, 1)


def _check_rows(initial_state: Tensor, B: int) -> None:
    if initial_state.ndim != 4 or initial_state.shape[0] != B:
        raise ValueError(
            f"chunk_gla: expected initial_state to have a row for each of the {B} rows of the "
            f"batch, got shape {list(initial_state.shape)}"
        )


def _kind(t: Tensor | None) -> str:
    """What must be alike on all ranks: B, heads, width and dtype, but not the tokens."""
    if t is None:
        return "None"
    return f"[{t.shape[0]}, T, {', '.join(map(str, t.shape[2:]))}] {t.dtype}"


def _any_requires_grad(*tensors: Tensor | None) -> bool:
    return any(t is not None and t.requires_grad for t in tensors)
