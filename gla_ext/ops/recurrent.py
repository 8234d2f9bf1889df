"""The recurrence as Python functions: for sequences, and for states in a server's pool."""

import functools
import warnings
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from gla_ext.ops._checks import check_scale, wide_state, without_last_of_one
from gla_ext.ops._door import at_once, form_of, not_in_onnx, on_pool, on_shards, when_read
from gla_ext.ops._flops import product
from gla_ext.ops._operator import declare
from gla_ext.ops._plain import gla
from gla_ext.ops._vmap import as_one_batch, slice_by_slice
from gla_ext.ops.inputs import CHECKS_INPUTS, check_values

_TENSORS = "q k v gk gv initial_state cu_seqlens"
_STEP_TENSORS = "q k v gk gv state slots write_slots out"
_VERIFY_TENSORS = "q k v gk gv state slots cu_seqlens out"
_COMMIT_TENSORS = "k v gk gv state slots accepted cu_seqlens write_slots"


def fused_recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: bool,
) -> tuple[Tensor, Tensor | None]:
    r"""Gated linear attention token by token (Yang et al., arXiv 2312.06635, equation 3).

    Computes, for every sequence and head,

        S_t = diag(exp(gk_t)) S_{t-1} diag(exp(gv_t)) + k_t v_t^T,    o_t = scale * S_t^T q_t

    one token after the other. Use it for decoding, short prompts, gates on values, and reverse
    time; `chunk_gla` is the fast form for long sequences. Tokens come before heads, as in
    `chunk_gla`. Differentiable in q, k, v, gk, gv and initial_state. Backward computes the states
    again and never divides by a decay, so that it is as exact as the recurrence for any gate. Its
    workspace grows with T: a state of every head for every 32 tokens (CUDA) or 16 (CPU). On CUDA,
    where several blocks share a state, it also has fp32 partial sums of dq, dk and dgk for each
    block.

    Args:
        q, k, v: `[B, T, H, K]`, `[B, T, HK, K]`, `[B, T, HK, V]`, as in `chunk_gla`.
        gk: logarithms of decays, like g of `chunk_gla`: `[B, T, HK, K]`, or one decay per head,
            `[B, T, HK]` or `[B, T, HK, 1]`. Default: no decay.
        gv: logarithms of the decays of value channels, `[B, T, HK, V]`. Default: no decay.
        scale, initial_state, output_final_state, state_v_first, cu_seqlens: as in `chunk_gla`.
        reverse: process the tokens from last to first. Default: False.
        **kwargs: `transpose_state_layout`, the old name of state_v_first; it warns.

    Returns:
        The same as `chunk_gla`.

    Raises:
        ValueError: shapes, devices or offsets that do not agree; both names of state_v_first.
        TypeError: dtypes that do not agree; unknown keywords; a scale that is a tensor.
        NotImplementedError: a device or layout without kernels; forward-mode AD; torch.func
            transforms except vmap; DTensors sharded by dimensions other than batch and heads.
    """
    if kwargs:
        state_v_first = _state_layout(kwargs, state_v_first)
    check_scale("fused_recurrent_gla", scale)
    tensors = (q, k, v, gk, gv, initial_state, cu_seqlens)
    if (sharding := on_shards("fused_recurrent_gla", _TENSORS, tensors)) is not None:
        options = {"scale": scale, "output_final_state": output_final_state, "reverse": reverse}
        call = functools.partial(fused_recurrent_gla, state_v_first=state_v_first, **options)
        tokens = {"q": q, "k": k, "v": v, "gk": gk, "gv": gv}
        args = ("fused_recurrent_gla", call, tokens, initial_state, cu_seqlens)
        return sharding.attend_on_shards(*args)
    gk = without_last_of_one(gk, k)
    initial_state = wide_state(initial_state, q)
    o, final_state = form_of(_fwd, _plain)(
        q, k, v, gk, gv, initial_state, cu_seqlens, scale, output_final_state, reverse,
        state_v_first,
    )  # fmt: skip
    if CHECKS_INPUTS:
        args = ("fused_recurrent_gla", "gk", q, k, v, gk, gv, scale, initial_state, cu_seqlens)
        when_read(q, check_values, *args)
    return o, final_state if output_final_state else None


def recurrent_gla_step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    *,
    state: Tensor,
    slots: Tensor | None = None,
    scale: float | None = None,
    state_v_first: bool = False,
    write_slots: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Decodes the next token of every row and updates the rows' states, in place.

    This is the recurrence of `fused_recurrent_gla` for B rows whose states are in a pool, so that a
    server can keep the states of all its sequences in one tensor. Row b reads `state[slots[b]]` and
    writes its new state there, or to `state[write_slots[b]]`. Each state matrix is read once and
    written once. There is no gradient. Works in CUDA graphs and under
    `torch.compile(fullgraph=True)`, which does not copy the pool.

    A pool in bfloat16 or float16 needs half the memory and half the time of a token step.
    Arithmetic is still fp32: a call rounds a state once, to nearest, when it writes it. A token's
    contribution to an element is therefore lost if it is less than half a unit in the last place,
    which happens with gates near 1; float16 also overflows beyond 65504. See "States in 16 bits" on
    the page on numerics.

    Args:
        q: `[B, T, H, K]`, mostly with T = 1; T tokens are T token steps in one call.
        k, v: `[B, T, HK, K]`, `[B, T, HK, V]`, as in `fused_recurrent_gla`.
        gk, gv: gates, `[B, T, HK, K]` (gk also `[B, T, HK]`) and `[B, T, HK, V]`. Default: None.
        state: the pool, `[P, H, K, V]`, or `[P, H, V, K]` if `state_v_first`; float32, bfloat16 or
            float16, whatever the dtype of q (float64 with float64 q). Its last two dimensions are
            contiguous; P and H may have any stride with which no two matrices overlap.
        slots: for each row of the batch, its row of the pool, `[B]`, int32 or int64, on q's device.
            A slot below 0 (by convention -1) or beyond the pool skips its row: o is zero there and
            no state is read or written. A slot given twice leaves its state and the o of its rows
            undefined, but nothing else. Default: P = B, and row b has slot b.
        scale: factor of the scores, a number. Default: `K ** -0.5`.
        state_v_first: layout of the pool. Default: False.
        write_slots: row of the pool for each row's new state, like slots. The row's own slot is
            then only read, so that many rows may start from one cached state (copy-on-write). For a
            slot below 0 or beyond the pool nothing is written, but o is still computed. A slot that
            a row writes must not be read or written by another row; otherwise its state and the o
            of these rows are undefined. Default: slots.
        out: tensor for o, of o's shape and dtype, with a contiguous last dimension and no memory
            shared with the inputs; contiguous under torch.compile. Default: a new tensor.

    Returns:
        o, `[B, T, H, V]` in v's dtype, or out.

    Raises:
        ValueError: shapes, devices or strides that do not agree; an out that shares memory with an
            input (or is a view of its buffer with other strides).
        TypeError: dtypes that do not agree; a scale that is a tensor.
        NotImplementedError: grad mode is on and an input requires grad; a device or layout without
            kernels; torch.vmap; DTensors sharded by a dimension other than the heads.
    """
    check_scale("recurrent_gla_step_", scale)
    tensors = (q, k, v, gk, gv, state, slots, write_slots, out)
    if (sharding := on_shards("recurrent_gla_step_", _STEP_TENSORS, tensors)) is not None:
        options = {"scale": scale, "state_v_first": state_v_first}
        call = functools.partial(recurrent_gla_step_, **options)
        tokens = {"q": q, "k": k, "v": v, "gk": gk, "gv": gv}
        rows = {"slots": slots, "write_slots": write_slots}
        return sharding.step_on_shards("recurrent_gla_step_", call, tokens, state, rows, out)
    gk = without_last_of_one(gk, k)
    args = (q, k, v, gk, gv, state, slots, scale, state_v_first, write_slots)
    return on_pool(_step, _step_in_onnx, *args, out=out)


def recurrent_gla_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    *,
    state: Tensor,
    slots: Tensor | None = None,
    scale: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The outputs of T draft tokens of every row; no state is changed.

    For speculative decoding. Returns the o that `recurrent_gla_step_` would return for the same T
    tokens, but reads the rows' states once and writes none. The bits are the same on CPU. On CUDA,
    where the chunk form processes drafts of 2 to 16 tokens, results are equal up to fp32 rounding.
    A token's o does not depend on other rows, the slot, or the number of tokens after it (on CUDA
    within drafts of 2 to 16 tokens). A state is not rounded between the tokens of a call. The model
    then accepts the first n_b tokens of row b, and one `recurrent_gla_commit_` updates the states:

        o = recurrent_gla_verify(q, k, v, gk, state=pool, slots=slots)       # T drafted tokens
        accepted = ...                                                       # [B], 0 .. T
        recurrent_gla_commit_(k, v, gk, state=pool, slots=slots, accepted=accepted)

    Between the two calls only k, v and the gates are kept, T (K + V) numbers per head and not K V.

    Args:
        q, k, v, gk, gv, state, slots, scale, state_v_first: as in `recurrent_gla_step_`. slots may
            repeat, to verify several drafts of a sequence at once, and the matrices of the pool may
            overlap.
        cu_seqlens: offsets of N drafts of any lengths packed in one row, `[N + 1]`, int32 or int64,
            on q's device, with B = 1: first 0, non-decreasing, last at most T. Draft n has
            `slots[n]`, and slots is `[N]`; tokens after the last offset give zeros. On CUDA the
            chunk form also processes packed drafts of one token. Default: every row is a draft.

    Returns:
        o, `[B, T, H, V]` in v's dtype, or out.

    Raises the errors of `recurrent_gla_step_`, and on CPU ValueError for invalid offsets. On CUDA
    offsets are not checked; wrong ones never cause an access outside a tensor.
    """
    check_scale("recurrent_gla_verify", scale)
    tensors = (q, k, v, gk, gv, state, slots, cu_seqlens, out)
    if (sharding := on_shards("recurrent_gla_verify", _VERIFY_TENSORS, tensors)) is not None:
        options = {"scale": scale, "state_v_first": state_v_first}
        call = functools.partial(recurrent_gla_verify, **options)
        tokens = {"q": q, "k": k, "v": v, "gk": gk, "gv": gv}
        rows = {"slots": slots, "cu_seqlens": cu_seqlens}
        return sharding.step_on_shards("recurrent_gla_verify", call, tokens, state, rows, out)
    gk = without_last_of_one(gk, k)
    args = (q, k, v, gk, gv, state, slots, scale, state_v_first, cu_seqlens)
    return on_pool(_verify, _verify_in_onnx, *args, out=out)


