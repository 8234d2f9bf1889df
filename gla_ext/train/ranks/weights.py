"""The weights of a run on several processes: whole on each, or cut over them."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gla_ext.distributed._door import cut_as
from gla_ext.distributed.shards import shard_model
from gla_ext.model import GLAForCausalLM
from gla_ext.model.checkpoint import read_metadata, write_tensors
from gla_ext.train.parallel import Tags, Tensors, Whole
from gla_ext.train.run_folder import remove_folders

BUCKET_MB = 25  # of gradients that are sent at once


def replicated(model: nn.Module, bucket_mb: int = BUCKET_MB) -> DistributedDataParallel:
    """A model whose gradients are averaged over all ranks."""
    options = {"broadcast_buffers": False, "gradient_as_bucket_view": True}
    return DistributedDataParallel(model, bucket_cap_mb=bucket_mb, **options)


class Replicas(Whole):
    """Every rank has all weights; gradients are averaged in backward, by DDP."""

    one_graph = False

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.module = replicated(model)

    def part(self, last: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if last else self.module.no_sync()

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        return torch.compiler.set_stance("force_eager")

    def snapshot(
        self, optimizer: Optimizer, tensors: Tensors, metadata: Tags
    ) -> Callable[[Path], None]:
        if dist.get_rank() != 0:
            return lambda path: None
        return super().snapshot(optimizer, tensors, metadata)


class Sharded(Whole):
    """Every rank has a part of all weights: see `gla_ext.distributed.shard_model`.

    Args:
        model: the model, whole or cut by tensor parallelism.
        mesh: as of `shard_model`.
        dtype: of the products.
    """

    autocasts = False  # the shards' policy sets the dtype
    one_graph = False

    def __init__(self, model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype) -> None:
        param_dtype = None if dtype == torch.float32 else dtype
        self.shards = shard_model(model, mesh, param_dtype=param_dtype)
        self.model = self.module = model
        self.parameters = self.shards.parameters
        # Of its own, since checkpoints are written while other collectives run.
        self._writers = dist.new_group(backend="gloo")

    def part(self, last: bool) -> contextlib.AbstractContextManager[None]:
        return self.shards.part(last)

    def clip(self, max_norm: float) -> Tensor:
        return self.shards.clip_gradients(max_norm)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Runs without compilation: with a cache, each block would compile another graph."""
        with torch.compiler.set_stance("force_eager"):
            yield
        self.shards.drop_gathered()

    def gather(self) -> nn.Module:
        tensors = {name: p.detach().full_tensor() for name, p in self.shards.whole.items()}
        if dist.get_rank() != 0:
            return self.model
        whole = GLAForCausalLM(self.model.config).to(next(iter(tensors.values())).device)
        whole.load_state_dict(tensors, strict=not self.model.config.tie_word_embeddings)
        return whole

    def snapshot(
        self, optimizer: Optimizer, tensors: Tensors, metadata: Tags
    ) -> Callable[[Path], None]:
        stager = DefaultStager(StagingOptions(False, False, False, False))  # copies to the host
        shards = stager.stage(self._tensors(optimizer))
        tensors = {name: x.to("cpu", copy=True) for name, x in tensors.items()}
        return partial(self._write, shards=shards, tensors=tensors, metadata=metadata)

    def _tensors(self, optimizer: Optimizer) -> Tensors:
        """The shards of model and optimizer, under the names of a one-process checkpoint."""
        tensors: Tensors = {}
        for name, p in self.parameters.items():
            tensors[f"model.{name}"] = self.shards.as_dtensor(name, p.detach())
            state = optimizer.state[p]
            if not state:
                state["step"] = torch.zeros((), device=p.device)
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key] = torch.zeros_like(p.detach())
            for key, value in state.items():
                own = self.shards.as_dtensor(name, value) if value.ndim else value
                tensors[f"optimizer.{name}.{key}"] = own
        return tensors

    def _write(self, path: Path, shards: Tensors, tensors: Tensors, metadata: Tags) -> None:
        """Writes torch's distributed checkpoint into a folder next to `path`. Then writes `path`,
        which names the folder: at any moment `path` is the old checkpoint or the new one.
        """
        first, name = dist.get_rank() == 0, [f"checkpoint-{metadata['step']}.dcp"]
        if first:
            named = read_metadata(path).get("sharded") if path.exists() else None
            if named == name[0]:  # same step, but other settings
                name = [f"checkpoint-{metadata['step']}b.dcp"]
            if (path.parent / name[0]).exists():
                shutil.rmtree(path.parent / name[0])
        dist.broadcast_object_list(name, src=0, group=self._writers)
        folder = path.parent / name[0]
        dcp.save(shards, checkpoint_id=folder, process_group=self._writers)
        if first:
            write_tensors(path, tensors, metadata | {"sharded": folder.name})
            remove_folders(path.parent, but=folder.name)

    def restore(self, optimizer: Optimizer, tensors: Tensors, folder: Path | None) -> None:
        own = self._tensors(optimizer)
        if folder is not None:
            dcp.load(own, checkpoint_id=folder)
            return
        for name, x in own.items():
            if name in tensors:  # written by a run whose weights were whole
                x.copy_(cut_as(x, tensors[name].to(x.device)))
