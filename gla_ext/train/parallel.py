"""How a training run lies on its processes, and what these agree on."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gla_ext.model.checkpoint import load_tensors, model_tensors, write_tensors
from gla_ext.train.presets import Options, Settings

Batches = Callable[[int], tuple[Tensor, Tensor]]
Tensors = dict[str, Tensor]
Tags = dict[str, Any]  # what a file has beside its tensors
Result = TypeVar("Result")


class Parallel:
    """One process, which has all of a run on one device.

    `gla_ext.train.processes.Processes` is what several have, which all call these methods at the
    same points.

    Attributes:
        size: how many there are.
        launcher: what starts them on a command line.
        autocasts: whether autocast chooses the dtype of products.
        arguments: of the model's call in a step.
    """

    size = 1
    launcher: tuple[str, ...] = (sys.executable,)
    autocasts = True

    def __init__(self) -> None:
        self.arguments: dict[str, Any] = {}

    def joined(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the processes can talk to each other, and the first alone prints."""
        return contextlib.nullcontext()

    def lay_out(self, settings: Settings, options: Options) -> None:
        """Chooses what each process has of a run; raises ValueError for sizes that do not fit."""
        for name in ("tensor_parallel", "context_parallel"):
            if getattr(options, name) > 1:
                flag = "--" + name.replace("_", "-")
                raise ValueError(
                    f"expected {flag} to be 1 in one process, got {getattr(options, name)}; "
                    "torchrun --nproc-per-node N -m gla_ext.train starts more"
                )

    def from_first(self, function: Callable[[], Result]) -> Result:
        """What a function gives on the first process, or its error, on every one."""
        return function()

    def largest(self, number: int) -> int:
        """The largest of the processes' numbers."""
        return number

    def mean(self, x: Tensor) -> Tensor:
        """The mean of the processes' tensors."""
        return x

    def tidy(self, checkpoint: Path, resumes: bool) -> None:
        """Removes what earlier runs of several processes left, but for what is gone on from."""

    def own_part(self, batches: Batches) -> Batches:
        """This process's part of each batch."""
        return batches

    def prepare(
        self, model: nn.Module, loss: Callable[..., Tensor], dtype: torch.dtype, compiled: bool
    ) -> Callable[..., Tensor]:
        """Shares out a model's parameters; returns the loss, compiled where that is asked for."""
        return torch.compile(loss, fullgraph=True, dynamic=False) if compiled else loss

    def evaluating(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Inside, the model is called without gradients, with a cache."""
        return contextlib.nullcontext()

    def gather(self, model: nn.Module) -> nn.Module:
        """The whole model, on the first process."""
        return model

    def write(
        self, path: Path, model: nn.Module, optimizer: Optimizer, tensors: Tensors, metadata: Tags
    ) -> None:
        """Writes a checkpoint, atomically: model, optimizer, random generators and tensors."""
        tensors = {f"model.{name}": x for name, x in model_tensors(model).items()} | tensors
        for name, parameter in model.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{name}.{key}"] = value
        tensors["rng.cpu"] = torch.get_rng_state()
        device = next(model.parameters()).device
        if device.type == "cuda":
            tensors["rng.cuda"] = torch.cuda.get_rng_state(device)
        write_tensors(path, tensors, metadata)

    def restore(
        self, model: nn.Module, optimizer: Optimizer, tensors: Tensors, folder: Path | None
    ) -> None:
        """Puts a checkpoint into model and optimizer.

        Args:
            model, optimizer: what `write` was given.
            tensors: those of the file.
            folder: of torch's distributed checkpoint beside the file, if several processes wrote.
        """
        if folder is not None:
            tensors = tensors | read_whole(folder)
        load_tensors(model, under("model.", tensors))
        for name, parameter in model.named_parameters():
            if state := under(f"optimizer.{name}.", tensors):
                optimizer.state[parameter] = {
                    key: value.to(parameter.device) for key, value in state.items()
                }


ONE_PROCESS = Parallel()


def read_whole(folder: Path) -> Tensors:
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


def under(prefix: str, tensors: Tensors) -> Tensors:
    """The tensors whose names start with prefix, without it."""
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