def recurrent_gla_commit_(
    k: Tensor,
    v: Tensor,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    *,
    state: Tensor,
    accepted: Tensor,
    slots: Tensor | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    write_slots: Tensor | None = None,
) -> None:
    """Updates the rows' states by the accepted tokens of a draft, in place.

    The states have the same bits as after one `recurrent_gla_step_` of the first `accepted[b]`
    tokens. See `recurrent_gla_verify`.

    Args:
        k, v, gk, gv, state, slots, state_v_first, cu_seqlens: the arguments of
            `recurrent_gla_verify`, except that no slot may be given twice.
        accepted: number of accepted tokens of each row, `[B]` (`[N]` with cu_seqlens), int32 or
            int64, on k's device. A number below 0 counts as 0, which leaves the state unchanged; a
            number above the row's tokens counts as all of them.
        write_slots: as in `recurrent_gla_step_`; a row without accepted tokens copies its state.
            Default: slots.

    Raises the errors of `recurrent_gla_verify`.
    """
    tensors = (k, v, gk, gv, state, slots, accepted, cu_seqlens, write_slots)
    if (sharding := on_shards("recurrent_gla_commit_", _COMMIT_TENSORS, tensors)) is not None:
        call = functools.partial(recurrent_gla_commit_, state_v_first=state_v_first)
        tokens, rows = {"k": k, "v": v, "gk": gk, "gv": gv}, {"slots": slots, "accepted": accepted}
        rows |= {"cu_seqlens": cu_seqlens, "write_slots": write_slots}
        return sharding.step_on_shards("recurrent_gla_commit_", call, tokens, state, rows)
    gk = without_last_of_one(gk, k)
    args = (k, v, gk, gv, state, slots, accepted, state_v_first, cu_seqlens, write_slots)
    form_of(_commit, _commit_in_onnx)(*args)


