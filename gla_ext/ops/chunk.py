"""The chunkwise form, and the batch-invariant mode."""

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gla_ext._chunks import CHUNK
from gla_ext.ops._checks import OFF, check_scale, check_tensors, wide_state, without_last_of_one
from gla_ext.ops._context import context_of
from gla_ext.ops._door import at_once, form_of, on_shards, when_read
from gla_ext.ops._flops import chunks
from gla_ext.ops._operator import declare
from gla_ext.ops._plain import gla
from gla_ext.ops._vmap import as_one_batch, slice_by_slice
from gla_ext.ops.inputs import CHECKS_INPUTS, check_offsets, check_values

_TENSORS = "q k v g gv initial_state cu_seqlens cu_seqlens_cpu"

# The operator's for_backward_bytes: -1 keeps as much for backward as the plan decides, 0 nothing.
_for_backward_bytes = 0 if os.environ.get("GLA_EXT_KEEP_OPERANDS", "").lower() in OFF else -1


class _Mode(threading.local):
    """The default of the operators' batch_invariant argument, for each thread."""

    def __init__(self) -> None:
        value = os.environ.get("GLA_EXT_BATCH_INVARIANT", "").lower()
        self.batch_invariant = value not in ("", *OFF)


_mode = _Mode()


@contextlib.contextmanager
def batch_invariant(enabled: bool = True) -> Iterator[None]:
    """While active, a sequence gets the same bits alone, in a batch, or packed with others.

    The outputs of `chunk_gla` and `chunk_gla_` then depend on earlier tokens alone, bit for bit:
    see `gla_ext.ops.chunk_gla_step`.

    The plan of such a call depends only on K, V and the dtypes. Backward uses the mode of its
    forward, and so does the recomputation of the language models' activation checkpointing. If you
    pass a function to `torch.utils.checkpoint` yourself, it is run again in the mode of the thread
    that runs backward, which on CUDA is a thread of autograd: enter the mode inside the function.
    `GLA_EXT_BATCH_INVARIANT=1` in the environment sets the default of every thread.

    Args:
        enabled: False turns the mode off while active. Default: True.
    """
    before = _mode.batch_invariant
    _mode.batch_invariant = enabled
    try:
        yield
    finally:
        _mode.batch_invariant = before


def is_batch_invariant() -> bool:
    """Whether calls of this thread are batch-invariant."""
    return _mode.batch_invariant


def keeps_for_backward() -> bool:
    """Whether forward keeps the results for backward that the plan chooses
    (GLA_EXT_KEEP_OPERANDS).
    """
    return _for_backward_bytes != 0


