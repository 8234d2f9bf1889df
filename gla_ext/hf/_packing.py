"""From what transformers says of packed sequences to offsets in one row."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gla_ext.layers._history import packed_slots, valid_tokens
from gla_ext.ops._door import in_graphs

# Whether a tensor, whose length is data, is known to have none.
_is_known_empty = in_graphs(lambda x: False, lambda x: len(x) == 0)


def starts_again(
    position_ids: Tensor | None,
    seq_idx: Tensor | None,
    attention_mask: Tensor | None,
    B: int,
    T: int,
) -> Tensor | None:
    """Which tokens start a further sequence of their row; nothing is read back from the device.

    A position that is not above that of the token before starts one, and so does another seq_idx.
    Padded tokens start none, and are not what their successors are compared with.

    Args:
        position_ids: `[B, T]` or `[1, T]`. Default of the models: None.
        seq_idx: likewise; beats position_ids.
        attention_mask: `[B, >= T]` of 0 (padding) and 1, or None.
        B, T: number of rows, and of the tokens of each.

    Returns:
        bool `[B, T]`, or None where neither is given or a row is one token.

    Raises:
        TypeError: position_ids or seq_idx that is no tensor.
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
    if T == 1:  # a decoded token too, at every step
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
    """How the sequences lie in one packed row, padding last.

    The number of sequences is data: it is read back from the device, once a call.

    Args:
        again: what `starts_again` returned, bool `[B, T]`.
        attention_mask: `[B, >= T]` of 0 (padding) and 1, or None.

    Returns:
        slots: int64 `[B * T]`, where each token goes; None where all stay.
        cu_seqlens: int64 `[N + 1]`, N = B + the number of tokens that start again, in order; rows
            without a token count as empty sequences. None where no token starts again, unless
            compiled, which cannot ask.
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
