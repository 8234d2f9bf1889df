"""Conversion of transformers' descriptions of packed sequences to offsets in one row."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gla_ext.layers._history import packed_slots, valid_tokens
from gla_ext.ops._door import in_graphs

# Whether a tensor is known to be empty; in a graph its length is data and never known.
_is_known_empty = in_graphs(lambda x: False, lambda x: len(x) == 0)


def starts_again(
    position_ids: Tensor | None,
    seq_idx: Tensor | None,
    attention_mask: Tensor | None,
    B: int,
    T: int,
) -> Tensor | None:
    """Which tokens start another sequence in their row; nothing is read back from the device.

    A token starts one if its position is not above that of the token before, or if its seq_idx
    differs. Padded tokens start none, and later tokens are not compared with them.

    Args:
        position_ids: `[B, T]` or `[1, T]`. Default of the models: None.
        seq_idx: of the same shapes; takes precedence over position_ids.
        attention_mask: `[B, >= T]` of 0 (padding) and 1, or None.
        B, T: number of rows, and of tokens per row.

    Returns:
        bool `[B, T]`, or None if neither is given or a row is one token.

    Raises:
        TypeError: position_ids or seq_idx that is not a tensor.
        ValueError: another shape.
    """
    name, key = ("position_ids", position_ids) if seq_idx is None else ("seq_idx", seq_idx)
    if key is None:
        return None
    if not isinstance(key, Tensor):
        raise TypeError(f"GLAModel: expected {name} to be a tensor, got {type(key)}")
    if key.ndim != 2 or key.shape[0] not in (1, B) or key.shape[1] != T:
        raise ValueError(
            f"GLAModel: expected {name} to have shape [B, T] = [{B}, {T}], or [1, {T}], got "
            f"{list(key.shape)}"
        )
    if T == 1:  # every token step too
        return None
    key = key.expand(B, T)
    if attention_mask is None:
        again = _begins(name, key[:, 1:], key[:, :-1])
        return F.pad(again, (1, 0))
    valid = valid_tokens(attention_mask, B, T).to(key.device)
    tokens = torch.arange(T, device=key.device)
    last = torch.where(valid, tokens, -1).cummax(1).values
    before = F.pad(last[:, :-1], (1, 0), value=-1)
    again = _begins(name, key, key.gather(1, before.clamp_min(0)))
    return valid & (before >= 0) & again


def _begins(name: str, now: Tensor, before: Tensor) -> Tensor:
    return now != before if name == "seq_idx" else now <= before


def one_row(again: Tensor, attention_mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The places and offsets of the sequences in one packed row, padding last.

    The number of sequences depends on the data: it is read back from the device once per call.

    Args:
        again: result of `starts_again`, bool `[B, T]`.
        attention_mask: `[B, >= T]` of 0 (padding) and 1, or None.

    Returns:
        slots: int64 `[B * T]`, the place of each token; None if all tokens stay.
        cu_seqlens: int64 `[N + 1]`, N = B + the number of tokens that start another sequence, in
            order; rows without a token count as empty sequences. None if no token starts another
            sequence; a compiled graph cannot check this and always returns offsets.
    """
    B, T = again.shape
    if attention_mask is None:
        slots = torch.arange(B * T, device=again.device)
        rows = torch.arange(0, B * T + 1, T, device=again.device)
    else:
        slots, rows = packed_slots(valid_tokens(attention_mask, B, T).to(again.device))
    starts = slots[again.flatten()]
    if _is_known_empty(starts):
        return None, None
    cu_seqlens = torch.cat([rows, starts]).sort().values
    return None if B == 1 and attention_mask is None else slots, cu_seqlens
