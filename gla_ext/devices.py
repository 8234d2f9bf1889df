"""Where gla_ext can run, and how it runs there."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator

import torch
from torch.utils import deterministic


def default_device() -> str:
    """'cuda' where there is a GPU and gla_ext was built with CUDA operators, else 'cpu'."""
    return "cuda" if _has_cuda_operators() and torch.cuda.is_available() else "cpu"


def check_device(device: str) -> None:
    """Raises ValueError, in words of the flag --device, if the operators cannot run there."""
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
            f"expected --device to be cpu, as this build has no CUDA operators, got {device}"
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (place.index or 0) >= count:
        raise ValueError(f"expected --device to be cpu or one of {count} GPUs, got {device}")


def usable_device(device: str) -> str:
    """A device of a command line, which says what is wrong with another: a type for argparse."""
    try:
        check_device(device)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return device


@contextlib.contextmanager
def in_fixed_order(device: torch.device) -> Iterator[None]:
    """Inside, torch's operations on a GPU sum in a fixed order, so that a run can be had again bit
    for bit. torch warns of those that it knows cannot. The order is the whole process's.

    gla_ext's operators always have one, and so have those of torch that training calls on a CPU. On
    a GPU torch 2.11 sums the gradient of few embeddings, as of 256 bytes, by atomics.
    """
    if device.type != "cuda":
        yield
        return
    mode, fill = torch.get_deterministic_debug_mode(), deterministic.fill_uninitialized_memory
    # A mode of the user's is at least as strict. Fresh memory needs no values, which take time.
    torch.set_deterministic_debug_mode(mode or "warn")
    deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        deterministic.fill_uninitialized_memory = fill


def _has_cuda_operators() -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key("gla_ext::chunk_gla_fwd", "CUDA")
