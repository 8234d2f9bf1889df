"""A short causal convolution of every channel, over sequences, packed ones, and segments."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ShortConvolution(nn.Conv1d):
    """Depthwise causal convolution, then SiLU; parameters are those of FLA's module of this name.

    `y_t = silu(bias + sum_s weight[:, 0, W - 1 - s] * x_{t-s})`, s from 0 to W - 1, tokens before
    the first being 0. Computed in fp32 (fp64 for fp64 inputs) and rounded once. A sum of shifted
    products, in which nothing is read back from the device: inductor makes one kernel of it.

    Args:
        hidden_size: number of channels D.
        kernel_size: W, in tokens, at least 1.
        bias: whether there is a `bias` `[D]` beside the `weight` `[D, 1, W]`. Default: False.
    """

    def __init__(self, hidden_size: int, kernel_size: int, bias: bool = False) -> None:
        super().__init__(
            hidden_size,
            hidden_size,
            kernel_size,
            padding=kernel_size - 1,
            groups=hidden_size,
            bias=bias,
        )
        self.hidden_size = hidden_size

    def forward(
        self,
        x: Tensor,
        cache: Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Convolves sequences, from the last inputs of what came before them.

        Args:
            x: `[B, T, D]`.
            cache: the last W inputs of each sequence so far, `[N, D, W]`, 0 where there were
                fewer; not written to. Default: None (no inputs before).
            output_final_state: return the cache after these tokens. Default: False.
            cu_seqlens: int32 or int64 `[N + 1]`, offsets of the sequences packed into a batch of
                one. Default: None.
            positions: `token_positions(cu_seqlens, T)`, if it is at hand already. Default: None.

        Returns:
            The output `[B, T, D]` and the new cache `[N, D, W]`, both in x's dtype, or None.

        Raises:
            ValueError: for shapes that do not fit.
        """
        return causal_convolution(self, x, cache, output_final_state, cu_seqlens, positions)


def causal_convolution(
    conv: nn.Conv1d,
    x: Tensor,
    cache: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`ShortConvolution.forward` with the kernel size, weight and bias of any such module."""
    (B, T, D), W = x.shape, conv.kernel_size[0]
    _check_offsets(cu_seqlens, B)
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if cache is not None:
        if tuple(cache.shape) != (N, D, W):
            raise ValueError(
                f"ShortConvolution: expected cache to have shape [N, D, W] = [{N}, {D}, {W}], "
                f"got {list(cache.shape)}"
            )
        cache = cache.to(x.dtype)
    if cu_seqlens is None:
        before = x.new_zeros(B, W, D) if cache is None else cache.mT
        inputs = torch.cat([before, x], 1)
        y = _shifted_sum(conv.weight, inputs, T)
        state = inputs.narrow(1, T, W).mT.contiguous() if output_final_state else None
    else:
        inputs = F.pad(x, (0, 0, W, 0))
        if positions is None:
            positions = token_positions(cu_seqlens, T)
        y = _shifted_sum(conv.weight, inputs, T, positions)
        if cache is not None:
            y = y + _from_cache(conv.weight, cache, cu_seqlens, T)
        state = _packed_state(inputs[0], cache, cu_seqlens, W) if output_final_state else None
    if conv.bias is not None:
        y = y + conv.bias
    return F.silu(y).to(x.dtype), state


def _shifted_sum(weight: Tensor, inputs: Tensor, T: int, positions: Tensor | None = None) -> Tensor:
    """The convolution before bias and SiLU, fp32 or fp64.

    Args:
        weight: `[D, 1, W]`.
        inputs: `[B, W + T, D]`, W inputs before the first token.
        positions: `[T]`, of each token in its sequence: what lies further back is another's.
    """
    W = weight.shape[-1]
    weight = weight.to(torch.promote_types(inputs.dtype, torch.float32))
    y = inputs.narrow(1, W, T) * weight[:, 0, W - 1]
    for shift in range(1, W):
        term = inputs.narrow(1, W - shift, T) * weight[:, 0, W - 1 - shift]
        if positions is not None:
            term = term.masked_fill((positions < shift).unsqueeze(-1), 0)
        y = y + term
    return y


def _from_cache(weight: Tensor, cache: Tensor, cu_seqlens: Tensor, T: int) -> Tensor:
    """What packed sequences' first W - 1 tokens get from the cache, `[T, D]`, 0 elsewhere."""
    W = weight.shape[-1]
    terms = _shifted_sum(weight, F.pad(cache.mT, (0, 0, 0, W - 1)), W - 1)  # [N, W - 1, D]
    step = torch.arange(W - 1, device=cu_seqlens.device)
    start, length = cu_seqlens[:-1, None], cu_seqlens.diff()[:, None]
    # Row 0 takes what a sequence is too short for. Each other row takes one term: no order.
    rows = torch.where(step < length, start + step + 1, 0).clamp(0, T)
    y = terms.new_zeros(T + 1, terms.shape[-1])
    return y.index_add(0, rows.flatten(), terms.flatten(0, 1)).narrow(0, 1, T)


def convolve(
    convolutions: Sequence[ShortConvolution],
    inputs: Sequence[Tensor],
    caches: Sequence[Tensor | None] | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...] | None]:
    """Several convolutions over the same sequences, one input and one cache each.

    Returns:
        The outputs, and the caches to go on from or None.
    """
    caches = [None] * len(inputs) if caches is None else caches
    positions = None if cu_seqlens is None else token_positions(cu_seqlens, inputs[0].shape[1])
    results = [
        convolution(x, cache, output_final_state, cu_seqlens, positions)
        for convolution, x, cache in zip(convolutions, inputs, caches, strict=True)
    ]
    outputs, states = zip(*results, strict=True)
    return outputs, states if output_final_state else None


