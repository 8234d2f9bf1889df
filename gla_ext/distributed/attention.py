"""`chunk_gla` with a context of context parallelism."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gla_ext.distributed._cuts import Cut

_fwd = torch.ops.gla_ext.chunk_gla_fwd.default
_OPTIONS = ("scale", "output_final_state", "state_v_first", "batch_invariant", "gradients")
_across_ranks = torch.ops.gla_ext.chunk_gla_across_ranks.default


def chunk_gla_with_context(
    context: Any,
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
) -> tuple[Tensor, Tensor | None]:
    """`gla_ext.chunk_gla` for this rank's tokens, see there; context is the `CPContext`.

    Raises:
        ValueError: cu_seqlens given together with the context; shapes that do not fit the context
            or the other ranks.
    """
    if q.ndim != 4:
        raise ValueError(
            f"chunk_gla: expected q to have 4 dimensions [B, T, H, K], got {q.ndim} with shape "
            f"{list(q.shape)}"
        )
    B, T = q.shape[:2]
    cut = context.cut_of_states(T, q.device)
    check_offsets_are_the_contexts("chunk_gla", cu_seqlens, cut)
    if cut.cu_seqlens is not None and B != 1:
        raise ValueError(
            f"chunk_gla: expected a batch of one beside a cp_context with cu_seqlens, got B = {B}"
        )
    needs_gradient = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (q, k, v, g, gv, initial_state)
    )
    if context.size > 1:
        kinds = [None if t is None else (t.shape, t.dtype) for t in (q, k, v, g, gv)]
        options = (scale, output_final_state, state_v_first, batch_invariant, needs_gradient)
        facts = functools.partial(_facts, T if context.lengths is None else None, kinds, options)
        context.compare("chunk_gla", (*kinds, *options), facts)
    if context.size == 1:
        options = (scale, output_final_state, state_v_first, batch_invariant, for_backward_bytes)
        o, state, *_ = _fwd(q, k, v, g, gv, initial_state, cut.cu_seqlens, *options)
        return o, state if output_final_state else None
    by_rows = cut.cu_seqlens is None
    if by_rows and initial_state is not None:
        _check_rows(initial_state, B)
        if cut.count == 0:  # no tokens here and no sequence begins; its gradient is 0
            initial_state = initial_state.masked_fill(initial_state.new_ones(()).bool(), 0)
    one_sequence = by_rows or cut.offsets == (0, cut.lengths[cut.rank])
    o, state = _across_ranks(
        q, k, v, g, gv, initial_state, None if one_sequence else cut.cu_seqlens, scale,
        output_final_state, state_v_first, batch_invariant,
        needs_gradient and for_backward_bytes != 0, context.rank, context.size, context.group_name,
        (cut.count,), (cut.before,), (cut.after,), cut.spans,
    )  # fmt: skip
    return o, state if output_final_state else None


def check_offsets_are_the_contexts(op: str, cu_seqlens: Tensor | None, cut: Cut) -> None:
    """Raises ValueError for offsets that are given together with a context but are not its own."""
    if cu_seqlens is not None and cu_seqlens is not cut.cu_seqlens:
        raise ValueError(
            f"{op}: expected cu_seqlens to be None beside cp_context, which has the offsets of the "
            "whole text, got a tensor"
        )


def _check_rows(initial_state: Tensor, B: int) -> None:
    if initial_state.ndim != 4 or initial_state.shape[0] != B:
        raise ValueError(
            f"chunk_gla: expected initial_state to have a row for each of the {B} rows of the "
            f"batch, got shape {list(initial_state.shape)}"
        )


def _facts(tokens: int | None, kinds: Sequence[Any], options: Sequence[Any]) -> dict[str, Any]:
    """The facts that must be equal on all ranks, by name; for tensors B, heads, width and dtype."""
    facts: dict[str, Any] = dict.fromkeys(("q", "k", "v", "g", "gv"))
    for name, kind in zip(facts, kinds, strict=True):
        if kind is not None:
            (B, _, *others), dtype = kind
            facts[name] = f"[{', '.join(map(str, (B, 'T', *others)))}] {dtype}"
    return facts | {"tokens": tokens} | dict(zip(_OPTIONS, options, strict=True))
