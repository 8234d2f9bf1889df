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
# and its last sequence; in the zigzag layout of both parts, and the sequences of the first.
_CONTIGUOUS = (
    ((0, 5, 32), 0, 2, 0),
    ((0, 32), 1, 1, 27),
    ((0, 11, 12, 32), 2, 1, 59),
    ((0, 32), 1, 0, 20),
)
_ZIGZAG = (
    ((0, 5, 16, 32), (0, 3), (4, 0), (0, 36), 2),
    ((0, 16, 32), (1, 2), (3, 1), (11, 20), 1),
    ((0, 16, 32), (2, 1), (2, 2), (27, 4), 1),
    ((0, 16, 27, 28, 32), (3, 4), (1, 3), (43, 59), 1),
)


def context_of(rank: int, layout: str, group: Any = None) -> FLACPContext:
    """What `fla.ops.cp.build_cp_context` makes of OFFSETS on one of four ranks."""
    if layout == "contiguous":
        offsets, before, after, tokens = _CONTIGUOUS[rank]
        fields = {"pre_num_ranks": before, "post_num_ranks": after, "pre_num_conv_tokens": tokens}
        fields |= {"is_first_rank": before == 0, "is_last_rank": after == 0}
    else:
        offsets, before, after, tokens, first = _ZIGZAG[rank]
        fields = {"pre_num_ranks_by_part": before, "post_num_ranks_by_part": after}
        fields |= {"pre_num_conv_tokens_by_part": tokens, "front_num_seqs": first, "part_len": 16}
        fields |= {"is_first_by_part": tuple(n == 0 for n in before)}
        fields |= {"is_last_by_part": tuple(n == 0 for n in after)}
    cu_seqlens = torch.tensor(offsets)
    return FLACPContext(group, cu_seqlens, cu_seqlens.clone(), layout=layout, **fields)
