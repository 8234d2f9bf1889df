"""Gated linear attention with the constructor and the call of `torch.nn.MultiheadAttention`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gla_ext.layers._options import typed_options
from gla_ext.layers._route import are_one, check_mask
from gla_ext.layers.gated_linear_attention import GatedLinearAttention
from gla_ext.ops._checks import check_tensors

_QUERY = "query"  # replaces key and value that are the tensor query
_NO_WEIGHT = -1000.0  # programs write -1e4, -1e9 or the least number for -inf: weight 0 too


class MultiheadGLA(nn.Module):
    """Causal self-attention by gated linear attention, a replacement for `nn.MultiheadAttention`.

    `layer.self_attn = MultiheadGLA(embed_dim, num_heads, batch_first=True)` makes an
    `nn.TransformerEncoderLayer` a GLA layer (Yang et al., 2023, arXiv:2312.06635), whose cost is
    linear in the length. Replace the module before `nn.TransformerEncoder` copies the layer.

    Args:
        embed_dim: width of the input and the output.
        num_heads: number of heads; with the default widths it must divide embed_dim / 2.
        dropout: 0 only; there are no attention weights to drop. `nn.TransformerEncoderLayer` has
            its own dropout after this module. Default: 0.
        bias: whether the output projection has a bias; the other projections have none.
            Default: True.
        add_bias_kv, add_zero_attn: False only. Default: False.
        kdim, vdim: None or embed_dim only. Default: None.
        batch_first: inputs are `[B, T, E]`, not `[T, B, E]`. Default: False.
        self_attention: True promises that key and value equal query, in whatever tensors they come;
            only query is then read. If False, forward checks this: they must be the same object or,
            unless compiled, a tensor of the same memory, dtype, shape and strides. Set it where
            something copies or rewraps the arguments one by one, as in a compiled graph. FSDP2's
            casts in eager mode do not need it. Default: False.
        device, dtype: of the parameters. Default: torch's.
        **options: options of `GatedLinearAttention`: expand_k, expand_v, gate_logit_normalizer, ...

    Raises:
        NotImplementedError: an option of `nn.MultiheadAttention` that has no meaning here.
        TypeError: an option of another type.
        ValueError: sizes that do not divide.
    """

    # nn.TransformerEncoderLayer reads these to find out that it cannot use its fused kernels.
    _qkv_same_embed_dim = False
    in_proj_bias = None

    @typed_options
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        self_attention: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        _refuse("dropout", dropout, dropout == 0, "0")
        _refuse("add_bias_kv", add_bias_kv, not add_bias_kv, "False")
        _refuse("add_zero_attn", add_zero_attn, not add_zero_attn, "False")
        for name, dim in (("kdim", kdim), ("vdim", vdim)):
            _refuse(name, dim, dim in (None, embed_dim), f"embed_dim = {embed_dim}")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.batch_first = batch_first
        self.self_attention = self_attention
        self.attention = GatedLinearAttention(hidden_size=embed_dim, num_heads=num_heads, **options)
        self.bias = nn.Parameter(torch.zeros(embed_dim)) if bias else None
        self.to(device=device, dtype=dtype)

    def __call__(self, query: Tensor, key: Any = None, value: Any = None, **kwargs: Any) -> Any:
        # FSDP2's hook, which runs before forward, copies each argument when it casts it.
        casts = hasattr(type(self), "_get_fsdp_state") and isinstance(query, Tensor)
        if casts and self._takes_query_for(query, key, value):
            key = value = _QUERY
        return super().__call__(query, key, value, **kwargs)

    def reset_parameters(self) -> None:
        """Zeroes the bias; the submodules have their own reset_parameters."""
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Attends causally.

        Args:
            query: `[B, T, E]` if batch_first, else `[T, B, E]`; or `[T, E]`.
            key, value: the same tensor; see self_attention.
            key_padding_mask: `[B, T]` (`[T]` without a batch). A bool mask is True at padding. A
                floating mask is -inf or at most -1000 at padding and 0 elsewhere. Padded tokens are
                skipped and return 0, without bias. Other numbers raise ValueError in eager mode on
                CPU; elsewhere numbers up to -1000 mean padding, larger ones tokens. Default: None.
            need_weights: False only.
            attn_mask: the causal mask, `[T, T]`, or None. Only its shape is checked, as is_causal
                tells what it is. Default: None.
            average_attn_weights: ignored, as there are no weights.
            is_causal: True only; the default is that of `nn.MultiheadAttention`. Default: False.

        Returns:
            The output, shaped as query, and None in place of the weights.

        Raises:
            NotImplementedError: cross attention, weights, or attention that is not causal.
            TypeError: inputs that are not tensors.
            ValueError: shapes that do not fit; other numbers in key_padding_mask.
        """
        if key is _QUERY:
            key = value = query
        names, tensors = "query key value key_padding_mask attn_mask", (query, key, value)
        check_tensors("MultiheadGLA", names, *tensors, key_padding_mask, attn_mask)
        if not self._takes_query_for(query, key, value):
            raise NotImplementedError(
                "MultiheadGLA: expected key and value to be the tensor query (self-attention); "
                "cross attention is not supported; where they are query, but copied or rewrapped, "
                "build the module with self_attention=True"
            )
        if need_weights:
            raise NotImplementedError(
                "MultiheadGLA: expected need_weights=False, got True: there are no attention "
                "weights"
            )
        if not is_causal:
            raise NotImplementedError(
                "MultiheadGLA: expected is_causal=True, got False: gated linear attention is "
                "causal, and takes no other mask"
            )
        if query.ndim not in (2, 3):
            raise ValueError(
                "MultiheadGLA: expected query to have 2 or 3 dimensions, got shape "
                f"{list(query.shape)}"
            )
        batched = query.ndim == 3
        x = query if batched else query.unsqueeze(0)
        if batched and not self.batch_first:
            x = x.transpose(0, 1)
        length = x.shape[1]
        if attn_mask is not None and tuple(attn_mask.shape) != (length, length):
            raise ValueError(
                f"MultiheadGLA: expected attn_mask to be the causal mask, [T, T] = "
                f"[{length}, {length}], got shape {list(attn_mask.shape)}"
            )
        keep = None if key_padding_mask is None else _kept_tokens(key_padding_mask, x, batched)
        out, _, _ = self.attention(x, attention_mask=keep)
        if self.bias is not None:
            bias = self.bias.to(out.dtype)  # autocast may have narrowed out
            out = out + (bias if keep is None else bias * keep.unsqueeze(-1))
        if not batched:
            return out.squeeze(0), None
        return (out if self.batch_first else out.transpose(0, 1)), None

    def _takes_query_for(self, query: Tensor, key: Any, value: Any) -> bool:
        return all(are_one(query, other, self.self_attention) for other in (key, value))

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, {self.num_heads}, batch_first={self.batch_first}"