def in_mode_of_now(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wraps a function to run in the current batch-invariant mode, in any thread and at any
    time.
    """
    enabled = is_batch_invariant()

    def run(*args: Any, **kwargs: Any) -> Tensor:
        with batch_invariant(enabled):
            return function(*args, **kwargs)

    # In a graph the mode is a constant, also in recomputation.
    return form_of(run, function, compiled=function)


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    gv: Tensor | None = None,
    cp_context: Any = None,
) -> tuple[Tensor, Tensor | None]:
    r"""Gated linear attention in the chunkwise form (Yang et al., arXiv 2312.06635, section 4).

    Computes, for every sequence and head,

        S_t = diag(exp(g_t)) S_{t-1} diag(exp(gv_t)) + k_t v_t^T,    o_t = scale * S_t^T q_t

    in chunks of 64 tokens. Differentiable in q, k, v, g, gv and initial_state. Tokens come before
    heads: `[B, H, T, K]`, the layout of attention, would be read as H tokens of T heads.

    Args:
        q: queries, `[B, T, H, K]`; bfloat16, float16, float32, or float64 (CPU).
        k: keys, `[B, T, HK, K]`, dtype of q. HK is H or a divisor: head h of q reads head `h // (H
            // HK)` of k, v, g and gv in place. Backward computes their gradients for every head of
            q, and sums them.
        v: values, `[B, T, HK, V]`, dtype of q.
        g: natural logarithm of the decay of each key channel, `[B, T, HK, K]`, at most 0; -inf
            resets the state. Its values are not checked: above 0, as of decays instead of
            logarithms, states grow until results are inf or NaN; see `gla_ext.check_inputs`.
            bfloat16, float16 or float32, whatever the dtype of q, but float64 with float64 q. One
            decay for all channels of a head is `[B, T, HK]` or `[B, T, HK, 1]`; you need not expand
            it. None: no decay.
        scale: factor of the scores, a number. Default: `K ** -0.5`.
        initial_state: `[N, H, K, V]`, or `[N, H, V, K]` if `state_v_first`; float32, bfloat16 or
            float16 (float64 with float64 q). N is the number of sequences: B, or
            `len(cu_seqlens) - 1`. Default: zero.
        output_final_state: whether to return the state after the last token. Default: False.
        state_v_first: use the layout `[N, H, V, K]` for both states. Default: False.
        cu_seqlens: offsets of packed sequences, `[N + 1]`, int32 or int64, on q's device, with
            B = 1: first 0, non-decreasing, last at most T. Tokens after the last offset give zeros.
            On CUDA the offsets are not read on the host: with wrong ones the results are undefined,
            but no other memory is written. Default: None.
        cu_seqlens_cpu: the same offsets on the CPU; their contents are checked, in eager mode.
            Default: None.
        gv: natural logarithm of the decay of each value channel (the paper's beta), like g, `[B, T,
            HK, V]`. Default: no decay.
        cp_context: the result of `gla_ext.distributed.build_cp_context` if these are one rank's
            tokens of a longer sequence; FLA's own object is accepted too. States then have a row
            for each sequence with a token on this rank (`context.cut(T, device).sequences`). The
            initial state is read on the rank where a sequence begins; the final state is returned
            where it ends. Default: None.

    Returns:
        o, `[B, T, H, V]` in v's dtype, and the final state in the layout of initial_state, float32
        (float64 with float64 q), or None.

    Raises:
        ValueError: shapes, devices or offsets that do not agree.
        TypeError: dtypes that do not agree; a scale that is a tensor.
        NotImplementedError: a device or layout without kernels; forward-mode AD; torch.func
            transforms except vmap; DTensors sharded by dimensions other than batch, heads and, with
            a cp_context, tokens.
    """
    check_scale("chunk_gla", scale)
    tensors = (q, k, v, g, gv, initial_state, cu_seqlens, cu_seqlens_cpu)
    if (sharding := on_shards("chunk_gla", _TENSORS, tensors)) is not None:
        options = {"scale": scale, "output_final_state": output_final_state}
        options |= {"state_v_first": state_v_first, "cp_context": cp_context}
        call = functools.partial(chunk_gla, **options)
        tokens = {"q": q, "k": k, "v": v, "g": g, "gv": gv}
        args = ("chunk_gla", call, tokens, initial_state, cu_seqlens, cp_context)
        return sharding.attend_on_shards(*args)
    g = without_last_of_one(g, k)
    initial_state = wide_state(initial_state, q)
    if cp_context is not None:
        if g is not None and g.ndim == 3:  # one gate per head
            g = g.unsqueeze(-1).expand(k.shape)
        args = (q, k, v, g, gv, initial_state, cu_seqlens, scale, output_final_state, state_v_first)
        modes = (_mode.batch_invariant, _for_backward_bytes)
        return context_of(cp_context).chunk_gla(*args, *modes)
    o, final_state, *_ = form_of(_fwd, _plain)(
        q, k, v, g, gv, initial_state, cu_seqlens, scale, output_final_state, state_v_first,
        _mode.batch_invariant, _for_backward_bytes,
    )  # fmt: skip
    if CHECKS_INPUTS:
        args = ("chunk_gla", "g", q, k, v, g, gv, scale, initial_state, cu_seqlens)
        when_read(q, check_values, *args)
    if cu_seqlens_cpu is not None:
        at_once(_check_offsets)(cu_seqlens_cpu, cu_seqlens, q.shape[1])
    return o, final_state if output_final_state else None


fused_chunk_gla = chunk_gla


def chunk_gla_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float | None = None,
    boundary_state: Tensor | None = None,
    state_v_first: bool = False,
    *,
    gv: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Decodes with the bits of one `chunk_gla` call over the whole sequence in `batch_invariant()`.

    It keeps the state after the last multiple of 64 tokens, and k, v and the gates of the tokens
    since then, and computes them as a chunk again, with equal bits: see
    [Numerics](../numerics.md#a-tokens-past). So a token costs up to a chunk of 64, not one update
    of the state.

    Args:
        q: of the newest tokens, `[B, M, H, K]`.
        k, v, g, gv: of all N tokens since the last multiple of 64 tokens, as in `chunk_gla`. M and
            N are 1 to 64, and M is at most N.
        boundary_state: the state after that multiple of 64 tokens, as initial_state in `chunk_gla`;
            float32 (float64 with float64 q) for equal bits. Default: zero.
        scale, state_v_first: as in `chunk_gla`.

    Returns:
        o of the newest tokens, `[B, M, H, V]`, and the boundary_state of the next call: with N of
        64 a new one, after which the next call starts without these tokens.

    Raises the errors of `chunk_gla`. Also raises ValueError for other M and N.

    Example:
        >>> q, k, g, v = (torch.randn(1, 100, 2, d) for d in (16, 16, 16, 32))
        >>> g, state, first = -g.abs(), None, 0
        >>> for t in range(100):
        ...     since = [x[:, first : t + 1] for x in (k, v, g)]
        ...     o, state = gla_ext.ops.chunk_gla_step(
        ...         q[:, t : t + 1], *since, boundary_state=state)
        ...     first = (t + 1) // 64 * 64
    """
    check_tensors("chunk_gla_step", "q k", q, k)
    if q is None or k is None or not q.ndim == k.ndim == 4:
        got = [None if t is None else list(t.shape) for t in (q, k)]
        raise ValueError(
            "chunk_gla_step: expected q [B, M, H, K] and k [B, N, HK, K] to be tensors of 4 "
            f"dimensions, got {got[0]} and {got[1]}"
        )
    newest, tokens = q.shape[1], k.shape[1]
    if not 1 <= newest <= tokens <= CHUNK:
        raise ValueError(
            f"chunk_gla_step: expected q of 1 or more of the tokens of k, and k of at most {CHUNK} "
            f"tokens, got {newest} and {tokens}"
        )
    ends = tokens == CHUNK
    q = torch.nn.functional.pad(q, (0, 0, 0, 0, tokens - newest, 0))
    with batch_invariant():
        o, state = chunk_gla(q, k, v, g, scale, boundary_state, ends, state_v_first, gv=gv)
    return o[:, tokens - newest :], state if ends else boundary_state


def _check_offsets(cu_seqlens_cpu: Tensor, cu_seqlens: Tensor | None, T: int) -> None:
    """Checks the values of cu_seqlens_cpu; the operator has already checked cu_seqlens itself."""
    if cu_seqlens is None:
        raise ValueError("chunk_gla: expected cu_seqlens beside cu_seqlens_cpu, got None")
    if cu_seqlens_cpu.device.type != "cpu":
        raise ValueError(f"chunk_gla: expected cu_seqlens_cpu on cpu, got {cu_seqlens_cpu.device}")
    if cu_seqlens_cpu.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            "chunk_gla: expected cu_seqlens_cpu to be torch.int32 or torch.int64, got "
            f"{cu_seqlens_cpu.dtype}"
        )
    if cu_seqlens_cpu.shape != cu_seqlens.shape:
        raise ValueError(
            f"chunk_gla: expected cu_seqlens_cpu to have the shape of cu_seqlens, "
            f"{list(cu_seqlens.shape)}, got {list(cu_seqlens_cpu.shape)}"
        )
    check_offsets("chunk_gla", cu_seqlens_cpu.tolist(), T)


def _plain(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    *operands, output_final_state, state_v_first, _ = args[:11]
    for_backward_bytes = args[11] if len(args) > 11 else -1
    if for_backward_bytes > 0:
        raise NotImplementedError(
            "chunk_gla: expected a graph of inference to decompose, got one that keeps "
            f"{for_backward_bytes} bytes for backward; export in eval mode, under torch.no_grad()"
        )
    o, state = gla(*operands, False, state_v_first)
    kept = torch.empty(0, dtype=torch.uint8, device=o.device)
    return o, state if output_final_state else state.new_empty(0), kept


def _with_a_batch(*args: Any) -> Sequence[bool]:
    """For o, final_state and the bytes kept for backward, which are empty unless requested."""
    cu_seqlens, output_final_state = args[6], args[8]
    if cu_seqlens is not None or any(for_backward_bytes > 0 for for_backward_bytes in args[11:]):
        return ()
    return True, output_final_state, False


forward_flops = chunks(0, 2, keys=1, values=1, states=2)
_backward_flops = chunks(2, 4, keys=3, values=2, states=5)
_fwd = declare(
    "chunk_gla_fwd",
    plain=_plain,
    flops=forward_flops,
    vmap=as_one_batch(range(6), _with_a_batch),  # q, k, v, gates and initial_state
    instead="gla_ext.chunk_gla",
)
declare("chunk_gla_bwd", flops=_backward_flops, vmap=slice_by_slice, instead="gla_ext.chunk_gla")
declare("chunk_gla_across_ranks", instead="gla_ext.chunk_gla with a cp_context")
declare("chunk_gla_summary", flops=chunks(0, 2, states=1))
declare("chunk_gla_summary_bwd", flops=chunks(2, 4, states=1))
declare("chunk_gla_apply", flops=forward_flops)
declare("chunk_gla_apply_bwd", flops=_backward_flops)
