"""Checks of the values of an operator's inputs."""

from __future__ import annotations

import itertools
import math
import os

import torch
from torch import Tensor

from gla_ext import _C  # noqa: F401  loading it registers torch.ops.gla_ext
from gla_ext.ops._checks import (
    OFF,
    check_device,
    check_plain_tensors,
    check_scale,
    wide_state,
    without_last_of_one,
)

CHECKS_INPUTS = os.environ.get("GLA_EXT_CHECK_INPUTS", "").lower() not in ("", *OFF)

# More heads than models have. With fewer tokens than heads, the caller mostly put heads first.
_MANY_HEADS, _MORE_THAN_MOST = 64, 128


@torch.no_grad()
def check_inputs(
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
) -> None:
    """Checks for values that give NaN or wrong results in a call of `chunk_gla` with these
    arguments.

    The operators do not check values, which on CUDA would wait for the device. This function does,
    in eager mode. With `GLA_EXT_CHECK_INPUTS=1` in the environment, read at import, `chunk_gla`,
    `fused_recurrent_gla` and so the layers make the same checks after every call, except in graphs,
    transforms of torch.func and captures.

    Args:
        q, k, v, g, scale, initial_state, state_v_first, cu_seqlens, gv: as in `chunk_gla`.
        output_final_state, cu_seqlens_cpu: ignored; accepted so that a call need not be changed.

    Raises:
        ValueError: for whatever `chunk_gla` rejects; NaN or inf; gates above 0, which cannot be
            logarithms of decays (-inf can); a scale that is not finite; offsets that do not start
            with 0, that decrease or end beyond T. Also for tensors that look head-first, `[B, H, T,
            K]`: without states and offsets, more heads than tokens and at least 64 heads (with one
            token: more than 128). The message gives the number of bad values and the place of the
            worst or of one.
        TypeError: for whatever `chunk_gla` rejects.
    """
    names = "q k v g gv initial_state cu_seqlens"
    g = without_last_of_one(g, k) if isinstance(g, Tensor) and isinstance(k, Tensor) else g
    tensors = (q, k, v, g, gv, initial_state, cu_seqlens)
    check_plain_tensors("check_inputs", names, *tensors)
    check_scale("check_inputs", scale)
    for name, t in zip(names.split(), tensors, strict=True):
        if t is not None and q is not None:
            check_device("check_inputs", name, t, "q", q)
    initial_state = wide_state(initial_state, q)
    tensors = (q, k, v, g, gv, initial_state, cu_seqlens)
    shapes = (None if t is None else t.to("meta") for t in tensors)
    torch.ops.gla_ext.chunk_gla_fwd(*shapes, scale, False, state_v_first, False, 0)
    check_values("check_inputs", "g", q, k, v, g, gv, scale, initial_state, cu_seqlens)


@torch.no_grad()
def check_values(
    op: str,
    gate: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    gv: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    """The checks of `check_inputs` for tensors whose shapes the operator has accepted.

    Args:
        op: the function that was called.
        gate: the name of g in that function.
    """
    T, H = q.shape[1:3]
    alone = initial_state is None and cu_seqlens is None
    if alone and T < H and (H >= _MANY_HEADS if T > 1 else H > _MORE_THAN_MOST):
        raise ValueError(
            f"{op}: expected q, k, v and gates to be [B, T, H, D], got T = {T} tokens of H = {H} "
            "heads, which looks like [B, H, T, D]: call transpose(1, 2) on each"
        )
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"{op}: expected scale to be finite, got {scale}")
    if cu_seqlens is not None:
        check_offsets(op, cu_seqlens.tolist(), T)
    for name, t in (("q", q), ("k", k), ("v", v), ("initial_state", initial_state)):
        if t is not None:
            _check_finite(op, name, t, ~t.isfinite(), "finite numbers")
    for name, t in ((gate, g), ("gv", gv)):
        if t is not None:
            odd = t.isnan() | (t == torch.inf)
            _check_finite(op, name, t, odd, "finite numbers or -inf")
            _check_gate(op, name, t)


def check_offsets(op: str, offsets: list[int], T: int) -> None:
    """Raises ValueError for offsets that are not valid for packed sequences in T tokens."""
    if offsets[0] != 0:
        raise ValueError(f"{op}: expected cu_seqlens to start with 0, got {offsets[0]}")
    for n, (start, end) in enumerate(itertools.pairwise(offsets)):
        if start > end:
            raise ValueError(
                f"{op}: expected cu_seqlens to be non-decreasing, got {start} before {end} at "
                f"position {n}"
            )
    if offsets[-1] > T:
        raise ValueError(
            f"{op}: expected cu_seqlens to end at or before T = {T}, got {offsets[-1]}"
        )


def _check_finite(op: str, name: str, t: Tensor, odd: Tensor, expected: str) -> None:
    if odd.any():
        index = _index(odd.flatten().byte().argmax(), t)
        raise ValueError(
            f"{op}: expected {name} to hold {expected}, got {int(odd.sum())} of {t.numel()} that "
            f"are not, among them {t[index].item()} at {list(index)}"
        )


def _check_gate(op: str, name: str, t: Tensor) -> None:
    if t.numel() and (t > 0).any():
        index = _index(t.flatten().argmax(), t)
        raise ValueError(
            f"{op}: expected {name} to be natural logarithms of decays, at most 0, got "
            f"{int((t > 0).sum())} of {t.numel()} above 0, the largest {t[index].item():.6g} at "
            f"{list(index)}; of decays pass .log(), of logits F.logsigmoid"
        )


def _index(position: Tensor, t: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(position, t.shape))