def _refuse(name: str, value: Any, supported: bool, expected: str) -> None:
    if not supported:
        raise NotImplementedError(f"MultiheadGLA: expected {name} to be {expected}, got {value}")


def _kept_tokens(key_padding_mask: Tensor, x: Tensor, batched: bool) -> Tensor:
    """`[B, T]`, True at tokens that are not padding."""
    mask = key_padding_mask if batched else key_padding_mask.unsqueeze(0)
    if mask.shape != x.shape[:2]:
        expected = x.shape[:2] if batched else x.shape[1:2]
        raise ValueError(
            f"MultiheadGLA: expected key_padding_mask to have shape {list(expected)}, got "
            f"{list(key_padding_mask.shape)}"
        )
    if mask.dtype == torch.bool:
        return ~mask
    if not mask.is_floating_point():
        raise ValueError(
            f"MultiheadGLA: expected key_padding_mask to be bool or floating, got {mask.dtype}"
        )
    check_mask(
        mask,
        lambda mask: (mask == 0) | (mask <= _NO_WEIGHT),
        "MultiheadGLA: expected a floating key_padding_mask to be 0 at tokens and -inf or at most "
        f"{_NO_WEIGHT:g} at padding, got {{:g}}",
    )
    return mask > _NO_WEIGHT
