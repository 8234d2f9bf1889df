"""Causal softmax attention by torch's kernels: rows of one length, packed sequences, one token.

q is `[.., H, D]`, k and v are `[.., HK, D]`. Head h of q reads head `h // (H // HK)` of k and v.
The last query of a sequence is at the position of its last key. With a window W, a query sees W
keys, the last of which is at its own position. Scores are scaled by `D ** -0.5`.

On a GPU, bf16 and fp16 inputs with a window or with offsets use torch's flash kernels for sequences
of several lengths, which support both. FlexAttention would have to be compiled for this.
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

_QUERIES = 512  # queries that share a mask, where keys outside a window are left out
_MASKED_QUERIES = 1024  # queries of a packed row whose mask is in memory at once
_MOST_CHANNELS = 256  # largest head dimension of torch's flash kernels
_KEYS_A_SPLIT = 1024  # keys that one block of a GPU reads, if a row has one query
_flash_forward = torch.ops.aten._flash_attention_forward.default
_TAKES_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters


def has_flash(q: Tensor) -> bool:
    """Whether torch's flash kernels for sequences of several lengths support q's device and
    dtype.
    """
    return (
        q.is_cuda
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[-1] <= _MOST_CHANNELS
        and q.shape[-1] % 8 == 0
    )


def attend_rows(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """Attention of rows of T tokens without earlier tokens. q and the result are `[B, T, H, D]`, k
    and v `[B, T, HK, D]`. A query sees `window` keys; with None, all up to its own position.
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
    """Attention of N sequences in one row; the queries of each belong to its last tokens.

    Args:
        q: `[TQ, H, D]`.
        k, v: `[TK, HK, D]`.
        cu_q, cu_k: int32 or int64 `[N + 1]`, offsets of the sequences' queries and keys. Queries
            and keys after the last offset belong to no sequence.
        longest, longest_k: upper bounds of the number of queries and keys of one sequence. The
            closer they are, the fewer blocks of a GPU run without work. Default: None (TQ, TK).
        window: as in `attend_rows`.

    Returns:
        `[TQ, H, D]`, 0 for queries that belong to no sequence.

    Raises:
        ValueError: on a CPU, for offsets that decrease or are outside 0 to TQ.
    """
    offsets = read(cu_q)
    if offsets is not None:
        _check_offsets(offsets, q.shape[0])
        return _one_by_one(q, k, v, offsets, cu_k.tolist(), window)
    mine, of_keys = _of_a_sequence(q, cu_q), _of_a_sequence(k, cu_k)
    # Kernels do not write the outputs and gradients of queries and keys that belong to no sequence.
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
    """Attention of one query per row to all of the row's keys; q and the result are `[N, 1, H, D]`.

    Args:
        k, v: `[N, L, HK, D]`, possibly the first L of longer rows.
        lengths: int64 `[N]`, number of keys of each row, counted from the first; None: L. The
            result of a row without keys is finite but has no meaning.
    """
    no_gradient = not (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)))
    if has_flash(q) and no_gradient:
        parts = pieces(k.shape[1], _KEYS_A_SPLIT)
        # When compiled, not even the number of keys is read: the graph would be specialized to it.
        if parts is not None and k.shape[1] % _KEYS_A_SPLIT == 0:
            if lengths is None:
                lengths = torch.full((k.shape[0],), k.shape[1], device=q.device)
            return _split(q, k, v, lengths)
    if lengths is None:
        return _sdpa(q, k, v)
    keys = torch.arange(k.shape[1], device=q.device)
    # The first key is always seen: the softmax of an empty row would be NaN.
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
    """Which keys the queries see, bool `[queries, keys]`; query 0 is at the position of key
    `before`.
    """
    query = torch.arange(queries, device=device).unsqueeze(1) + before
    key = torch.arange(keys, device=device)
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


def _banded(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, pieces_of_q: list[slice]
) -> Tensor:
    """Rows `[B, T, H, D]`, whose queries belong to the last keys, in parts of some queries each."""
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
    """Which tokens belong to a sequence, bool `[T, 1, 1]`."""
    tokens = torch.arange(x.shape[0], device=x.device).view(-1, 1, 1)
    return (tokens >= offsets[0]) & (tokens < offsets[-1])


def _masked(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, window: int | None
) -> Tensor:
    """`attend_packed` with a mask of all queries and keys."""
    of_q, of_k = sequence_of(cu_q, q.shape[0]), sequence_of(cu_k, k.shape[0])
    key = torch.arange(k.shape[0], device=k.device)
    # The key at a query's position: as far from the sequence's last key as the query from its last.
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
    """`attend_last` by flash kernels, with `_KEYS_A_SPLIT` keys per block, because single queries
    have too few rows and heads to fill a GPU. Blocks past a row's keys do nothing, so the time
    depends on the lengths.
    """
    N, L, HK, D = k.shape
    splits, groups = L // _KEYS_A_SPLIT, q.shape[2] // HK
    start = torch.arange(splits, device=q.device) * _KEYS_A_SPLIT
    used = (lengths.unsqueeze(1) - start).clamp(0, _KEYS_A_SPLIT)  # [N, S]
    # Rows of the buffer may be longer than L, so the offset of a split counts tokens of the buffer.
    row = k.stride(0) // k.stride(1)
    rows = torch.arange(N, device=q.device).unsqueeze(1) * row
    offsets = F.pad((rows + start).flatten(), (0, 1), value=N * row)
    size, stride = (N * row, HK, D), k.stride()[1:]
    # The query heads that share keys become the queries of a sequence: a block reads the keys once.
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
    # The maximum of a row without keys is -inf, and -inf - -inf would be NaN.
    weight = (lse - lse.amax(1, keepdim=True).clamp_min(torch.finfo(lse.dtype).min)).exp()
    weight = weight / weight.sum(1, keepdim=True).clamp_min(1e-30)
    o = o.masked_fill(none.unsqueeze(-1), 0) * weight.unsqueeze(-1)
    return o.sum(1).view(N, 1, HK * groups, D).to(k.dtype)
