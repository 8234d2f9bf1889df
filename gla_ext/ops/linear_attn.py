"""Linear attention without decay (Katharopoulos et al., arXiv 2006.16236), normalised or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gla_ext.ops._checks import check_scale, check_tensors
from gla_ext.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla

State = Tensor | tuple[Tensor, Tensor]
_EPSILON = 1e-10  # added to the sum of the scores, as FLA does
_CUDA_WIDTH = 8  # columns of ones: a width that the fast kernels accept


def chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: State | None = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, State | None]:
    r"""Linear attention in the chunkwise form: `chunk_simple_gla` without decay.

    Computes `o_t = scale * S_t^T q_t` with `S_t = S_{t-1} + k_t v_t^T`. If `normalize`, o_t is
    divided by the sum of the scores, `scale * z_t . q_t + 1e-10` with `z_t = z_{t-1} + k_t`. A
    second, narrow call with values of ones computes that sum, so that it is as exact as the first
    call and has a state as well.

    Args:
        q, k, v, scale, output_final_state, cu_seqlens: as in `chunk_simple_gla`.
        initial_state: `[N, H, K, V]`, as in `chunk_simple_gla`. If `normalize`, it may also be a
            pair of that and z, `[N, 1, H, K]` of any floating dtype. Default: zero.
        normalize: whether to divide by the sum of the scores. Default: True.

    Returns:
        o, `[B, T, H, V]` in v's dtype, and the final state or None. The state is `[N, H, K, V]`; if
        `normalize`, a pair of it and z, `[N, 1, H, K]`. Both are float32 (float64 with float64 q).

    Raises the errors of `chunk_simple_gla`.
    """
    options = {"scale": scale, "output_final_state": output_final_state, "cu_seqlens": cu_seqlens}
    args = (q, k, v, initial_state, normalize, options)
    return _attend("chunk_linear_attn", chunk_simple_gla, *args)


fused_chunk_linear_attn = chunk_linear_attn


def fused_recurrent_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: State | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    normalize: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, State | None]:
    """`chunk_linear_attn` token by token.

    Args:
        q, k, v, scale, initial_state, output_final_state, cu_seqlens: as in `chunk_linear_attn`.
        reverse: process the tokens from last to first. Default: False.
        normalize: as in `chunk_linear_attn`. Default: False.

    Results and errors are those of `chunk_linear_attn`.
    """
    options = {"scale": scale, "output_final_state": output_final_state, "cu_seqlens": cu_seqlens}
    args = (q, k, v, initial_state, normalize, options | {"reverse": reverse})
    return _attend("fused_recurrent_linear_attn", fused_recurrent_simple_gla, *args)


def _attend(
    op: str,
    operator: Callable[..., tuple[Tensor, Tensor | None]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: State | None,
    normalize: bool,
    options: dict[str, Any],
) -> tuple[Tensor, State | None]:
    check_scale(op, options["scale"])
    state, z = _states(op, initial_state, normalize)
    check_tensors(op, "q k v initial_state z", q, k, v, state, z)
    o, state = operator(q, k, v, initial_state=state, **options)
    if not normalize:
        return o, state
    wide = torch.promote_types(q.dtype, torch.float32)
    width = _CUDA_WIDTH if q.is_cuda else 1
    if z is not None:
        z = _as_state(op, z, q, wide).expand(-1, -1, -1, width).contiguous()
    ones = v.new_ones(*v.shape[:3], width)
    sums, z = operator(q, k, ones, initial_state=z, **options)
    o = (o.to(wide) / (sums[..., :1].to(wide) + _EPSILON)).to(v.dtype)
    return o, (state, z[..., 0].unsqueeze(1)) if options["output_final_state"] else None


def _states(
    op: str, initial_state: State | None, normalize: bool
) -> tuple[Tensor | None, Tensor | None]:
    if not isinstance(initial_state, tuple):
        return initial_state, None
    if not normalize or len(initial_state) != 2:
        raise ValueError(
            f"{op}: expected initial_state to be a tensor, or with normalize=True a pair of "
            f"tensors, got a tuple of {len(initial_state)} with normalize={normalize}"
        )
    return initial_state


def _as_state(op: str, z: Tensor, q: Tensor, wide: torch.dtype) -> Tensor:
    """z `[N, 1, H, K]` in the shape of a state with one value channel, `[N, H, K, 1]`."""
    H, K = q.shape[2:]
    if z.ndim != 4 or z.shape[1:] != (1, H, K):
        raise ValueError(
            f"{op}: expected z of initial_state to have shape [N, 1, H, K] = [N, 1, {H}, {K}], got "
            f"{list(z.shape)}"
        )
    return z.to(wide).squeeze(1).unsqueeze(-1)
