"""A training run on several processes that torchrun starts: replicas or shards, with tensor and
context parallelism.

Every rank runs the same steps. Only the first one prints, and writes files that are not sharded.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module

from gla_ext.distributed.context import build_cp_context
from gla_ext.distributed.tensor_parallel import tensor_parallel_plan
from gla_ext.model.checkpoint import read_metadata
from gla_ext.train.parallel import Batches, Parallel, Result, Whole
from gla_ext.train.presets import DTYPES, Options, Settings
from gla_ext.train.ranks.memory import choose, memory_of
from gla_ext.train.ranks.weights import Replicas, Sharded
from gla_ext.train.run_folder import remove_folders


class Processes(Parallel):
    """A run whose batches, and as `--parallel` says its weights, are divided over ranks.

    Neighbours first make a group of tensor parallel, then of context parallel, then a node.

    Args:
        device: 'cpu', or a CUDA device; each rank then uses its own instead.
    """

    launcher = ("torchrun", "--nproc-per-node", "N")

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = torch.device(device)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            if self.device.index >= (count := torch.cuda.device_count()):
                raise ValueError(
                    f"expected a GPU for each process of a machine, got {count} GPUs and process "
                    f"{self.device.index}, counted from 0"
                )
            torch.cuda.set_device(self.device)

    def __str__(self) -> str:
        how = f"{self.dp} x data, {self.cp} x context, {self.tp} x tensor"
        return f"{self.size} on {self.nodes} nodes, {how}; --parallel {self.kind}{self.reason}"

    @property
    def size(self) -> int:
        return dist.get_world_size()

    @property
    def is_first(self) -> bool:
        return dist.get_rank() == 0

    @property
    def replicas(self) -> int:
        return self.dp

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        dist.init_process_group("cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo")
        try:
            with quiet_but_first():
                yield
        finally:
            dist.destroy_process_group()

    def lay_out(self, settings: Settings, options: Options) -> None:
        """Chooses each rank's part of a batch, and the device of the options.

        Args:
            settings: settings of the run; batch_size counts the windows of all ranks.
            options: parallel, cuda_graph, tensor_parallel, context_parallel.

        Raises:
            ValueError: sizes that do not divide the number of processes, the batch or the window;
                hybrid on one node.
            NotImplementedError: segments or packed with context_parallel; segments or replicas with
                tensor_parallel; cuda_graph.
        """
        self.kind, self.reason = options.parallel, ""
        self.tp, self.cp = options.tensor_parallel, options.context_parallel
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        self.nodes = self.size // self.local_size
        _refuse("--tensor-parallel", self.tp, "--parallel shard", self.kind == "replicate")
        for flag, size in (("--context-parallel", self.cp), ("--tensor-parallel", self.tp)):
            _refuse(flag, size, "--segments 1", settings.segments > 1)
        _refuse("--context-parallel", self.cp, "--no-packed", settings.packed)
        if options.cuda_graph:
            raise NotImplementedError(
                "expected --no-cuda-graph on several processes, got --cuda-graph; an update is not "
                "recorded with what it sends"
            )
        sizes = f"--tensor-parallel times --context-parallel, {self.tp} * {self.cp},"
        if self.size % (self.tp * self.cp):
            raise ValueError(f"expected {sizes} to divide the number of processes, got {self.size}")
        if self.kind == "hybrid" and (self.nodes < 2 or self.local_size % (self.tp * self.cp)):
            raise ValueError(
                f"expected several nodes, of which {sizes} divides the processes, with --parallel "
                f"hybrid, got {self.nodes} of {self.local_size}"
            )
        self.dp = self.size // (self.tp * self.cp)
        _check_divides("--batch-size", settings.batch_size, self.dp, "data parallel")
        _check_divides("--seq-len", settings.seq_len, self.cp, "context parallel")
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

    def all_rows(self, x: Tensor) -> Tensor:
        every = x.new_empty(self.size * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(every, x.contiguous())
        return every

    def own_rows(self, x: Tensor) -> Tensor:
        return x.chunk(self.size)[dist.get_rank()]

    def tidy(self, checkpoint: Path, resumes: bool) -> None:
        named = read_metadata(checkpoint).get("sharded") if resumes else None
        remove_folders(checkpoint.parent, but=named)

    def own_part(self, batches: Batches) -> Batches:
        """This rank's rows and tokens of a step's windows."""
        count, rank = batches.batch_size // self.dp, dist.get_rank() // self.tp
        first, piece = rank // self.cp * count, rank % self.cp

        def own(step: int) -> tuple[Tensor, Tensor]:
            rows = batches(step, slice(first, first + count))
            return tuple(x.chunk(self.cp, 1)[piece] for x in rows)

        return own

    def prepare(self, model: nn.Module, settings: Settings, compiled: bool) -> Whole:
        """With `compiled`, every block is its own graph in a step, but not with segments, whose
        caches would each be another graph; evaluations are eager.
        """
        if self.kind == "auto":
            self.kind, self.reason = self.from_first(lambda: self._choose(model, settings))
        nodes = self.nodes if self.kind == "hybrid" else 1
        sizes, names = (nodes, self.dp // nodes, self.cp, self.tp), ("nodes", "dp", "cp", "tp")
        mesh = dist.init_device_mesh(self.device.type, sizes, mesh_dim_names=names)
        if self.cp > 1:
            self.arguments["cp_context"] = build_cp_context(None, mesh["cp"].get_group())
        if self.tp > 1:
            parallelize_module(model, mesh["tp"], tensor_parallel_plan(model))
        if compiled and settings.segments > 1:
            compiled, self.reason = False, f"{self.reason}; not compiled with --segments"
        for block in model.model.layers if compiled else ():
            block.compile(fullgraph=True, dynamic=False)
        if self.kind == "replicate":
            return Replicas(model)
        over = mesh["dp", "cp"]._flatten("dp_cp")
        over = mesh["nodes", "dp_cp"] if self.kind == "hybrid" else over
        return Sharded(model, over, DTYPES[settings.dtype])

    def _choose(self, model: nn.Module, settings: Settings) -> tuple[str, str]:
        if self.tp > 1:
            return "shard", ", because --tensor-parallel needs it"
        ranks = {"replicate": 1, "hybrid": self.local_size, "shard": self.size}
        if self.nodes == 1 or self.local_size % self.cp:
            del ranks["hybrid"]
        tokens = settings.batch_size * settings.seq_len // self.size
        memory = memory_of(self.device, self.local_size)
        bf16, accumulates = settings.dtype == "bfloat16", settings.passes > 1
        return choose(model, bf16, tokens, memory, ranks, accumulates)


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


def _refuse(flag: str, size: int, other: str, is_given: bool) -> None:
    if size > 1 and is_given:
        raise NotImplementedError(f"expected {other} with {flag} {size}, got another value")


def _check_divides(flag: str, value: int, size: int, what: str) -> None:
    if value % size:
        raise ValueError(
            f"expected {flag} to be a multiple of {size}, the ranks of {what}, got {value}"
        )