def token_positions(cu_seqlens: Tensor, T: int) -> Tensor:
    """The position of each token in its sequence, `[T]`, in cu_seqlens' dtype.

    Args:
        cu_seqlens: int32 or int64 `[N + 1]`; what follows the last offset counts as a sequence.
        T: number of tokens.
    """
    tokens = torch.arange(T, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    sequence = torch.searchsorted(cu_seqlens.contiguous(), tokens, right=True) - 1
    return tokens - cu_seqlens[sequence.clamp_min(0)]


def _packed_state(inputs: Tensor, cache: Tensor | None, cu_seqlens: Tensor, W: int) -> Tensor:
    """The last W inputs of each packed sequence, `[N, D, W]`; inputs `[W + T, D]`."""
    step = torch.arange(W, device=cu_seqlens.device)
    end, length = cu_seqlens[1:, None], cu_seqlens.diff()[:, None]
    # On CUDA nobody has looked at the offsets: bad ones must not read outside the tensor.
    rows = (end + step).clamp(0, inputs.shape[0] - 1)
    state = inputs.index_select(0, rows.flatten()).unflatten(0, rows.shape).mT
    from_cache = (step + length < W).unsqueeze(1)  # [N, 1, W]
    if cache is None:
        return state.masked_fill(from_cache, 0).contiguous()
    older = (step + length).clamp(0, W - 1).unsqueeze(1).expand_as(cache)
    return torch.where(from_cache, cache.gather(2, older), state).contiguous()


def _check_offsets(cu_seqlens: Tensor | None, B: int) -> None:
    """Raises where the shape of cu_seqlens is not `[N + 1]` or the batch not one row."""
    if cu_seqlens is None:
        return
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(
            "ShortConvolution: expected cu_seqlens to have shape [N + 1], got "
            f"{list(cu_seqlens.shape)}"
        )
    if B != 1:
        raise ValueError(f"ShortConvolution: expected B to be 1 with cu_seqlens, got {B}")
