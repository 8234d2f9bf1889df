"""Cross entropy of logits, and of a linear map without its logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gla_ext.ops._checks import check_tensors
from gla_ext.ops._door import form_on
from gla_ext.ops._flops import product
from gla_ext.ops._operator import declare
from gla_ext.ops._sharding import Given, Shards
from gla_ext.ops._vmap import slice_by_slice

IGNORE_INDEX = -100


class _Options(NamedTuple):
    """Options that the losses below have in common; see `cross_entropy_loss`."""

    ignore_index: int
    label_smoothing: float
    logit_scale: float
    logit_softcapping: float | None

    @classmethod
    def of(cls, ignore_index: int, smoothing: float, scale: float, cap: float | None) -> _Options:
        """The options in the types that the operators take."""
        cap = None if cap is None else float(cap)
        return cls(ignore_index, float(smoothing), float(scale), cap)


def cross_entropy_loss(
    logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    logit_softcapping: float | None = None,
    ignore_index: int = IGNORE_INDEX,
    inplace_backward: bool = False,
) -> tuple[Tensor, Tensor]:
    """`-log softmax(s)[target]` of every token, with `s = logit_scale * logits`.

    Forward is one kernel, which reads the logits once and does not change them. Backward is one
    kernel, which reads them once more. No wider copy of them is made or kept. Sums are fp32 (fp64
    for fp64 logits), whatever torch's default dtype is. Torch's operations are used instead under
    `torch.func` transforms, with forward-mode AD, for logits sharded over the classes, and in ONNX.

    Args:
        logits: `[N, V]`; bfloat16, float16, float32 or float64.
        target: int32 or int64 `[N]`, 0 to V - 1 or ignore_index. Another label raises ValueError on
            CPU. On CUDA it stops the kernel, and torch reports a device-side assert.
        label_smoothing: weight of the mean over all classes, 0 to 1. Default: 0.
        logit_scale: multiplies the logits. Default: 1.
        lse_square_scale: weight of the z-loss (arXiv:2204.02311), the square of the log of the sum
            of exponentials. Default: 0.
        logit_softcapping: `s = cap * tanh(logit_scale * logits / cap)`. Default: None.
        ignore_index: label that does not count: its loss and its gradient are 0. Default: -100.
        inplace_backward: backward writes the gradient over the logits, which saves a tensor of
            their size. The logits are then lost: a second backward, or the backward of another
            function that needs them, raises torch's error about changes in place. Ignored in
            torch.compile and for DTensors. Default: False.

    Returns:
        The losses `[N]`, which include the z-loss, and the z-losses `[N]`, which get no gradient.

    Raises:
        TypeError: for other dtypes.
        ValueError: for shapes, labels or options that do not fit.
    """
    check_tensors("cross_entropy", "logits target", logits, target)
    options = _Options.of(ignore_index, label_smoothing, logit_scale, logit_softcapping)
    form = form_on(_fwd, _plain, logits, compiled=_out_of_place, sharded=_on_shards)
    loss, z_loss, *_ = form(logits, target, *options, float(lse_square_scale), inplace_backward)
    return loss, z_loss


def fused_linear_cross_entropy_loss(
    x: Tensor,
    target: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    logit_softcapping: float | None = None,
    num_chunks: int = 8,
    reduction: str = "mean",
) -> Tensor:
    """Cross entropy of the logits `x @ weight.T + bias`, which are never in memory all at once.

    Forward processes one of num_chunks parts of the tokens at a time: it computes logits, losses
    and the gradients of their sum. It keeps the gradients of x and, in fp32, of weight and bias,
    which backward multiplies by the incoming gradient. DTensors use torch's operations, with all
    logits at once.

    Args:
        x: `[N, D]`; bfloat16, float16, float32 or float64. Autocast casts x, weight and bias.
        target: int32 or int64 `[N]`, as `cross_entropy_loss`'s.
        weight: `[V, D]`, of x's dtype.
        bias: `[V]`, of x's dtype. Default: None (0).
        ignore_index, label_smoothing, logit_scale, logit_softcapping: as `cross_entropy_loss`'s.
        num_chunks: parts of x; fewer if V is less than num_chunks times D. Default: 8.
        reduction: 'mean' over the labels that count, or 'sum'. Default: 'mean'.

    Returns:
        A scalar, fp32 (fp64 for fp64 inputs); the mean is NaN when no label counts.

    Raises:
        TypeError: for other dtypes.
        ValueError: for shapes, labels or options that do not fit.
        NotImplementedError: double backward.
    """
    check_tensors("linear_cross_entropy", "x target weight bias", x, target, weight, bias)
    check_reduction(reduction, ("mean", "sum"))
    options = _Options.of(ignore_index, label_smoothing, logit_scale, logit_softcapping)
    tensors = [x, weight] if bias is None else [x, weight, bias]
    form = form_on(_linear, _plain_linear, *tensors, sharded=lambda _: _plain_linear)
    total = form(x, weight, bias, target, *options, num_chunks, True, True)[0]
    return total / (target != ignore_index).sum() if reduction == "mean" else total


def _on_shards(logits: Any) -> Callable[..., tuple[Tensor, ...]]:
    """The form for a DTensor `[N, V]`. Torch's operations if sharded by V: no rank has a whole
    row.
    """
    cut_by_classes = any(placement.is_shard(logits.ndim - 1) for placement in logits.placements)
    return _plain if cut_by_classes else _out_of_place


def _out_of_place(*args: Any) -> tuple[Tensor, ...]:
    """The operator with inplace_backward, its last argument, turned off."""
    return _fwd(*args[:-1], False)


def _plain(logits: Tensor, target: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return plain_losses(logits, target, _Options(*args[:4]), args[4])


def _plain_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *args: Any
) -> tuple[Tensor]:
    logits = F.linear(x, weight, bias)
    return (plain_losses(logits, target, _Options(*args[:4]))[0].sum(),)


def plain_losses(
    logits: Tensor, target: Tensor, options: Any, lse_square_scale: float = 0.0
) -> tuple[Tensor, Tensor]:
    """`cross_entropy_loss` in torch's operations. options is any object with ignore_index,
    label_smoothing, logit_scale and logit_softcapping, for instance one of FLA's modules.
    """
    s = logits.to(torch.promote_types(logits.dtype, torch.float32)) * options.logit_scale
    if options.logit_softcapping is not None:
        s = options.logit_softcapping * torch.tanh(s / options.logit_softcapping)
    loss = F.cross_entropy(
        s,
        target.long(),
        ignore_index=options.ignore_index,
        label_smoothing=options.label_smoothing,
        reduction="none",
    )
    if lse_square_scale == 0:
        return loss, torch.zeros_like(loss)
    z_loss = lse_square_scale * s.logsumexp(-1).square()
    z_loss = z_loss.masked_fill(target == options.ignore_index, 0)
    return loss + z_loss, z_loss.detach()


def check_reduction(reduction: str, known: tuple[str, ...]) -> None:
    if reduction not in known:
        raise ValueError(
            f"cross_entropy: expected reduction to be one of {', '.join(known)}, got {reduction!r}"
        )


def _linear_flops(*args: Any, **kwargs: Any) -> int:
    return product(0, 1, times=1 + sum(args[-2:]))(*args)  # logits, dx, dweight


def _rows(given: Given) -> Iterator[Shards]:
    if given.get("inplace_backward"):
        raise NotImplementedError(
            "cross_entropy_fwd: expected no inplace_backward with DTensors, which "
            "cross_entropy_bwd_ does not take"
        )
    yield dict.fromkeys(("logits", "target", "lse", "dloss", "loss", "z_loss", "result"), 0)


_fwd = declare("cross_entropy_fwd", vmap=slice_by_slice, shards=_rows)
declare("cross_entropy_bwd", vmap=slice_by_slice, shards=_rows)
declare("cross_entropy_bwd_", instead="gla_ext.losses.cross_entropy_loss")
declare("cross_entropy_with_grad_", instead="gla_ext.losses.cross_entropy_loss")
_linear = declare(
    "linear_cross_entropy_fwd",
    flops=_linear_flops,
    vmap=slice_by_slice,
    instead="gla_ext.losses.fused_linear_cross_entropy_loss",
)
