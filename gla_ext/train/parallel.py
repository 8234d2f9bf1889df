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
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from gla_ext.model.checkpoint import load_tensors, model_tensors, write_tensors
from gla_ext.train.flags import flag_of
from gla_ext.train.presets import Options, Settings
from gla_ext.train.run_folder import remove_folders

Batches = Callable[..., tuple[Tensor, Tensor]]
Tensors = dict[str, Tensor]
Tags = dict[str, Any]  # metadata of a file
Result = TypeVar("Result")


class Parallel:
    """A run in one process, on one device.

    `gla_ext.train.ranks.processes.Processes` is the class for several processes. All of them call
    these methods at the same points.

    Attributes:
        size: number of processes. is_first: whether this is the first of them.
        replicas: in how many parts they cut a batch's rows.
        launcher: command that starts them.
        arguments: keyword arguments of the model's call in a step.
    """

    size = 1
    is_first = True
    replicas = 1
    launcher: tuple[str, ...] = (sys.executable,)

    def __init__(self) -> None:
        self.arguments: dict[str, Any] = {}

    def joined(self) -> contextlib.AbstractContextManager[None]:
        """While active, the processes can communicate, and only the first one prints."""
        return contextlib.nullcontext()

    def lay_out(self, settings: Settings, options: Options) -> None:
        """Chooses each process's part of a run; raises ValueError for sizes that do not fit."""
        for name, alone in (("parallel", "auto"), ("tensor_parallel", 1), ("context_parallel", 1)):
            if getattr(options, name) != alone:
                flag = flag_of(name)
                raise ValueError(
                    f"expected {flag} to be {alone} in one process, got {getattr(options, name)}; "
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

    def all_rows(self, x: Tensor) -> Tensor:
        """The processes' rows, together."""
        return x

    def own_rows(self, x: Tensor) -> Tensor:
        """This process's rows."""
        return x

    def tidy(self, checkpoint: Path, resumes: bool) -> None:
        """Removes checkpoint folders of earlier runs with several processes, except one to resume
        from.
        """

    def own_part(self, batches: Batches) -> Batches:
        """This process's part of each batch."""
        return batches

    def prepare(self, model: nn.Module, settings: Settings, compiled: bool) -> Whole:
        """Lays a model's weights out over the processes, and compiles its blocks if there are
        several and it is requested.
        """
        return Whole(model)


class Whole:
    """The weights of a run that this process has whole, alone or as copies.

    Attributes:
        model: the model, with its weights as they lie.
        module: what a step calls.
        parameters: what the optimizer updates, by name.
        autocasts: whether autocast chooses the dtype of products.
        one_graph: whether a compiled step is one graph; else each block is.
    """

    autocasts = one_graph = True

    def __init__(self, model: nn.Module) -> None:
        self.model = self.module = model
        self.parameters = dict(model.named_parameters())

    def part(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """For forward and backward of a part of an update's batch. Before the last part nothing is
        sent.
        """
        return contextlib.nullcontext()

    def clip(self, max_norm: float) -> Tensor:
        """Clips the gradients and gives them to `parameters`; returns their norm before."""
        return clip_grad_norm_(self.parameters.values(), max_norm)

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        """While active, the model is called without gradients, with a cache."""
        return contextlib.nullcontext()

    def gather(self) -> nn.Module:
        """The whole model, on the first process."""
        return self.model

    def snapshot(
        self, optimizer: Optimizer, tensors: Tensors, metadata: Tags
    ) -> Callable[[Path], None]:
        """Copies what makes a checkpoint to the host: model, optimizer, random generators and
        tensors; returns a function that writes it, atomically, to a path, on all processes, while
        training may go on.
        """
        tensors = {f"model.{name}": x for name, x in model_tensors(self.model).items()} | tensors
        for name, parameter in self.parameters.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{name}.{key}"] = value
        tensors["rng.cpu"] = torch.get_rng_state()
        device = next(self.model.parameters()).device
        if device.type == "cuda":
            tensors["rng.cuda"] = torch.cuda.get_rng_state(device)
        copies = {name: x.detach().to("cpu", copy=True) for name, x in tensors.items()}
        return partial(_write, tensors=copies, metadata=metadata)

    def restore(self, optimizer: Optimizer, tensors: Tensors, folder: Path | None) -> None:
        """Puts a checkpoint into model and optimizer.

        Args:
            optimizer: the argument of `snapshot`.
            tensors: the tensors of the file.
            folder: torch's distributed checkpoint next to the file, if the weights were sharded.
        """
        if folder is not None:
            tensors = tensors | read_whole(folder)
        load_tensors(self.model, under("model.", tensors))
        for name, parameter in self.parameters.items():
            if state := under(f"optimizer.{name}.", tensors):
                optimizer.state[parameter] = {
                    key: value.to(parameter.device) for key, value in state.items()
                }


def _write(path: Path, tensors: Tensors, metadata: Tags) -> None:
    write_tensors(path, tensors, metadata)
    remove_folders(path.parent, but=None)


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