def _state_layout(kwargs: dict[str, bool], state_v_first: bool) -> bool:
    """state_v_first given by its old name; every other keyword is an error."""
    unknown = sorted(kwargs.keys() - {"transpose_state_layout"})
    if unknown:
        raise TypeError(
            f"fused_recurrent_gla: expected no other keywords than its signature's, got {unknown}"
        )
    if state_v_first:
        raise ValueError(
            "fused_recurrent_gla: expected state_v_first or transpose_state_layout, its old name, "
            "got both"
        )
    at_once(warnings.warn)(
        "fused_recurrent_gla: transpose_state_layout is the old name of state_v_first",
        DeprecationWarning,
        stacklevel=3,
    )
    return kwargs["transpose_state_layout"]


def _plain(*args: Any) -> tuple[Tensor, Tensor]:
    *operands, output_final_state, reverse, state_v_first = args
    o, state = gla(*operands, reverse, state_v_first)
    return o, state if output_final_state else state.new_empty(0)


def _plain_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None,
    gv: Tensor | None,
    state: Tensor,
    slots: Tensor | None,
    scale: float | None,
    state_v_first: bool,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    own, there = state.to(torch.promote_types(q.dtype, torch.float32)), None
    if slots is not None:
        there = (slots >= 0) & (slots < state.shape[0])
        own = own.index_select(0, torch.where(there, slots, 0))
    o = gla(q, k, v, gk, gv, own, cu_seqlens, scale, False, state_v_first)[0]
    if there is None:
        return o
    if cu_seqlens is None:
        return torch.where(there[:, None, None, None], o, 0)
    tokens = torch.arange(q.shape[1], device=q.device, dtype=cu_seqlens.dtype)
    drafts = torch.searchsorted(cu_seqlens, tokens, right=True) - 1
    of_tokens = torch.cat([there, there.new_zeros(1)])[drafts]
    return torch.where(of_tokens[None, :, None, None], o, 0)


def _with_a_batch(*args: Any) -> Sequence[bool]:
    """For o and final_state."""
    return () if args[6] is not None else (True, args[8])


def _commit_flops(k: Any, v: Any, gk: Any, gv: Any, state: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * prod(k[:2]) * prod(state[1:])


_forward_flops = product(0, 2, times=2, dim=-1)
_INSTEAD = "gla_ext.fused_recurrent_gla"
_fwd = declare(
    "recurrent_gla_fwd",
    plain=_plain,
    flops=_forward_flops,
    vmap=as_one_batch(range(6), _with_a_batch),  # q, k, v, gates and initial_state
    instead=_INSTEAD,
)
declare(
    "recurrent_gla_bwd", flops=product(2, 4, times=5, dim=-1), vmap=slice_by_slice, instead=_INSTEAD
)
declare("recurrent_gla_step_", flops=_forward_flops, instead="gla_ext.recurrent_gla_step_")
_step = torch.ops.gla_ext.recurrent_gla_step_
_step_in_onnx = not_in_onnx(
    "recurrent_gla_step_", "fused_recurrent_gla, or a GLACache in place of a StaticGLACache"
)
declare(
    "recurrent_gla_verify",
    plain=_plain_verify,
    flops=_forward_flops,
    vmap=slice_by_slice,
    instead="gla_ext.recurrent_gla_verify",
)
_verify = torch.ops.gla_ext.recurrent_gla_verify
_verify_in_onnx = not_in_onnx("recurrent_gla_verify", "fused_recurrent_gla")
_commit = declare(
    "recurrent_gla_commit_", flops=_commit_flops, instead="gla_ext.recurrent_gla_commit_"
)
_commit_in_onnx = not_in_onnx(
    "recurrent_gla_commit_", "fused_recurrent_gla, which returns the state"
)
recurrent_gla_low_rank_step_ = declare("recurrent_gla_low_rank_step_")
