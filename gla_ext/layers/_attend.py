"""Causal softmax attention by torch's kernels: rows of one length, packed sequences, one token.

q is `[.., H, D]`, k and v are `[.., HK, D]`, head h of q reads head `h // (H // HK)`. The last
query of a sequence sees its last key; with a window W a query sees W keys, its own the last of
them. Scores are scaled by `D ** -0.5`.

On a GPU, bf16 and fp16 with a window or offsets go to torch's flash kernels for sequences of
several lengths, which know both. FlexAttention would need a compilation for the same.
"""

from __future__ import annotations

import inspect
import itertools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from gla_ext.cache._key_values import sequence_of
from gla_ext.layers._route import pieces, read, with_own_heads

_QUERIES = 512  # that share a mask, where keys outside a window are left out
_MASKED_QUERIES = 1024  # of a packed row whose mask is there at once
_MOST_CHANNELS = 256  # of a head in torch's flash kernels
_KEYS_A_SPLIT = 1024  # that one block of a GPU reads, where a row has one query
_flash_forward = torch.ops.aten._flash_attention_forward.default
_TAKES_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters


def has_flash(q: Tensor) -> bool:
    """Whether torch's flash kernels for sequences of several lengths take q's device and dtype."""
    return (
        q.is_cuda
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[-1] <= _MOST_CHANNELS
        and q.shape[-1] % 8 == 0
    )


def attend_rows(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """Rows of T tokens, with nothing before them: q and the result are `[B, T, H, D]`, k and v
    `[B, T, HK, D]`. A query sees so many keys as the window says, None: all up to its own.
    """
    B, T = q.shape[:2]
    if window is None or (isinstance(T, int) and window >= T):
        return _sdpa(q, k, v, is_causal=True)
    if has_flash(q):
        offsets = torch.arange(B + 1, device=q.device, dtype=torch.int32) * T
        flat = (x.flatten(0, 1) for x in (q, k, v))
        return _flash(*flat, offsets, offsets, T, T, window).unflatten(0, (B, T))
    parts = pieces(T, _QUERIES)
    if parts is None:
        return _sdpa(q, k, v, _band(T, T, 0, window, q.device))
    return _banded(q, k, v, window, parts)


def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    longest: int | None = None,
    longest_k: int | None = None,
    window: int | None = None,
) -> Tensor:
    """N sequences in one row, each of whose queries are the last of its tokens.

    Args:
        q: `[TQ, H, D]`.
        k, v: `[TK, HK, D]`.
        cu_q, cu_k: int32 or int64 `[N + 1]`, offsets of the sequences' queries and keys. What
            follows the last belongs to none.
        longest, longest_k: at least the most queries and keys of a sequence; the nearer, the less
            work a GPU leaves undone. Default: None (TQ, TK).
        window: as in `attend_rows`.

    Returns:
        `[TQ, H, D]`, 0 for queries of no sequence.

    Raises:
        ValueError: on a CPU, for offsets that decrease or leave 0 to TQ.
    """
    offsets = read(cu_q)
    if offsets is not None:
        _check_offsets(offsets, q.shape[0])
        return _one_by_one(q, k, v, offsets, cu_k.tolist(), window)
    mine, of_keys = _of_a_sequence(q, cu_q), _of_a_sequence(k, cu_k)
    # Kernels leave what is of no sequence unwritten, gradients too.
    q = q.where(mine, 0)
    k, v = k.where(of_keys, 0), v.where(of_keys, 0)
    if has_flash(q):
        most = q.shape[0] if longest is None else longest
        most_k = k.shape[0] if longest_k is None else longest_k
        o = _flash(q, k, v, cu_q.to(torch.int32), cu_k.to(torch.int32), most, most_k, window)
    else:
        o = _masked(q, k, v, cu_q, cu_k, window)
    return o.where(mine, 0)


def attend_last(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None) -> Tensor:
    """One query a row, q and the result `[N, 1, H, D]`, which sees every key that is there.

    Args:
        k, v: `[N, L, HK, D]`, perhaps the first L of longer rows.
        lengths: int64 `[N]`, number of keys of each row, from the first on; None: L. The result of
            a row without a key is finite and without meaning.
    """
    no_gradient = not (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)))
    if has_flash(q) and no_gradient:
        parts = pieces(k.shape[1], _KEYS_A_SPLIT)
        # In a graph not even the number of keys is asked: it would be compiled for one.
        if parts is not None and k.shape[1] % _KEYS_A_SPLIT == 0:
            if lengths is None:
                lengths = torch.full((k.shape[0],), k.shape[1], device=q.device)
            return _split(q, k, v, lengths)
    if lengths is None:
        return _sdpa(q, k, v)
    keys = torch.arange(k.shape[1], device=q.device)
    # The first is always seen: a softmax of nothing would be NaN.
    seen = (keys < lengths.clamp_min(1).unsqueeze(-1))[:, None, None]  # [N, 1, 1, L]
    return _sdpa(q, k, v, seen)


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    k, v, grouped = with_own_heads(q, k, v)
    q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
    o = F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, enable_gqa=grouped)
    return o.transpose(-3, -2)


def _flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    longest: int,
    longest_k: int,
    window: int | None,
) -> Tensor:
    sides = (-1 if window is None else window - 1, 0)
    options = {"enable_gqa": q.shape[1] != k.shape[1]} if _TAKES_GQA else {}
    return varlen_attn(q, k, v, cu_q, cu_k, longest, longest_k, window_size=sides, **options)


