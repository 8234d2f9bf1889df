"""`gla_ext.train` on many processes, that torchrun starts: FSDP2, tensor and context parallel.

Every rank runs the same steps; the first alone prints and writes what is not sharded.
"""

from __future__ import annotations

import contextlib
import copy
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from gla_ext.distributed.checkpoints import remove_folders
from gla_ext.distributed.context import build_cp_context
from gla_ext.distributed.tensor_parallel import tensor_parallel_plan
from gla_ext.model import GLAForCausalLM
from gla_ext.model.checkpoint import read_metadata, read_tensors, write_tensors
from gla_ext.train import command
from gla_ext.train.data import Corpus, load_corpus
from gla_ext.train.devices import default_device
from gla_ext.train.optimizer import optimizer_of
from gla_ext.train.presets import Options
from gla_ext.train.run_folder import CHECKPOINT, check_nothing_is_lost, held
from gla_ext.train.trainer import DTYPES, Settings, Trainer, checkpoint_settings


def main(given: dict[str, Any]) -> int:
    """`gla_ext.train.main` of one of several processes, after the command line."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = given.get("device", "auto")
    device = default_device() if device == "auto" else device
    if torch.device(device).type == "cuda":
        device = f"cuda:{local_rank}"
        torch.cuda.set_device(local_rank)
    with _process_group(device), _quiet_but_first():
        settings, options = _from_first(lambda: command._settings_and_options(given))
        options.device = device
        with AgreedSignals() as signals:
            try:
                _hold_and_run(settings, options, signals)
            except command.Interrupted:
                flags = shlex.join(command._command_to_go_on(given, options)[1:])
                print(f"Stopped. To go on: torchrun --nproc-per-node N {flags}")
                return 128 + signals.number
    return 0


@contextlib.contextmanager
def _process_group(device: str) -> Iterator[None]:
    cuda = torch.device(device).type == "cuda"
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _quiet_but_first() -> Iterator[None]:
    """Leaves standard output and error to the first rank."""
    if dist.get_rank() == 0:
        yield
        return
    with contextlib.ExitStack() as stack:
        nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        stack.enter_context(contextlib.redirect_stdout(nowhere))
        stack.enter_context(contextlib.redirect_stderr(nowhere))
        yield


def _from_first(function: Callable[[], Any]) -> Any:
    """What a function gives on the first rank, or its error, on every rank."""
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


class AgreedSignals(command.StopSignals):
    """A signal that any rank got stops all, at the same point. Every rank asks as often."""

    def stopped(self) -> bool:
        number = torch.tensor(self.number or 0)
        dist.all_reduce(number, dist.ReduceOp.MAX)
        if number:
            self.number = int(number)
        return bool(number)

    def check(self) -> None:
        if self.stopped():
            raise command.Interrupted


def _hold_and_run(settings: Settings, options: Options, signals: AgreedSignals) -> None:
    corpus = load_corpus(settings.data)
    with contextlib.ExitStack() as stack:

        def take() -> None:
            stack.enter_context(held(options.out))
            check_nothing_is_lost(options.out, options.resume, options.overwrite)
            named = read_metadata(options.out / CHECKPOINT) if _resumes(options) else {}
            remove_folders(options.out, but=named.get("sharded"))

        _from_first(take)
        _run(settings, options, corpus, signals)


def _resumes(options: Options) -> bool:
    return options.resume and (options.out / CHECKPOINT).exists()


def _run(settings: Settings, options: Options, corpus: Corpus, signals: AgreedSignals) -> None:
    start = time.perf_counter()
    trainer = ShardedTrainer(settings, corpus, options)
    checkpoint = options.out / CHECKPOINT
    resumes = _from_first(lambda: _resumes(options))
    if resumes:
        trainer.load(checkpoint)
    elif options.resume:
        print(f"No checkpoint in {options.out} yet: starting at step 0")
    saved = checkpoint_settings(read_metadata(checkpoint), checkpoint) if trainer.step else None
    if saved != settings:
        trainer.save(checkpoint)
    command._print_start(trainer, corpus, options)
    dp, cp, tp = trainer.mesh.shape
    print(f"Processes: {dist.get_world_size()}, {dp} x FSDP2, {cp} x context, {tp} x tensor")
    signals.check()
    speed = command._train(trainer, options, signals)
    if not trainer.evaluations or trainer.evaluations[-1][0] != trainer.step:
        print("Evaluating on the held-out text ...", flush=True)
        trainer.evaluate(signals.stopped)
        signals.check()
    whole = trainer.consolidated()
    if dist.get_rank() == 0:
        command._finish(whole, corpus, options, speed)
    dist.barrier()
    print(f"{time.perf_counter() - start:.0f} s in all, {speed['tokens_per_second']:,} tokens/s")


class ShardedTrainer(Trainer):
    """A `Trainer` whose model, optimizer and data are divided over the ranks of a mesh.

    Args:
        settings: the run's settings; batch_size is that of all ranks.
        corpus: the text.
        options: device, compile, tensor_parallel, context_parallel.
            With compile every block is a graph of its own in a step; evaluations are eager.

    Raises:
        ValueError: sizes that do not divide the number of processes, the batch or the window.
        NotImplementedError: segments above 1; packed; cuda_graph.
    """

    def __init__(self, settings: Settings, corpus: Corpus, options: Options) -> None:
        if settings.segments > 1 or settings.packed:
            raise NotImplementedError(
                "expected --segments 1 and --no-packed on several processes, got "
                f"--segments {settings.segments}{' --packed' if settings.packed else ''}"
            )
        if options.cuda_graph:
            raise NotImplementedError(
                "expected --no-cuda-graph on several processes, got --cuda-graph"
            )
        device = torch.device(options.device)
        self.mesh = mesh_of(options, device.type)
        dp, cp, _ = self.mesh.shape
        _check_divides("--batch-size", settings.batch_size, dp, "FSDP2")
        _check_divides("--seq-len", settings.seq_len, cp, "context parallel")
        self._policy = settings.dtype != "float32"
        super().__init__(settings, corpus, device)
        self._whole_batch, self.batches = self.batches, self._own_part
        self.context = build_cp_context(None, self.mesh["cp"].get_group()) if cp > 1 else None
        self._shard(options.compile)
        self.optimizer = optimizer_of(self.model, settings.lr, settings.weight_decay)

    def _shard(self, compiled: bool) -> None:
        if self.mesh["tp"].size() > 1:
            parallelize_module(self.model, self.mesh["tp"], tensor_parallel_plan(self.model))
        dtype = DTYPES[self.settings.dtype] if self._policy else None
        options = {
            "mesh": self.mesh["dp", "cp"]._flatten("dp_cp"),
            "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
            "reshard_after_forward": False,
        }
        for block in self.model.model.layers:
            if compiled:
                block.compile(fullgraph=True, dynamic=False)
            fully_shard(block, **options)
        fully_shard(self.model, **options)

    def _own_part(self, step: int) -> tuple[Tensor, Tensor]:
        """This rank's rows and tokens of a step's windows."""
        dp, cp = self.mesh["dp"], self.mesh["cp"]
        return tuple(
            x.chunk(dp.size())[dp.get_local_rank()].chunk(cp.size(), 1)[cp.get_local_rank()]
            for x in self._whole_batch(step)
        )

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(inputs, cp_context=self.context).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()  # the policy's dtype

    def evaluate(self, should_stop: Callable[[], bool] = lambda: False) -> float | None:
        """As `Trainer.evaluate`; every rank computes all of it.

        Blocks are not compiled here: with a cache each would be a graph of its own.
        """
        with torch.compiler.set_stance("force_eager"):
            bits = super().evaluate(should_stop)
        for module in self.model.modules():  # no backward comes, which would do so
            if isinstance(module, FSDPModule):
                module.reshard()
        return bits

    def recent_loss(self, steps: int = 20) -> float:
        """As `Trainer.recent_loss`, the mean over all ranks; every rank asks."""
        loss = torch.tensor(super().recent_loss(steps), dtype=torch.float64)
        dist.all_reduce(loss)
        return loss.item() / dist.get_world_size()

    def _mean_losses(self) -> Tensor:
        losses = self.losses.double()  # in which the mean of what a checkpoint restored is itself
        dist.all_reduce(losses)
        return (losses / dist.get_world_size()).float()

    def _sharded_tensors(self) -> dict[str, Tensor]:
        """Model and optimizer under the names of a one-process checkpoint, as they are sharded."""
        tensors = {}
        for name, parameter in self.model.named_parameters():
            tensors[f"model.{name}"] = parameter.detach()
            state = self.optimizer.state[parameter]
            if not state:
                state["step"] = torch.zeros((), device=self.device)
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key] = torch.zeros_like(parameter.detach())
            tensors |= {f"optimizer.{name}.{key}": value for key, value in state.items()}
        return tensors

    def save(self, path: str | Path) -> None:
        """Writes torch's distributed checkpoint into a folder beside `path`, and then `path`, which
        names it: at any moment `path` is the old checkpoint or the new one.
        """
        path = Path(path)
        folder = path.parent / f"checkpoint-{self.step}.dcp"
        first = dist.get_rank() == 0
        named = read_metadata(path).get("sharded") if first and path.exists() else None
        if first and named == folder.name:  # of this step, but other settings
            folder = path.parent / f"checkpoint-{self.step}b.dcp"
        folder = Path(_from_first(lambda: str(folder)))
        if first and folder.exists():
            shutil.rmtree(folder)
        dist.barrier()
        dcp.save(self._sharded_tensors(), checkpoint_id=folder)
        losses = self._mean_losses()[: self.step]
        if first:
            metadata = self._metadata() | {"sharded": folder.name}
            write_tensors(path, {"losses": losses}, metadata)
            remove_folders(path.parent, but=folder.name)
        dist.barrier()

    def _read(self, path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, metadata = read_tensors(path)
        named = metadata.get("sharded")
        self._folder = None if named is None else Path(path).parent / named
        return tensors, metadata

    def _restore(self, tensors: dict[str, Tensor]) -> None:
        own = self._sharded_tensors()
        if self._folder is not None:
            dcp.load(own, checkpoint_id=self._folder)
        for name, x in own.items():
            if self._folder is None and name in tensors:  # of a run of one process
                whole = tensors[name].to(self.device)
                if isinstance(x, DTensor):
                    whole = distribute_tensor(
                        whole, x.device_mesh, x.placements, src_data_rank=None
                    )
                x.copy_(whole)
            if name.startswith("optimizer."):
                parameter, key = name.removeprefix("optimizer.").rsplit(".", 1)
                self.optimizer.state[self.model.get_parameter(parameter)][key] = x

    def consolidated(self) -> Trainer:
        """A trainer of one process with the whole model, on the first rank; every rank asks."""
        tensors = {name: p.detach().full_tensor() for name, p in self.model.named_parameters()}
        whole = copy.copy(self)
        whole.__class__ = Trainer
        whole.losses = self._mean_losses()
        if dist.get_rank() == 0:
            whole.model = GLAForCausalLM(self.model.config).to(self.device)
            whole.model.load_state_dict(tensors, strict=not self.model.config.tie_word_embeddings)
        return whole


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
