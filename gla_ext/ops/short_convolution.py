"""The short convolution on a server's pool of caches."""

import torch
from torch import Tensor

from gla_ext import _C  # noqa: F401  loading it registers torch.ops.gla_ext
from gla_ext.ops._checks import check_plain_tensors
from gla_ext.ops._tracing import refuse_pool_in_onnx

__all__ = ["short_convolution_"]

_convolve = torch.ops.gla_ext.short_convolution_.default
_convolve_out = torch.ops.gla_ext.short_convolution_.out
_NAMES = "x weight bias state slots write_slots has_initial_state cu_seqlens out"


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
    """Convolves the tokens of N sequences, and moves their caches on in a pool, in place.

    `gla_ext.layers.short_convolution.ShortConvolution` for sequences whose last inputs lie in a
    pool, under the slots of their states. There is no gradient. Works in CUDA graphs and under
    `torch.compile(fullgraph=True)`, which copies no pool. On CUDA rows of up to 16 tokens and
    widths W up to 4 are one launch; others, and packed sequences, take three.

    Args:
        x: `[B, T, D]`; bfloat16, float16, float32, or float64 (CPU).
        weight: `[D, 1, W]`, of any of these dtypes.
        bias: `[D]`. Default: none.
        state: the pool, `[P, D, W]`, x's dtype: the last W inputs of a sequence, 0 where there were
            fewer. Its last two dimensions are contiguous; P may have any stride with which no two
            rows overlap.
        slots: the row of the pool of each sequence, `[N]`, int32 or int64, on x's device. N is B,
            or `len(cu_seqlens) - 1`. A slot below 0 (by convention -1) or beyond the pool skips its
            sequence: y is zero there and no cache is touched. Default: P = N, and sequence n has
            slot n.
        write_slots: the row in which each sequence leaves its cache, `[N]`, where that is not the
            one it goes on from. A slot outside the pool: none is left. No row may be written twice,
            or written by one sequence and read by another. Default: slots.
        has_initial_state: bool `[N]`, on x's device: False starts from zero, whatever the row
            holds. Default: all go on.
        cu_seqlens: offsets of packed sequences, `[N + 1]`, int32 or int64, on x's device, with
            B = 1. Tokens after the last offset give zeros. Default: every row is a sequence.
        out: where y goes, of y's shape and dtype, with a contiguous last dimension and no memory in
            common with the inputs; contiguous under torch.compile. On CUDA the kernels write into
            one that is contiguous and starts at a multiple of 16 bytes; another gets a copy.
            Default: a new tensor.

    Returns:
        y, `[B, T, D]` in x's dtype: `silu(bias + sum_s weight[:, 0, W - 1 - s] * x_{t-s})`, or out.

    Raises:
        ValueError: shapes, devices or strides do not agree, and on CPU offsets that do not fit; out
            shares memory with an input (or is a view of its buffer of other strides).
        TypeError: dtypes do not.
        NotImplementedError: grad mode is on and an input requires grad; a device or layout without
            kernels; torch.vmap; DTensor.
    """
    tensors = (x, weight, bias, state, slots, write_slots, has_initial_state, cu_seqlens)
    if not torch.compiler.is_compiling():
        check_plain_tensors("short_convolution_", _NAMES, *tensors, out)
    refuse_pool_in_onnx("short_convolution_", "a ShortConvolution", of="caches")
    if out is None:
        return _convolve(*tensors)
    _convolve_out(*tensors, out=out)
    return out