def _band(queries: int, keys: int, before: int, window: int | None, device: torch.device) -> Tensor:
    """Which keys the queries see, bool `[queries, keys]`; query 0 stands beside key `before`."""
    query = torch.arange(queries, device=device).unsqueeze(1) + before
    key = torch.arange(keys, device=device)
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


def _banded(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, pieces_of_q: list[slice]
) -> Tensor:
    """Rows `[B, T, H, D]` whose queries are the last of the keys, some queries at a time."""
    before, parts = k.shape[1] - q.shape[1], []
    for start, stop in ((piece.start, piece.stop) for piece in pieces_of_q):
        first = 0 if window is None else max(0, before + start - window + 1)
        own = slice(first, before + stop)
        mask = _band(stop - start, before + stop - first, before + start - first, window, q.device)
        parts.append(_sdpa(q[:, start:stop], k[:, own], v[:, own], mask))
    return torch.cat(parts, 1) if parts else q


def _check_offsets(offsets: list[int], T: int) -> None:
    if offsets[0] < 0 or offsets[-1] > T or any(a > b for a, b in itertools.pairwise(offsets)):
        raise ValueError(
            f"Attention: expected cu_seqlens not to decrease, from 0 to at most {T}, got {offsets}"
        )


def _one_by_one(
    q: Tensor, k: Tensor, v: Tensor, cu_q: list[int], cu_k: list[int], window: int | None
) -> Tensor:
    parts = [q.new_zeros(cu_q[0], *q.shape[1:])]
    for n in range(len(cu_q) - 1):
        own_q, own_k = slice(cu_q[n], cu_q[n + 1]), slice(cu_k[n], cu_k[n + 1])
        one = (q[own_q].unsqueeze(0), k[own_k].unsqueeze(0), v[own_k].unsqueeze(0))
        T, L = one[0].shape[1], one[1].shape[1]
        if T == L and (window is None or window >= T):
            parts.append(_sdpa(*one, is_causal=True)[0] if T else q[own_q])
        else:
            parts.append(_banded(*one, window, pieces(T, _QUERIES))[0])
    parts.append(q.new_zeros(q.shape[0] - cu_q[-1], *q.shape[1:]))
    return torch.cat(parts)


def _of_a_sequence(x: Tensor, offsets: Tensor) -> Tensor:
    """bool `[T, 1, 1]`."""
    tokens = torch.arange(x.shape[0], device=x.device).view(-1, 1, 1)
    return (tokens >= offsets[0]) & (tokens < offsets[-1])


def _masked(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, window: int | None
) -> Tensor:
    """`attend_packed` by a mask of all queries and keys."""
    of_q, of_k = sequence_of(cu_q, q.shape[0]), sequence_of(cu_k, k.shape[0])
    key = torch.arange(k.shape[0], device=k.device)
    # A query's own key: as far from the last key of the sequence as it is from the last query.
    query = torch.arange(q.shape[0], device=q.device) - cu_q[of_q + 1] + cu_k[of_q + 1]

    def some(part: slice) -> Tensor:
        own = query[part].unsqueeze(1)
        seen = (of_q[part].unsqueeze(1) == of_k) & (key <= own)
        if window is not None:
            seen = seen & (key > own - window)
        return _sdpa(q[part], k, v, seen)

    parts = pieces(q.shape[0], _MASKED_QUERIES)
    if parts is None or len(parts) < 2:
        return some(slice(None))
    return torch.cat([some(part) for part in parts])


def _split(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """`attend_last` by flash kernels, `_KEYS_A_SPLIT` keys in a block: one query has too few rows
    and heads to fill a GPU. Blocks past a row's keys do nothing, so the time follows the lengths.
    """
    N, L, HK, D = k.shape
    splits, groups = L // _KEYS_A_SPLIT, q.shape[2] // HK
    start = torch.arange(splits, device=q.device) * _KEYS_A_SPLIT
    used = (lengths.unsqueeze(1) - start).clamp(0, _KEYS_A_SPLIT)  # [N, S]
    # Rows of the buffer may be longer than L: where a split starts is told in its tokens.
    row = k.stride(0) // k.stride(1)
    rows = torch.arange(N, device=q.device).unsqueeze(1) * row
    offsets = F.pad((rows + start).flatten(), (0, 1), value=N * row)
    size, stride = (N * row, HK, D), k.stride()[1:]
    # The heads that share keys are the queries of a sequence: a block reads these once.
    q = q.view(N, 1, HK, groups, D).transpose(2, 3).expand(N, splits, groups, HK, D)
    queries = torch.arange(N * splits + 1, device=q.device) * groups
    o, lse, *_ = _flash_forward(
        q.flatten(0, 2),
        *(x.as_strided(size, stride, x.storage_offset()) for x in (k, v)),
        queries.to(torch.int32),
        offsets.to(torch.int32),
        groups,
        _KEYS_A_SPLIT,
        0.0,
        False,
        False,
        seqused_k=used.flatten().to(torch.int32),
    )
    o = o.view(N, splits, groups, HK, D).transpose(2, 3)  # [N, S, HK, G, D]
    lse = lse.T.view(N, splits, groups, HK).transpose(2, 3)
    none = (used == 0)[:, :, None, None]
    lse = lse.masked_fill(none, -torch.inf)
    # A row without a key has no greatest one.
    weight = (lse - lse.amax(1, keepdim=True).clamp_min(torch.finfo(lse.dtype).min)).exp()
    weight = weight / weight.sum(1, keepdim=True).clamp_min(1e-30)
    o = o.masked_fill(none.unsqueeze(-1), 0) * weight.unsqueeze(-1)
    return o.sum(1).view(N, 1, HK * groups, D).to(k.dtype)
