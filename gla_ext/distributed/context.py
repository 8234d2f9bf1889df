"""CPContext: how a batch's tokens are split across a process group (context parallelism)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from gla_ext.distributed._cuts import Cut, cut_text
from gla_ext.distributed._door import compare
from gla_ext.distributed.attention import chunk_gla_with_context
from gla_ext.distributed.convolution import convolve_with_context
from gla_ext.distributed.loss import mean_over_ranks, next_labels
from gla_ext.ops._context import LocalContext
from gla_ext.ops.inputs import check_offsets


class CPContext(LocalContext):
    """Tokens that are split across the ranks of a process group; made by `build_cp_context`.

    group: the process group; rank and size are this process's in it.
    lengths: number of tokens of every rank, or None if all have the same number.
    cuts_rows_evenly: whether each row of the batch is one sequence, of which all ranks have equal
    parts.
    conv1d_kernel_size: accepted as in FLA and ignored, since a convolution knows its kernel size.
    """

    layout: ClassVar[str] = "contiguous"
    shards: ClassVar[dict[str, int]] = {**LocalContext.shards, "tokens": 1}
    chunk_gla = chunk_gla_with_context
    convolve = convolve_with_context
    mean = mean_over_ranks
    compare = compare

    def __init__(
        self,
        group: dist.ProcessGroup,
        offsets: tuple[int, ...] | None,
        lengths: tuple[int, ...] | None,
        conv1d_kernel_size: int | None = None,
    ) -> None:
        self.group, self.group_name = group, group.group_name
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.offsets, self.lengths = offsets, lengths
        self.cuts_rows_evenly = offsets is None and lengths is None
        self.conv1d_kernel_size = conv1d_kernel_size
        self._cuts: dict[tuple[int, torch.device], Cut] = {}
        self._compared: set[tuple] = set()

    def cut(self, T: int, device: torch.device) -> Cut:
        """This rank's part, for tensors with T tokens on a device.

        Raises:
            ValueError: if T differs from `lengths`, or offsets are beyond the last token.
        """
        key = (int(T), device)
        if key not in self._cuts:
            self._cuts[key] = self._make_cut(int(T), device)
        return self._cuts[key]

    def cut_of_states(self, T: int, device: torch.device) -> Cut:
        """`cut`, for calls that only use states and not tokens. For rows that are cut evenly it
        does not depend on T, which may then be symbolic.
        """
        return self.cut(1 if self.cuts_rows_evenly and T >= 1 else T, device)

    def next_labels(self, labels: Tensor, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """As in one process, but with the offsets of this context."""
        return next_labels(labels, self).to(x.device)

    def check_shards(self, op: str, mesh: Any, roles: Sequence[str | None]) -> None:
        """Raises NotImplementedError if tokens are not sharded as this context's parts."""
        found = [mesh.get_group(i) for i, role in enumerate(roles) if role == "tokens"]
        ranks = [dist.get_process_group_ranks(group) for group in (*found, self.group)]
        if len(ranks) != 2 or ranks[0] != ranks[1]:
            raise NotImplementedError(
                f"{op}: expected q to be sharded over tokens, Shard(1), on the dimension of the "
                "mesh that is cp_context's group, and on no other; redistribute it"
            )
        if not self.cuts_rows_evenly:
            raise NotImplementedError(
                f"{op}: expected a cp_context of equal parts and without cu_seqlens beside "
                "DTensors; call it on to_local() tensors"
            )

    def _make_cut(self, T: int, device: torch.device) -> Cut:
        lengths = (T,) * self.size if self.lengths is None else self.lengths
        if lengths[self.rank] != T:
            raise ValueError(
                f"cp_context: expected {lengths[self.rank]} tokens on rank {self.rank}, as lengths "
                f"says, got {T}"
            )
        total = sum(lengths)
        if self.offsets is None:
            return cut_text((0, total), lengths, self.rank, None)
        if self.offsets[-1] > total:
            raise ValueError(
                f"cp_context: expected cu_seqlens to end at most at the {total} tokens of all "
                f"ranks, got {self.offsets[-1]}"
            )
        return cut_text(self.offsets, lengths, self.rank, device)


def check_layout(op: str, layout: str) -> None:
    """Raises ValueError for a layout of FLA other than 'contiguous'."""
    if layout != "contiguous":
        why = ", which balances attention; here equal parts cost the same" * (layout == "zigzag")
        raise ValueError(f"{op}: expected layout to be 'contiguous', got {layout!r}{why}")


def build_cp_context(
    cu_seqlens: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    conv1d_kernel_size: int | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    use_tf32x3_affine_chain: bool = True,
    layout: str = "contiguous",
    *,
    lengths: Sequence[int] | None = None,
) -> CPContext:
    """Makes the `cp_context=` that tells how tokens are split across the ranks of a process group.

    The arguments are those of `fla.ops.cp.build_cp_context` and must be the same on every rank.
    Build a context for each batch of offsets; without offsets, build one once.

    Args:
        cu_seqlens: int32 or int64 `[N + 1]`, offsets of the packed sequences in the unsplit tokens.
            There may be tokens after the last offset; they give zeros. Read once, here.
            Default: None (each row of the batch is one sequence, split by tokens).
        group: the process group. Default: all processes.
        conv1d_kernel_size: accepted and ignored. Default: None.
        cu_seqlens_cpu: the same offsets on the CPU, which are read instead. Default: None.
        use_tf32x3_affine_chain: True only; accepted because FLA has it: states are folded in fp32.
        layout: 'contiguous' only: rank r of W holds part r of W. FLA's 'zigzag' balances attention;
            here equal parts cost the same. Default: 'contiguous'.
        lengths: number of tokens of each rank, W integers of 0 or more. Default: None (every rank
            has the same number, that of its tensors).

    Raises:
        ValueError: offsets that do not begin with 0 or that decrease, another layout, lengths that
            are not one for each rank, no process group.
        TypeError: offsets that are not a tensor.
        NotImplementedError: use_tf32x3_affine_chain=False.
    """
    if not use_tf32x3_affine_chain:
        raise NotImplementedError(
            "build_cp_context: expected use_tf32x3_affine_chain=True, got False"
        )
    check_layout("build_cp_context", layout)
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "build_cp_context: expected a process group, got None, and torch.distributed has "
                "no default group; call torch.distributed.init_process_group first"
            )
        group = dist.group.WORLD
    size = dist.get_world_size(group)
    if lengths is not None:
        lengths = tuple(int(n) for n in lengths)
        if len(lengths) != size or min(lengths) < 0:
            raise ValueError(
                f"build_cp_context: expected lengths to be {size} integers of 0 or more, one for "
                f"each rank, got {list(lengths)}"
            )
    given = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    return CPContext(group, _read_offsets(given), lengths, conv1d_kernel_size)


def _read_offsets(cu_seqlens: Tensor | None) -> tuple[int, ...] | None:
    if cu_seqlens is None:
        return None
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(
            f"build_cp_context: expected cu_seqlens to be a tensor, got {type(cu_seqlens)}"
        )
    if cu_seqlens.ndim != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            "build_cp_context: expected cu_seqlens to have shape [N + 1], int32 or int64, got "
            f"{list(cu_seqlens.shape)} in {cu_seqlens.dtype}"
        )
    offsets = cu_seqlens.tolist()
    check_offsets("build_cp_context", offsets, offsets[-1] if offsets else 0)
    return tuple(offsets)
