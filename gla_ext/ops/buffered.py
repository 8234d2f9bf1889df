"""The token step that keeps the newest tokens in buffers, as a Python function."""

import torch
from torch import Tensor

from gla_ext.ops._checks import check_plain_tensors, check_scale, without_last_of_one
from gla_ext.ops._door import form_of, not_in_onnx
from gla_ext.ops._flops import product
from gla_ext.ops._operator import declare

_NAME = "recurrent_gla_buffered_step_"
_TENSORS = "q k v gk state slots buffer_k buffer_v buffer_g count"
declare(_NAME, flops=product(0, 2, dim=-1))
_step = torch.ops.gla_ext.recurrent_gla_buffered_step_
_in_onnx = not_in_onnx(_NAME, "fused_recurrent_gla, or a GLACache in place of a StaticGLACache")


def recurrent_gla_buffered_step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None = None,
    *,
    state: Tensor,
    buffer_k: Tensor,
    buffer_v: Tensor,
    buffer_g: Tensor,
    count: Tensor,
    slots: Tensor | None = None,
    scale: float | None = None,
    state_v_first: bool = False,
) -> Tensor:
    """`recurrent_gla_step_` that writes a state only once in several tokens.

    Each slot has a state and a buffer of at most L newest tokens, which the state does not hold
    yet. If n = `count[slot]` tokens are in it, a step of T tokens reads the state, and

        1. if n + T > L, folds these n tokens into the state, rounds and writes it, and goes on with
           n = 0;
        2. writes the new k, v and gk to places n, .., n + T - 1 of the buffer;
        3. returns the o that `recurrent_gla_step_` would return, up to rounding in fp32.

    So most steps read a state and write a token, half the bytes of `recurrent_gla_step_`, and a
    state in 16 bits is rounded once for several tokens: with a buffer of 16, every 16th step writes
    it. All tokens of a call may be drafts: the caller then counts only the accepted ones,
    `(0 if n + T > L else n) + accepted`, and later tokens overwrite the others. count is read,
    never written, so that all layers share one. To fold the tokens that are left, call

        recurrent_gla_commit_(buffer_k, buffer_v, buffer_g, state=state, accepted=count)

    and set count to 0. There is no gradient. Works in CUDA graphs.

    Args:
        q, k, v, gk, state, slots, scale, state_v_first: as in `recurrent_gla_step_`, with 1 to L
            tokens. Without gk nothing decays.
        buffer_k, buffer_v: the buffers of all slots, `[P, L, HK, K]` and `[P, L, HK, V]`, in the
            dtype of k and v. Their last two dimensions are contiguous; P and L may have any stride
            with which no two tokens overlap. On CUDA, L is at most 16, and K above 512 needs 140
            KiB of shared memory a block, which GPUs of 8.6, 8.9 and 12.0 do not have.
        buffer_g: the same for gates of every channel, `[P, L, HK, K]`, in gk's dtype; without gk,
            in any that gk may have, and zeros are written.
        count: for each slot, the accepted tokens in its buffer, `[P]`, int32 or int64, on q's
            device. A number below 0 counts as 0, one above L as L.

    Returns:
        o, `[B, T, H, V]` in v's dtype; zeros for rows without a slot, for which nothing changes.

    Raises the errors of `recurrent_gla_step_`. Also raises ValueError for T of 0 or above L, and
    NotImplementedError for every DTensor.

    Example:
        >>> pool, count = torch.zeros(8, 2, 16, 32), torch.zeros(8, dtype=torch.int32)
        >>> buffers = {f"buffer_{x}": torch.zeros(8, 16, 2, d) for x, d in zip("kvg", (16, 32, 16))}
        >>> slots = torch.tensor([5, 2])
        >>> for _ in range(40):
        ...     q, k, v = (torch.randn(2, 1, 2, d) for d in (16, 16, 32))
        ...     options = {"state": pool, "slots": slots, "count": count, **buffers}
        ...     o = gla_ext.recurrent_gla_buffered_step_(q, k, v, **options)
        ...     count[slots] = count[slots] % 16 + 1
    """
    check_scale(_NAME, scale)
    pools = (state, slots, buffer_k, buffer_v, buffer_g, count)
    check_plain_tensors(_NAME, _TENSORS, q, k, v, gk, *pools)
    gk = without_last_of_one(gk, k)
    return form_of(_step, _in_onnx)(q, k, v, gk, *pools, scale, state_v_first)
