"""The low-rank gate of a GLA layer: its second linear map, log-sigmoid, division and clamp."""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from gla_ext.ops._checks import check_tensors
from gla_ext.ops._door import form_on
from gla_ext.ops._flops import product
from gla_ext.ops._operator import declare
from gla_ext.ops._sharding import SUM, Given, Rule, Shards, each_but_last
from gla_ext.ops._vmap import slice_by_slice


def gate_projection(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    normalizer: float = 16,
    clamp_min: float | None = None,
) -> Tensor:
    """`max(logsigmoid(h @ weight.T + bias) / normalizer, clamp_min)`.

    Forward is one kernel; backward is one kernel and a last sum for the gradients of the
    parameters. Each kernel reads and writes everything once, computes in fp32 (fp64 for fp64
    inputs) and rounds once. Autograd saves h, weight and bias. CUDA kernels exist for bfloat16 and
    float16 with R up to 16; for other dtypes and ranks the operator calls torch's operations there.
    torch.func transforms, forward-mode AD and ONNX get torch's operations in place of the operator.

    Args:
        h: `[..., R]`; bfloat16, float16, float32 or float64. Rows of a wider tensor are read in
            place. Autocast casts h, weight and bias.
        weight: `[K, R]`, of h's dtype.
        bias: `[K]`, of h's dtype. Default: None (0).
        normalizer: above 0. Default: 16.
        clamp_min: lower bound of the result. Default: None.

    Returns:
        `[..., K]` in h's dtype, contiguous.

    Raises:
        TypeError: for other dtypes.
        ValueError: for shapes or devices that do not fit, or a normalizer not above 0.
        NotImplementedError: double backward.
    """
    check_tensors("gate_projection", "h weight bias", h, weight, bias)
    tensors = [h, weight] if bias is None else [h, weight, bias]
    clamp_min = None if clamp_min is None else float(clamp_min)
    form = form_on(_fwd, plain_gate_projection, *tensors)
    return form(h, weight, bias, float(normalizer), clamp_min)


def plain_gate_projection(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    normalizer: float = 16,
    clamp_min: float | None = None,
) -> Tensor:
    """`gate_projection` as torch's operations."""
    g = F.logsigmoid(F.linear(h, weight, bias)) / normalizer
    return g if clamp_min is None else g.clamp_min(clamp_min)


_CHANNELS: Shards = {"weight": 0, "bias": 0, "dweight": 0, "dbias": 0, "dh": SUM}


def _rows_or_channels(rows: str, summed: str, gate: str) -> Rule:
    """Rule for sharding by rows, or by channels of the parameters and of the gate."""

    def rule(given: Given) -> Iterator[Shards]:
        yield from each_but_last(rows, summed)(given)
        yield _CHANNELS | {gate: given["h"].ndim - 1}

    return rule


_fwd = declare(
    "gate_projection_fwd",
    plain=plain_gate_projection,
    flops=product(0, 1),
    vmap=slice_by_slice,
    shards=_rows_or_channels("h result", "", "result"),
)
declare(
    "gate_projection_bwd",
    flops=product(1, 2, times=2),
    vmap=slice_by_slice,
    shards=_rows_or_channels("dg h dh", "dweight dbias", "dg"),
)
