"""Where gla_ext can run."""

from __future__ import annotations

import torch


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


def _has_cuda_operators() -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key("gla_ext::chunk_gla_fwd", "CUDA")
