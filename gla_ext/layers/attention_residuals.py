"""Attention residuals (arXiv:2603.15031): layers that read a mix of what came before them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gla_ext.layers.norms import RMSNorm


class ResidualQuery(nn.Linear):
    """The query of `mix_residuals`, a weight `[1, hidden_size]`; 0 at first,
    when all sources count alike.

    Args:
        hidden_size: its width.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1, bias=False)


def mix_residuals(
    query: nn.Module, sources: Sequence[Tensor], key_norm: RMSNorm, output_norm: RMSNorm
) -> Tensor:
    """`output_norm(sum_l p_l v_l)` with `p = softmax_l(query . key_norm(v_l))` in every token.

    In fp32 (fp64 of fp64 sources), rounded once. Backward makes it again, and keeps the sources
    alone.

    Args:
        query: a `ResidualQuery`.
        sources: v_l, `[B, T, hidden_size]` each.
        key_norm, output_norm: their weights and key_norm's epsilon count.

    Raises:
        NotImplementedError: an adapter, or another module, in query's place.
    """
    if not isinstance(query, ResidualQuery):
        raise NotImplementedError(
            "attnres_block_size: an adapter on attn_res_proj, mlp_res_proj or res_proj is not "
            f"implemented, whose weight is no linear map of inputs, got {type(query).__name__}"
        )
    weights = (query.weight, key_norm.weight, output_norm.weight)
    return mix_by_weights(*weights, key_norm.eps, sources)


def mix_by_weights(
    query: Tensor,
    key_weight: Tensor,
    output_weight: Tensor | None,
    eps: float,
    sources: Sequence[Tensor],
) -> Tensor:
    """`mix_residuals` from tensors; without an output_weight the mix itself."""
    arguments = (query, key_weight, output_weight, eps, *sources)
    if torch.is_grad_enabled() and any(source.requires_grad for source in sources):
        return checkpoint(_mix, *arguments, use_reentrant=False, preserve_rng_state=False)
    return _mix(*arguments)


def _mix(
    query: Tensor, key_weight: Tensor, output_weight: Tensor | None, eps: float, *sources: Tensor
) -> Tensor:
    dtype = torch.promote_types(sources[0].dtype, torch.float32)
    query = query.flatten().to(dtype) * key_weight.to(dtype)  # [D]
    wide = [source.to(dtype) for source in sources]
    scores = [(v * query).sum(-1) * torch.rsqrt(v.square().mean(-1) + eps) for v in wide]
    weights = torch.stack(scores, -1).softmax(-1)  # [B, T, L]
    y = sum(v * p.unsqueeze(-1) for v, p in zip(wide, weights.unbind(-1), strict=True))
    if output_weight is not None:
        y = F.rms_norm(y, y.shape[-1:], output_weight.to(dtype), eps)
    return y.to(sources[0].dtype)
