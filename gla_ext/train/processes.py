"""A training run on several processes that torchrun starts: FSDP2, tensor and context parallelism.

Every rank runs the same steps. Only the first one prints, and writes files that are not sharded.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.optim import Optimizer

from gla_ext.distributed._door import cut_as
from gla_ext.distributed.context import build_cp_context
from gla_ext.distributed.tensor_parallel import tensor_parallel_plan
from gla_ext.model import GLAForCausalLM
from gla_ext.model.checkpoint import read_metadata, write_tensors
from gla_ext.train.parallel import Batches, Parallel, Result, Tags, Tensors
from gla_ext.train.presets import Options, Settings
from gla_ext.train.run_folder import remove_folders


class Processes(Parallel):
    """A run whose model, optimizer and data are divided over the ranks of a mesh.

    Args:
        device: 'cpu', or a CUDA device; each rank then uses its own instead.
    """

    launcher = ("torchrun", "--nproc-per-node", "N")
    autocasts = False  # FSDP2's policy sets the dtype

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = torch.device(device)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(self.device)

    def __str__(self) -> str:
        dp, cp, tp = self.mesh.shape
        return f"{self.size}, {dp} x FSDP2, {cp} x context, {tp} x tensor"

    @property
    def size(self) -> int:
        return dist.get_world_size()

    @property
    def is_first(self) -> bool:
        return dist.get_rank() == 0

    @property
    def replicas(self) -> int:
        return self.mesh["dp"].size()

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        dist.init_process_group("cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo")
        try:
            with quiet_but_first():
                yield
        finally:
            dist.destroy_process_group()

    def lay_out(self, settings: Settings, options: Options) -> None:
        """Chooses the mesh, and the device of the options.

        Args:
            settings: settings of the run; batch_size counts the windows of all ranks.
            options: cuda_graph, tensor_parallel, context_parallel.

        Raises:
            ValueError: sizes that do not divide the number of processes, the batch or the window.
            NotImplementedError: segments above 1; packed with context_parallel; cuda_graph.
        """
        if settings.segments > 1:
            raise NotImplementedError(
                f"expected --segments 1 on several processes, got --segments {settings.segments}"
            )
        if settings.packed and options.context_parallel > 1:
            raise NotImplementedError("expected --no-packed with --context-parallel, got --packed")
        if options.cuda_graph:
            raise NotImplementedError(
                "expected --no-cuda-graph on several processes, got --cuda-graph"
            )
        self.mesh = mesh_of(options, self.device.type)
        dp, cp, _ = self.mesh.shape
        _check_divides("--batch-size", settings.batch_size, dp, "FSDP2")
        _check_divides("--seq-len", settings.seq_len, cp, "context parallel")
        if cp > 1:
            self.arguments["cp_context"] = build_cp_context(None, self.mesh["cp"].get_group())
        options.device = str(self.device)

    def from_first(self, function: Callable[[], Result]) -> Result:
        result: list[Any] = [None, None]
        if dist.get_rank() == 0:
            try:
                result[0] = function()
            except (OSError, ValueError, ImportError) as error:
                result[1] = error
        dist.broadcast_object_list(result, src=0)
        if result[1] is not None:
            raise result[1]
        return result[0]

    def largest(self, number: int) -> int:
        of_all = torch.tensor(number)
        dist.all_reduce(of_all, dist.ReduceOp.MAX)
        return int(of_all)

    def mean(self, x: Tensor) -> Tensor:
        """The mean in float64, so that the mean of equal float32 values is exactly that value."""
        total = x.to(torch.float64, copy=True)
        dist.all_reduce(total)
        return total / self.size

    def whole(self, x: Tensor) -> Tensor:
        return x.full_tensor()

    def tidy(self, checkpoint: Path, resumes: bool) -> None:
        named = read_metadata(checkpoint).get("sharded") if resumes else None
        remove_folders(checkpoint.parent, but=named)

    def own_part(self, batches: Batches) -> Batches:
        """This rank's rows and tokens of a step's windows."""
        dp, cp = self.mesh["dp"], self.mesh["cp"]
        count = batches.batch_size // dp.size()
        rows = slice(dp.get_local_rank() * count, (dp.get_local_rank() + 1) * count)

        def own(step: int) -> tuple[Tensor, Tensor]:
            return tuple(x.chunk(cp.size(), 1)[cp.get_local_rank()] for x in batches(step, rows))

        return own

    def prepare(
        self, model: nn.Module, loss: Callable[..., Tensor], dtype: torch.dtype, compiled: bool
    ) -> Callable[..., Tensor]:
        """With `compiled`, every block is its own graph in a step; evaluations are eager."""
        if self.mesh["tp"].size() > 1:
            parallelize_module(model, self.mesh["tp"], tensor_parallel_plan(model))
        dtype = None if dtype == torch.float32 else dtype
        options = {
            "mesh": self.mesh["dp", "cp"]._flatten("dp_cp"),
            "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
            "reshard_after_forward": False,
        }
        for block in model.model.layers:
            if compiled:
                block.compile(fullgraph=True, dynamic=False)
            fully_shard(block, **options)
        fully_shard(model, **options)
        return loss

    @contextlib.contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        """Runs without compilation: with a cache, each block would compile another graph."""
        with torch.compiler.set_stance("force_eager"):
            yield
        for module in model.modules():  # there is no backward, which would do this
            if isinstance(module, FSDPModule):
                module.reshard()

    def gather(self, model: nn.Module) -> nn.Module:
        tensors = {name: p.detach().full_tensor() for name, p in model.named_parameters()}
        if dist.get_rank() != 0:
            return model
        whole = GLAForCausalLM(model.config).to(self.device)
        whole.load_state_dict(tensors, strict=not model.config.tie_word_embeddings)
        return whole

    def snapshot(
        self, model: nn.Module, optimizer: Optimizer, tensors: Tensors, metadata: Tags
    ) -> Callable[[Path], None]:
        """No copy: what it returns is to be called on all ranks before the next update."""
        shards = sharded_tensors(model, optimizer)
        return partial(self._write, shards=shards, tensors=tensors, metadata=metadata)

    def _write(self, path: Path, shards: Tensors, tensors: Tensors, metadata: Tags) -> None:
        """Writes torch's distributed checkpoint into a folder next to `path`. Then writes `path`,
        which names the folder: at any moment `path` is the old checkpoint or the new one.
        """
        step = metadata["step"]
        folder = path.parent / f"checkpoint-{step}.dcp"
        first = dist.get_rank() == 0
        named = read_metadata(path).get("sharded") if first and path.exists() else None
        if first and named == folder.name:  # same step, but other settings
            folder = path.parent / f"checkpoint-{step}b.dcp"
        folder = Path(self.from_first(lambda: str(folder)))
        if first and folder.exists():
            shutil.rmtree(folder)
        dist.barrier()
        dcp.save(shards, checkpoint_id=folder)
        if first:
            write_tensors(path, tensors, metadata | {"sharded": folder.name})
            remove_folders(path.parent, but=folder.name)
        dist.barrier()

    def restore(
        self, model: nn.Module, optimizer: Optimizer, tensors: Tensors, folder: Path | None
    ) -> None:
        own = sharded_tensors(model, optimizer)
        if folder is not None:
            dcp.load(own, checkpoint_id=folder)
        for name, x in own.items():
            if folder is None and name in tensors:  # written by a run of one process
                x.copy_(cut_as(x, tensors[name].to(self.device)))
            if name.startswith("optimizer."):
                parameter, key = name.removeprefix("optimizer.").rsplit(".", 1)
                optimizer.state[model.get_parameter(parameter)][key] = x


@contextlib.contextmanager
def quiet_but_first() -> Iterator[None]:
    """Discards standard output and error on all ranks except the first."""
    if dist.get_rank() == 0:
        yield
        return
    with contextlib.ExitStack() as stack:
        nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        stack.enter_context(contextlib.redirect_stdout(nowhere))
        stack.enter_context(contextlib.redirect_stderr(nowhere))
        yield


def sharded_tensors(model: nn.Module, optimizer: Optimizer) -> Tensors:
    """The shards of model and optimizer, under the names of a one-process checkpoint."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        state = optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = torch.zeros_like(parameter.detach())
        tensors |= {f"optimizer.{name}.{key}": value for key, value in state.items()}
    return tensors


def mesh_of(options: Options, device: str) -> dist.DeviceMesh:
    """The processes as `[data, context, tensor]`."""
    size, tp, cp = dist.get_world_size(), options.tensor_parallel, options.context_parallel
    if size % (tp * cp):
        raise ValueError(
            f"expected --tensor-parallel times --context-parallel, {tp} * {cp}, to divide the "
            f"number of processes, got {size}"
        )
    return dist.init_device_mesh(
        device, (size // (tp * cp), cp, tp), mesh_dim_names=("dp", "cp", "tp")
    )


def _check_divides(flag: str, value: int, size: int, what: str) -> None:
    if value % size:
        raise ValueError(
            f"expected {flag} to be a multiple of {size}, the ranks of {what}, got {value}"
        )
