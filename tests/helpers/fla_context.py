"""FLA's context of context parallelism without FLA: what its own function made of one text.

tests/fla holds these fields to those of the FLA that is installed.
"""

import dataclasses
from typing import Any

import torch

OFFSETS = (0, 5, 75, 76, 128)
RANKS = 4


@dataclasses.dataclass
class FLACPContext:
    """Of FLA's name and fields, on one rank."""

    group: Any = None
    cu_seqlens: torch.Tensor | None = None
    cu_seqlens_cpu: torch.Tensor | None = None
    is_last_rank: bool | None = None
    pre_num_ranks: int | None = None
    is_first_rank: bool | None = None
    post_num_ranks: int | None = None
    conv1d_kernel_size: int | None = None
    pre_num_conv_tokens: int | None = None
    pre_num_ranks_dev: torch.Tensor | None = None
    post_num_ranks_dev: torch.Tensor | None = None
    layout: str = "contiguous"
    part_len: int | None = None
    front_num_seqs: int | None = None
    pre_num_ranks_by_part: tuple[int, int] | None = None
    post_num_ranks_by_part: tuple[int, int] | None = None
    is_first_by_part: tuple[bool, bool] | None = None
    is_last_by_part: tuple[bool, bool] | None = None
    pre_num_conv_tokens_by_part: tuple[int, int] | None = None


# Of every rank cu_seqlens, and how many ranks before, ranks after and tokens before share its first
# and its last sequence.
_FIELDS = (
    ((0, 5, 32), 0, 2, 0),
    ((0, 32), 1, 1, 27),
    ((0, 11, 12, 32), 2, 1, 59),
    ((0, 32), 1, 0, 20),
)


def context_of(rank: int, group: Any = None) -> FLACPContext:
    """What `fla.ops.cp.build_cp_context` makes of OFFSETS on one of four ranks."""
    offsets, before, after, tokens = _FIELDS[rank]
    fields = {"pre_num_ranks": before, "post_num_ranks": after, "pre_num_conv_tokens": tokens}
    fields |= {"is_first_rank": before == 0, "is_last_rank": after == 0}
    cu_seqlens = torch.tensor(offsets)
    return FLACPContext(group, cu_seqlens, cu_seqlens.clone(), **fields)
