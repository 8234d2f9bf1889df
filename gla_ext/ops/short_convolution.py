"""The short convolution: for sequences, and for caches in a server's pool."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gla_ext.ops._checks import check_plain_tensors, check_tensors
from gla_ext.ops._door import form_of, not_in_onnx, on_pool
from gla_ext.ops._flops import product
from gla_ext.ops._operator import declare
from gla_ext.ops._sharding import SUM, Given, Rule, Shards
from gla_ext.ops._vmap import as_one_batch, slice_by_slice

_POOL_TENSORS = "x weight bias state slots write_slots has_initial_state cu_seqlens out"


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cache: Tensor | None,
    output_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """See `gla_ext.layers.ShortConvolution.forward`."""
    names = "x weight bias cache cu_seqlens"
    check_tensors("ShortConvolution", names, x, weight, bias, cache, cu_seqlens)
    if cache is not None:
        cache = cache.to(x.dtype)
    y, state = form_of(_fwd, _plain)(x, weight, bias, cache, cu_seqlens, output_state)
    return y, state if output_state else None


def short_convolution_(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    state: Tensor,
    slots: Tensor | None = None,
    write_slots: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Convolves the tokens of N sequences and updates their caches in a pool, in place.

    This is `gla_ext.layers.short_convolution.ShortConvolution` for sequences whose last inputs are
    in a pool, with the same slots as their states. There is no gradient. Works in CUDA graphs and
    under `torch.compile(fullgraph=True)`, which does not copy the pool. On CUDA, rows of up to 16
    tokens with widths W up to 4 need one launch; longer rows, larger widths and packed sequences
    need three.

    Args:
        x: `[B, T, D]`; bfloat16, float16, float32, or float64 (CPU).
        weight: `[D, 1, W]`, bfloat16, float16, float32, or float64 (CPU).
        bias: `[D]`. Default: none.
        state: the pool, `[P, D, W]`, x's dtype: the last W inputs of a sequence, filled with 0
            where there were fewer. Its last two dimensions are contiguous; P may have any stride
            with which no two rows overlap.
        slots, write_slots, has_initial_state, cu_seqlens, out: as in `chunk_gla_`, on x's device.

    Returns:
        y, `[B, T, D]` in x's dtype: `silu(bias + sum_s weight[:, 0, W - 1 - s] * x_{t-s})`, or out.

    Raises the errors of `chunk_gla_`.
    """
    tensors = (x, weight, bias, state, slots, write_slots, has_initial_state, cu_seqlens)
    check_plain_tensors("short_convolution_", _POOL_TENSORS, *tensors, out)
    return on_pool(_on_pool, _in_onnx, *tensors, out=out)


def _plain(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cache: Tensor | None,
    cu_seqlens: Tensor | None,
    output_state: bool,
) -> tuple[Tensor, Tensor]:
    wide, W = torch.promote_types(x.dtype, torch.float32), weight.shape[-1]
    if cu_seqlens is None:
        B, T, D = x.shape
        before = x.new_zeros(B, W, D) if cache is None else cache.transpose(-1, -2)
        tokens = torch.cat([before, x], 1)
        rows = [tokens[:, 1 + r : 1 + r + T] for r in range(W)]
        state = tokens[:, T:]
    else:
        rows, state = _packed_rows(x, cache, cu_seqlens.long(), W)
    y = sum(row.to(wide) * weight[:, 0, r].to(wide) for r, row in enumerate(rows))
    if bias is not None:
        y = y + bias.to(wide)
    y = F.silu(y).to(x.dtype)
    return y, state.transpose(-1, -2).contiguous() if output_state else x.new_empty(0)


def _packed_rows(
    x: Tensor, cache: Tensor | None, offsets: Tensor, W: int
) -> tuple[list[Tensor], Tensor]:
    """The inputs of each tap, W tensors `[1, T, D]`, and the last W inputs of each sequence."""
    T, N = x.shape[1], offsets.shape[0] - 1
    caches = None if cache is None else cache.transpose(-1, -2).flatten(0, 1)  # [N * W, D]

    def read(sequence: Tensor, place: Tensor) -> Tensor:
        token = (offsets[sequence] + place).clamp(min=0).clamp(max=T - 1)
        found = x[0].index_select(0, token)
        before = torch.zeros_like(found)
        if caches is not None:
            row = (sequence * W + W + place).clamp(min=0).clamp(max=N * W - 1)
            before = torch.where((sequence < N).unsqueeze(-1), caches.index_select(0, row), 0)
        return torch.where((place >= 0).unsqueeze(-1), found, before)

    t = torch.arange(T, device=x.device)
    sequence = (offsets[1:] <= t.unsqueeze(1)).sum(1)
    place = t - offsets[sequence]
    rows = [read(sequence, place - (W - 1 - r)).unsqueeze(0) for r in range(W)]
    each = torch.arange(N, device=x.device)
    lengths = offsets[1:] - offsets[:-1]
    return rows, torch.stack([read(each, lengths - W + w) for w in range(W)], 1)


def _with_a_batch(*args: Any) -> Sequence[bool]:
    """For y and state."""
    return () if args[4] is not None else (True, args[5])


_CHANNELS: Shards = {"x": 2, "y": 2, "dx": 2, "dy": 2, "weight": 0, "bias": 0, "cache": 1}
_CHANNELS |= {"dweight": 0, "dbias": 0, "dcache": 1, "state": 1, "dstate": 1}


def _batch_or_channels(batch: str, summed: str = "") -> Rule:
    """Rule for sharding by batch, if sequences are not packed, or by channels."""

    def rule(given: Given) -> Iterator[Shards]:
        if given["cu_seqlens"] is None:
            yield dict.fromkeys(batch.split(), 0) | dict.fromkeys(summed.split(), SUM)
        yield _CHANNELS

    return rule


_forward_flops = product(0, 1, dim=-1)
_fwd = declare(
    "short_convolution_fwd",
    plain=_plain,
    flops=_forward_flops,
    vmap=as_one_batch((0, 3), _with_a_batch),  # x and the cache
    shards=_batch_or_channels("x cache y state"),
)
declare(
    "short_convolution_bwd",
    # The gradients of input and weight; the sums before SiLU are also computed again.
    flops=product(2, 3, times=3, dim=-1),
    vmap=slice_by_slice,
    shards=_batch_or_channels("dy dstate x cache dx dcache", "dweight dbias"),
)
declare("short_convolution_", flops=_forward_flops)
_on_pool = torch.ops.gla_ext.short_convolution_
_in_onnx = not_in_onnx("short_convolution_", "a ShortConvolution", of="caches")
