"""From a mask of padding to sequences packed in one row."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gla_ext.ops._door import can_be_read


def valid_tokens(attention_mask: Tensor, B: int, T: int) -> Tensor:
    """The mask's last T columns as bool `[B, T]`.

    Raises:
        TypeError: for a mask that is no tensor.
        ValueError: for another shape; on CPU, where it costs no wait, for values but 0 and 1.
    """
    if not isinstance(attention_mask, Tensor):
        raise TypeError(
            "GatedLinearAttention: expected attention_mask to be a tensor, got "
            f"{type(attention_mask)}"
        )
    if attention_mask.ndim != 2 or attention_mask.shape[0] != B or attention_mask.shape[1] < T:
        raise ValueError(
            f"GatedLinearAttention: expected attention_mask to have shape [B, at least T] = "
            f"[{B}, {T}], got {list(attention_mask.shape)}"
        )
    mask = attention_mask[:, attention_mask.shape[1] - T :]
    if mask.dtype == torch.bool:
        return mask
    valid = mask != 0
    if mask.device.type == "cpu" and can_be_read(mask) and not torch.equal(mask, valid.to(mask)):
        odd = mask[(mask != valid)][0].item()
        raise ValueError(
            "GatedLinearAttention: expected attention_mask to hold 1 for tokens and 0 for padding, "
            f"got {odd}; of an additive mask pass mask == 0"
        )
    return valid


def packed_slots(valid: Tensor) -> tuple[Tensor, Tensor]:
    """Where each token stands in one packed row: valid tokens first, in order, then padding.

    All shapes follow from `[B, T]` alone: nothing is read back from the device, and the whole
    compiles into one graph.

    Args:
        valid: bool `[B, T]`.

    Returns:
        slots: int64 `[B * T]`, a permutation.
        cu_seqlens: int64 `[B + 1]`, the offsets of the B sequences in the packed row.
    """
    v = valid.flatten().to(torch.int64)
    rank, padding_rank = v.cumsum(0), (1 - v).cumsum(0)
    cu_seqlens = F.pad(valid.sum(1, dtype=torch.int64).cumsum(0), (1, 0))
    # By products: on AVX2 inductor of torch 2.11 makes wrong code of a torch.where of these.
    return v * rank + (1 - v) * (cu_seqlens[-1] + padding_rank) - 1, cu_seqlens


def pack(x: Tensor, slots: Tensor) -> Tensor:
    """Moves tokens `[B, T, D]` to their slots in one row `[1, B * T, D]`."""
    x = x.flatten(0, 1)
    return torch.zeros_like(x).index_copy(0, slots, x).unsqueeze(0)


def unpack(row: Tensor, slots: Tensor, B: int, T: int) -> Tensor:
    """The way back, from `[1, B * T, D]` to `[B, T, D]`."""
    return row[0].index_select(0, slots).unflatten(0, (B, T))


class Padding(NamedTuple):
    """A batch's padding, and its valid tokens packed in one row, sequences at cu_seqlens."""

    valid: Tensor
    slots: Tensor
    cu_seqlens: Tensor

    @classmethod
    def of(cls, attention_mask: Tensor, B: int, T: int) -> "Padding":
        valid = valid_tokens(attention_mask, B, T)
        return cls(valid, *packed_slots(valid))

    def pack(self, x: Tensor) -> Tensor:
        """`[B, T, D]` to `[1, B * T, D]`."""
        # Masked first, so that a NaN in a padded token reaches no weight's gradient.
        return pack(x.masked_fill(~self.valid.unsqueeze(-1), 0), self.slots)

    def unpack(self, row: Tensor) -> Tensor:
        """The way back; padding is 0."""
        x = unpack(row, self.slots, *self.valid.shape)
        return x.masked_fill(~self.valid.unsqueeze(-1), 0)


def check_hidden_states(layer: str, x: Tensor, hidden_size: int) -> None:
    """Refuses what is no batch of sequences."""
    if x.is_nested:
        raise NotImplementedError(
            f"{layer}: nested tensors are not supported, pack the sequences in one row and pass "
            "cu_seqlens"
        )
    if x.ndim != 3 or x.shape[-1] != hidden_size:
        raise ValueError(
            f"{layer}: expected hidden_states to have shape [B, T, hidden_size = {hidden_size}], "
            f"got {list(x.shape)}"
        )
