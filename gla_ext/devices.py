"""The devices that gla_ext can use, and a fixed order of sums on them."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator

import torch
from torch.utils import deterministic


def default_device() -> str:
    """'cuda' if there is a GPU and gla_ext was built with CUDA operators, else 'cpu'."""
    return "cuda" if _has_cuda_operators() and torch.cuda.is_available() else "cpu"


def check_device(device: str) -> None:
    """Raises ValueError, which names the flag --device, if the operators cannot run on the
    device.
    """
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ValueError(
            f"expected --device to be one of torch's, such as cpu or cuda:0, got {device}"
        ) from error
    if place.type not in ("cpu", "cuda"):
        raise ValueError(
            f"expected --device to be one gla_ext has operators for, cpu or cuda, got {device}"
        )
    if place.type == "cpu":
        return
    if not _has_cuda_operators():
        raise ValueError(
            f"expected --device to be cpu, as this build has no CUDA operators (FORCE_CUDA=1 make "
            f"builds them), got {device}"
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (place.index or 0) >= count:
        raise ValueError(f"expected --device to be cpu or one of {count} GPUs, got {device}")


def usable_device(device: str) -> str:
    """An argparse type for devices; its error tells why a device cannot be used."""
    try:
        check_device(device)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return device


@contextlib.contextmanager
def in_fixed_order(device: torch.device) -> Iterator[None]:
    """While active, torch's GPU operations sum in a fixed order, so that a run can be reproduced
    bit for bit. torch warns of operations for which it has no such order. The setting holds for the
    whole process.

    gla_ext's operators always sum in a fixed order; so do the torch operations that training uses
    on a CPU. On a GPU, torch 2.11 by default sums the gradient of a small embedding table, such as
    one with a row for each of 256 bytes, by atomics.
    """
    if device.type != "cuda":
        yield
        return
    mode, fill = torch.get_deterministic_debug_mode(), deterministic.fill_uninitialized_memory
    # A mode set by the user is at least as strict. Filling new memory with values would take time.
    torch.set_deterministic_debug_mode(mode or "warn")
    deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        deterministic.fill_uninitialized_memory = fill


def _has_cuda_operators() -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key("gla_ext::chunk_gla_fwd", "CUDA")
