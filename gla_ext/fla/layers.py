"""Replacements for the parts of FLA's layers that break a graph.

In training, norms are gla_ext's operators; the gated norm always is. Outside `torch.compile`, every
other replacement calls FLA's own code; all except the unpadding do so only on a GPU, since FLA's
kernels do not run on a CPU. Parameters, and so checkpoints, are not changed. Losses, which are only
replaced on a CPU, are in `gla_ext.fla.losses`, attention in `gla_ext.fla.attention`, and the
changes for `generate` in `gla_ext.fla.generation`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from gla_ext.fla import _context, activations, attention, generation, losses
from gla_ext.fla.activations import needs_torch
from gla_ext.layers._history import Padding
from gla_ext.layers.norms import plain_rms_norm, rms_norm, rms_norm_residual
from gla_ext.layers.short_convolution import causal_convolution
from gla_ext.ops._door import in_graphs

_ABSENT = object()  # value of an attribute that did not exist


def replace(has_kernels: Callable[[Tensor], bool]) -> list[tuple[Any, str, Any]]:
    """Replaces the forward of FLA's norms, short convolutions and losses, and in `fla.layers.gla`
    the unpadding and the table of activations.

    Args:
        has_kernels: whether gla_ext has kernels for a tensor's device.

    Returns:
        The argument of `put_back`: for every attribute its owner, its name, and its earlier value.
    """
    modules = importlib.import_module("fla.modules")
    changes = [
        (owner, "forward", make(owner.forward))
        for owner, make in (
            (modules.FusedRMSNormGated, partial(_gated_norm_forward, has_kernels=has_kernels)),
            (modules.RMSNorm, partial(_norm_forward, has_kernels=has_kernels)),
            (modules.ShortConvolution, partial(_convolution_forward, has_kernels=has_kernels)),
        )
    ]
    changes += losses.replacements() + attention.replacements() + generation.replacements()
    layers = _layers()
    if layers is not None:
        changes += [
            (layers, name, make(getattr(layers, name)))
            for name, make in _UNPADDING.items()
            if hasattr(layers, name)
        ]
        changes.append((layers, "ACT2FN", activations.table(layers)))
        layer = layers.GatedLinearAttention
        changes.append((layer, "forward", _context.layer_forward(layer.forward)))
    before = [(owner, name, vars(owner).get(name, _ABSENT)) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    return before


def replace_in_layers() -> None:
    """Replaces the activations of existing layers."""
    if (layers := _layers()) is not None:
        activations.replace(layers)


def put_back(before: list[tuple[Any, str, Any]]) -> None:
    """Undoes `replace` and `replace_in_layers`."""
    for owner, name, value in before:
        if value is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, value)
    if (layers := _layers()) is not None:
        activations.put_back(layers)


def _layers() -> ModuleType | None:
    try:
        return importlib.import_module("fla.layers.gla")
    except ModuleNotFoundError:  # the package fla-core has operators and norms, but no layers
        return None


def _gated_norm_forward(original: Callable, has_kernels: Callable[[Tensor], bool]) -> Callable:
    """Replaces `FusedRMSNormGated.forward`: `norm(x) * activation(g)`, rounded once."""

    def forward(
        self: nn.Module,
        x: Tensor,
        g: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        ours = has_kernels(x)
        if residual is not None or prenorm or not (ours or needs_torch(x)):
            return original(self, x, g, residual, prenorm, residual_in_fp32)
        norm = rms_norm if ours else plain_rms_norm
        return norm(x, self.weight, self.eps, g.reshape(x.shape), self.activation)

    return forward


def _norm_forward(original: Callable, has_kernels: Callable[[Tensor], bool]) -> Callable:
    """Replaces `RMSNorm.forward`: `norm(x + residual)`, and with prenorm the sum as well."""

    def is_ours(x: Tensor, residual: Tensor | None) -> bool:
        # FLA's sum has the residual's dtype, the operator's the wider of the two. Without a
        # backward pass, FLA's kernel is as fast.
        same = residual is None or torch.promote_types(x.dtype, residual.dtype) == residual.dtype
        return same and torch.is_grad_enabled() and has_kernels(x)

    def forward(
        eager: bool,
        self: nn.Module,
        x: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        ours = eager and is_ours(x, residual)
        if self.bias is not None or not (ours or needs_torch(x)):
            return original(self, x, residual, prenorm, residual_in_fp32)
        if ours:
            if residual is None:
                y, total = rms_norm(x, self.weight, self.eps), x.float() if residual_in_fp32 else x
            else:
                y, total = rms_norm_residual(x, residual, self.weight, self.eps)
            return (y, total) if prenorm else y
        total = _wide(x) if residual is None else _wide(x) + _wide(residual)
        y = plain_rms_norm(total, self.weight, self.eps).to(x.dtype)
        dtype = torch.float32 if residual_in_fp32 else x.dtype
        dtype = dtype if residual is None else residual.dtype
        return (y, total.to(dtype)) if prenorm else y

    # In a compiled graph, plain torch operations are used, which are fused with their neighbours.
    return in_graphs(partial(forward, False), partial(forward, True))


def _convolution_forward(original: Callable, has_kernels: Callable[[Tensor], bool]) -> Callable:
    """Replaces `ShortConvolution.forward`; the final state is a new tensor and never in `cache`."""

    def forward(
        self: nn.Module,
        x: Tensor,
        residual: Tensor | None = None,
        mask: Tensor | None = None,
        cache: Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
        chunk_indices: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        both = mask is not None and cu_seqlens is not None  # FLA rejects this
        other = residual is not None or both or self.activation is None or kwargs
        no_kernel = x.dtype == torch.float64 and x.device.type == "cuda"
        if other or no_kernel or not (needs_torch(x) and has_kernels(x)):
            args = (residual, mask, cache, output_final_state, cu_seqlens, chunk_indices)
            return original(self, x, *args, **kwargs)
        if mask is not None:
            x = x * mask.unsqueeze(-1)
        return causal_convolution(self, x, cache, bool(output_final_state), cu_seqlens)

    return forward


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


# In graphs, a `Padding` replaces FLA's `indices`, the positions of valid tokens, whose number
# depends on the data.
def _unpad_hidden_states(original: Callable) -> Callable:
    """For FLA 0.6.0: returns packed hidden states, the padding and offsets."""

    def unpad_hidden_states(
        hidden_states: Tensor, cu_seqlens: Tensor | None, attention_mask: Tensor | None, q_len: int
    ) -> tuple[Tensor, Any, Tensor | None]:
        if cu_seqlens is not None or attention_mask is None:
            return original(hidden_states, cu_seqlens, attention_mask, q_len)
        padding = Padding.of(attention_mask, attention_mask.shape[0], q_len)
        return padding.pack(hidden_states), padding, padding.cu_seqlens

    return in_graphs(unpad_hidden_states, original)


def _get_unpad_data(original: Callable) -> Callable:
    """For FLA 0.5.2: the padding and the offsets; None for the longest length, which is not
    used.
    """

    def get_unpad_data(attention_mask: Tensor) -> tuple[Any, Tensor, int | None]:
        padding = Padding.of(attention_mask, *attention_mask.shape)
        return padding, padding.cu_seqlens, None

    return in_graphs(get_unpad_data, original)


def _on_padding(ours: Callable) -> Callable:
    """Makes a wrapper of a function of tokens and indices that calls `ours` if these are a
    `Padding`.
    """

    def make(original: Callable) -> Callable:
        def function(x: Tensor, indices: Any, *sizes: int) -> Tensor:
            if isinstance(indices, Padding):
                return ours(indices, x)
            return original(x, indices, *sizes)

        return function

    return make


_UNPADDING = {
    "get_unpad_data": _get_unpad_data,
    # These two, of FLA 0.5.2, take tokens [B * T, D] in one row.
    "index_first_axis": _on_padding(lambda p, x: p.pack(x.unflatten(0, p.valid.shape))[0]),
    "pad_input": _on_padding(lambda p, x: p.unpack(x.unsqueeze(0))),
    "repad_hidden_states": _on_padding(Padding.unpack),
    "unpad_hidden_states": _unpad_hidden_states,
}
