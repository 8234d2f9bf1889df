"""Torch's distributed checkpoints of a training run, in folders beside its checkpoint file."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import Tensor


def folders(out: Path) -> list[Path]:
    """The folders of distributed checkpoints in a run's folder, whole or not."""
    return sorted(out.glob("checkpoint-*.dcp"))


def remove_folders(out: Path, but: str | None) -> None:
    """Removes them, but for the one that the checkpoint file names: what a kill left, and older."""
    for folder in folders(out):
        if folder.name != but:
            shutil.rmtree(folder)


def read_whole(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a distributed checkpoint, whole, on the CPU, in one process.

    Raises:
        FileNotFoundError: no such checkpoint.
    """
    import torch.distributed.checkpoint as dcp

    if not (folder / ".metadata").exists():
        raise FileNotFoundError(f"expected {folder} to hold a distributed checkpoint")
    reader = dcp.FileSystemReader(folder)
    held = reader.read_metadata().state_dict_metadata
    tensors = {name: torch.empty(x.size, dtype=x.properties.dtype) for name, x in held.items()}
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors
