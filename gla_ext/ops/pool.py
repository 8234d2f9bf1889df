"""`chunk_gla_`: the chunkwise form for prompts whose states are in a server's pool, in place."""

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
    """Processes the tokens of prompts and updates the sequences' states in a pool, in place.

    This is `chunk_gla` for N sequences whose states are in a pool: sequence n starts from
    `state[slots[n]]` and stores its new state there. On CUDA the kernels read and write the rows
    directly; states are not gathered, cleared or scattered by other kernels. There is no gradient.
    Works in CUDA graphs and under `torch.compile(fullgraph=True)`, which does not copy the pool.

    A packed call may mix prompts with sequences of one token, as in decoding. On CUDA the
    recurrence processes these, in about the time of reading and writing their states, and with the
    same bits as `recurrent_gla_step_` whatever else is in the call. Under `batch_invariant()` they
    are processed in chunks, as in `chunk_gla`. A sequence cut at multiples of 64 tokens then gets
    the same bits as in one piece; cut elsewhere, it differs by rounding.

    Args:
        q, k, v, g, scale, gv: as in `chunk_gla`.
        state: the pool, `[P, H, K, V]`, or `[P, H, V, K]` if `state_v_first`, as in
            `recurrent_gla_step_`.
        slots, write_slots: for each sequence, the row of the pool with its initial state and the
            row for its new state, `[N]`, as in `recurrent_gla_step_`. N is B, or `len(cu_seqlens) -
            1`. Default: slots needs P = N, and sequence n has slot n; write_slots are slots.
        has_initial_state: bool `[N]`, on q's device. A sequence with False starts from zero,
            whatever its row holds. Default: all start from their rows.
        cu_seqlens: offsets of packed sequences, as in `chunk_gla`. On CUDA they are not read on the
            host: wrong offsets leave o, and the rows and checkpoints of the call's sequences,
            undefined, and nothing else.
        state_v_first: layout of the pool and the checkpoints. Default: False.
        checkpoint_every: store the state after every `checkpoint_every` tokens of a sequence in
            this call; a multiple of 64. Under `batch_invariant()` such a state has the same bits as
            that of a sequence that ends there. Default: 0 (none).
        checkpoints: tensor that stores these states, `[Q, H, K, V]`, in the pool's layout and any
            of its dtypes. Default: the pool.
        checkpoint_slots: row of `checkpoints` for each checkpoint, `[total]`, int32 or int64, on
            q's device. All rows must differ from each other and from the rows that sequences read
            or write. A checkpoint with a row outside of `checkpoints` is not stored.
            Default: checkpoint i has row i.
        checkpoint_cu_starts: `[N + 1]`, int32 or int64, on q's device. Sequence n has the
            checkpoints from `checkpoint_cu_starts[n]` up to but excluding `checkpoint_cu_starts[n +
            1]`; later ones of the sequence are not stored. Default: `T // checkpoint_every` for
            each sequence; packed sequences have no default.
        out: tensor for o, as in `recurrent_gla_step_`. On CUDA the kernels write to it directly if
            it is contiguous and starts at a multiple of 16 bytes; otherwise o is copied to it.
            Default: a new tensor.

    Returns:
        o, `[B, T, H, V]` in v's dtype, or out.

    Raises the errors of `recurrent_gla_step_`. Also raises ValueError for invalid offsets, for a
    checkpoint_every that is not a multiple of 64 or lacks the arguments that it needs, and
    NotImplementedError for every DTensor.

    Example:
        >>> pool = torch.zeros(8, 2, 16, 32)
        >>> q, k, g = torch.randn(1, 100, 2, 16), torch.randn(1, 100, 2, 16), None
        >>> v = torch.randn(1, 100, 2, 32)
        >>> cu_seqlens = torch.tensor([0, 99, 100])  # a prompt, and one token of another sequence
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
