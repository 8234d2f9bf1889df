"""How a training run is divided over its processes, and how these communicate."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gla_ext.model.checkpoint import load_tensors, model_tensors, write_tensors
from gla_ext.train.flags import flag_of
from gla_ext.train.presets import Options, Settings

Batches = Callable[..., tuple[Tensor, Tensor]]
Tensors = dict[str, Tensor]
Tags = dict[str, Any]  # metadata of a file
Result = TypeVar("Result")


class Parallel:
    """A run in one process, on one device.

    `gla_ext.train.processes.Processes` is the class for several processes. All of them call these
    methods at the same points.

    Attributes:
        size: number of processes. is_first: whether this is the first of them.
        replicas: in how many parts they cut a batch's rows.
        launcher: command that starts them.
        autocasts: whether autocast chooses the dtype of products.
        arguments: keyword arguments of the model's call in a step.
    """

    size = 1
    is_first = True
    replicas = 1
    launcher: tuple[str, ...] = (sys.executable,)
    autocasts = True

    def __init__(self) -> None:
        self.arguments: dict[str, Any] = {}

    def joined(self) -> contextlib.AbstractContextManager[None]:
        """While active, the processes can communicate, and only the first one prints."""
        return contextlib.nullcontext()

    def lay_out(self, settings: Settings, options: Options) -> None:
        """Chooses each process's part of a run; raises ValueError for sizes that do not fit."""
        for name in ("tensor_parallel", "context_parallel"):
            if getattr(options, name) > 1:
                flag = flag_of(name)
                raise ValueError(
                    f"expected {flag} to be 1 in one process, got {getattr(options, name)}; "
                    "torchrun --nproc-per-node N -m gla_ext.train starts more"
                )

    def from_first(self, function: Callable[[], Result]) -> Result:
        """Calls a function on the first process and returns its result, or raises its error, on
        all.
        """
        return function()

    def largest(self, number: int) -> int:
        """The largest of the processes' numbers."""
        return number

    def mean(self, x: Tensor) -> Tensor:
        """The mean of the processes' tensors."""
        return x

    def whole(self, x: Tensor) -> Tensor:
        """A number that the processes have together."""
        return x

    def tidy(self, checkpoint: Path, resumes: bool) -> None:
        """Removes checkpoint folders of earlier runs with several processes, except one to resume
        from.
        """

    def own_part(self, batches: Batches) -> Batches:
        """This process's part of each batch."""
        return batches

    def prepare(
        self, model: nn.Module, loss: Callable[..., Tensor], dtype: torch.dtype, compiled: bool
    ) -> Callable[..., Tensor]:
        """Shards a model's parameters if there are several processes; returns the loss, compiled if
        requested.
        """
        return torch.compile(loss, fullgraph=True, dynamic=False) if compiled else loss

    def evaluating(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """While active, the model is called without gradients, with a cache."""
        return contextlib.nullcontext()

    def gather(self, model: nn.Module) -> nn.Module:
        """The whole model, on the first process."""
        return model

    def snapshot(
        self, model: nn.Module, optimizer: Optimizer, tensors: Tensors, metadata: Tags
    ) -> Callable[[Path], None]:
        """Copies what makes a checkpoint to the host: model, optimizer, random generators and
        tensors; returns a function that writes it, atomically, to a path.
        """
        tensors = {f"model.{name}": x for name, x in model_tensors(model).items()} | tensors
        for name, parameter in model.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{name}.{key}"] = value
        tensors["rng.cpu"] = torch.get_rng_state()
        device = next(model.parameters()).device
        if device.type == "cuda":
            tensors["rng.cuda"] = torch.cuda.get_rng_state(device)
        copies = {name: x.detach().to("cpu", copy=True) for name, x in tensors.items()}
        return partial(write_tensors, tensors=copies, metadata=metadata)

    def restore(
        self, model: nn.Module, optimizer: Optimizer, tensors: Tensors, folder: Path | None
    ) -> None:
        """Puts a checkpoint into model and optimizer.

        Args:
            model, optimizer: the arguments of `snapshot`.
            tensors: the tensors of the file.
            folder: torch's distributed checkpoint next to the file, if several processes wrote it.
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
    """All tensors of a distributed checkpoint, unsharded, on the CPU, in one process.

    Raises:
        FileNotFoundError: if there is no such checkpoint.
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
    """The tensors whose names start with prefix; the prefix is removed from the names."""
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
