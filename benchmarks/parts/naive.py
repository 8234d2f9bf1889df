"""The chunkwise form of the paper's section 4.2 as one would write it first in PyTorch."""

import torch
from torch import Tensor


def naive_chunk_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, chunk: int = 64
) -> tuple[Tensor, Tensor]:
    """`chunk_gla` of whole chunks from a zero state: products in the inputs' dtype, gates and sums
    over chunks in fp32. Keys are divided by their gates since the chunk's start, which overflows
    where a chunk forgets too much: the longer the chunk, the sooner.

    Args:
        q, k, g: `[B, T, H, K]`, T a multiple of chunk; v: `[B, T, H, V]`.
        chunk: tokens of a chunk.

    Returns:
        o `[B, T, H, V]`, and the final state `[B, H, K, V]`.
    """
    if q.shape[1] % chunk:
        raise ValueError(f"expected T to be a multiple of chunk = {chunk}, got {q.shape[1]}")
    wide = torch.promote_types(q.dtype, torch.float32)
    # [B, H, N, C, K or V]
    q, k, v, g = (x.transpose(1, 2).unflatten(2, (-1, chunk)) for x in (q, k, v, g))
    b = g.to(wide).cumsum(-2)
    whole = b[..., -1:, :]
    q_decayed = (q * b.exp() * q.shape[-1] ** -0.5).to(v.dtype)
    A = q_decayed @ (k * (-b).exp()).to(v.dtype).mT  # [B, H, N, C, C]
    added = ((k * (whole - b).exp()).to(v.dtype).mT @ v).to(wide)  # [B, H, N, K, V]
    S, states = torch.zeros_like(added[:, :, 0]), []
    for decay, more in zip(whole.mT.exp().unbind(2), added.unbind(2), strict=True):
        states.append(S)
        S = decay * S + more
    o = A.tril() @ v + q_decayed @ torch.stack(states, 2).to(v.dtype)
    return o.flatten(2, 3).transpose(1, 2), S
