"""Prompts on a server's pool of states: the chunkwise form, in place."""

import torch
from torch import Tensor

from gla_ext.ops._checks import check_plain_tensors, check_scale, without_last_of_one
from gla_ext.ops._door import not_in_onnx, on_pool
from gla_ext.ops._operator import declare
from gla_ext.ops.chunk import forward_flops, is_batch_invariant

declare("chunk_gla_", flops=forward_flops)
_run = torch.ops.gla_ext.chunk_gla_
_in_onnx = not_in_onnx("chunk_gla_", "chunk_gla, which returns the state")
_TENSORS = (
    "q k v g gv state slots write_slots has_initial_state cu_seqlens checkpoints checkpoint_slots "
    "checkpoint_cu_starts out"
)


def chunk_gla_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float | None = None,
    *,
    state: Tensor,
    slots: Tensor | None = None,
    write_slots: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    gv: Tensor | None = None,
    checkpoint_every: int = 0,
    checkpoints: Tensor | None = None,
    checkpoint_slots: Tensor | None = None,
    checkpoint_cu_starts: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Passes the tokens of prompts, and moves the sequences' states on in a pool, in place.

    `chunk_gla` for N sequences whose states lie in a pool: sequence n goes on from
    `state[slots[n]]` and leaves its state there. On CUDA the kernels read and write the rows
    themselves; no state is gathered, cleared or scattered around them. There is no gradient. Works
    in CUDA graphs and under `torch.compile(fullgraph=True)`, which copies no pool.

    A packed call may mix prompts with sequences of one token, which decode. On CUDA the recurrence
    takes these, with the bits of `recurrent_gla_step_` whatever else is in the call, in about the
    time in which their states are read and written. Under `batch_invariant()` they are chunks, as
    in `chunk_gla`. A sequence cut at multiples of 64 tokens then has the bits of one piece; cut
    elsewhere, it differs by rounding.

    Args:
        q, k, v, g, scale, gv: as in `chunk_gla`.
        state: the pool, `[P, H, K, V]`, or `[P, H, V, K]` if `state_v_first`, as in
            `recurrent_gla_step_`.
        slots, write_slots: the rows of the pool where each sequence starts and where it leaves its
            state, `[N]`, as in `recurrent_gla_step_`. N is B, or `len(cu_seqlens) - 1`. Default: P
            is N, and sequence n has slot n; and write_slots are slots.
        has_initial_state: bool `[N]`, on q's device: False starts from zero, whatever the row
            holds. Default: all go on.
        cu_seqlens: offsets of packed sequences, as in `chunk_gla`. On CUDA nobody reads them on the
            host: wrong ones leave o, and the rows and checkpoints of the call's sequences,
            undefined, and nothing else.
        state_v_first: layout of the pool and the checkpoints. Default: False.
        checkpoint_every: keeps the state after each so many of a sequence's tokens in this call, a
            multiple of 64. Under `batch_invariant()` it has the bits of the state of a sequence
            that ends there. Default: 0 (none).
        checkpoints: where they are kept, `[Q, H, K, V]`, of the pool's layout and any of its
            dtypes. Default: the pool.
        checkpoint_slots: the row of each checkpoint, `[total]`, int32 or int64, on q's device,
            another for each and none that a sequence reads or writes; outside of what keeps them:
            not kept. Default: checkpoint i has row i of checkpoints.
        checkpoint_cu_starts: `[N + 1]`, int32 or int64, on q's device: sequence n's are the
            checkpoints from `checkpoint_cu_starts[n]` to, excluded, `checkpoint_cu_starts[n + 1]`;
            those beyond are not kept. Default: `T // checkpoint_every` for each; of packed
            sequences there is no default.
        out: where o goes, as in `recurrent_gla_step_`. On CUDA the kernels write into one that is
            contiguous and starts at a multiple of 16 bytes; another gets a copy. Default: a new
            tensor.

    Returns:
        o, `[B, T, H, V]` in v's dtype, or out.

    What is raised is as in `recurrent_gla_step_`, and ValueError for offsets that do not fit, for a
    checkpoint_every that is no multiple of 64 or without what goes with it; NotImplementedError for
    every DTensor.

    Example:
        >>> pool = torch.zeros(8, 2, 16, 32)
        >>> q, k, g = torch.randn(1, 100, 2, 16), torch.randn(1, 100, 2, 16), None
        >>> v = torch.randn(1, 100, 2, 32)
        >>> cu_seqlens = torch.tensor([0, 99, 100])  # a prompt, and a token of another
        >>> new = torch.tensor([False, True])
        >>> o = gla_ext.chunk_gla_(q, k, v, g, state=pool, slots=torch.tensor([5, 2]),
        ...                        has_initial_state=new, cu_seqlens=cu_seqlens)
    """
    check_scale("chunk_gla_", scale)
    rows = (state, slots, write_slots, has_initial_state, cu_seqlens)
    kept = (checkpoints, checkpoint_slots, checkpoint_cu_starts)
    check_plain_tensors("chunk_gla_", _TENSORS, q, k, v, g, gv, *rows, *kept, out)
    options = (scale, state_v_first, is_batch_invariant(), checkpoint_every)
    arguments = (q, k, v, without_last_of_one(g, k), gv, *rows, *options, *kept)
    return on_pool(_run, _in_onnx, *arguments, out=out)
