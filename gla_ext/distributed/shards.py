"""A language model's weights, gradients and optimizer cut over the ranks of a mesh, by FSDP2."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

BLOCKS_PER_GROUP = 4  # of 24: with 1 the host was slower, with 8 the GPU waited for the network


def shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    blocks_per_group: int = BLOCKS_PER_GROUP,
    param_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = False,
) -> Shards:
    """Shards a language model in place, in groups of several blocks.

    A group's weights are gathered at once before they are used, while the group before it computes,
    and its gradients are averaged at once. The host handles each group and each parameter of it, so
    that few groups cost it less; a group is also what the GPU waits for at a step's start and end.

    Args:
        model: with blocks in `model.model.layers`, as `GLAForCausalLM`; after
            `parallelize_module` and `compile` of its blocks, if wanted.
        mesh: of one dimension, over which all is cut; or of two: copies over the first, such as
            nodes, cuts over the second.
        blocks_per_group: Default: 4.
        param_dtype: dtype in which weights are gathered, and products computed, while gradients are
            averaged in fp32. Default: that of the weights, for all of it.
        reshard_after_forward: drop gathered weights after forward and gather them again in
            backward, which takes less memory and more time. Default: False.

    Raises:
        TypeError: for a model without such blocks.
        ValueError: for blocks_per_group below 1.
    """
    blocks = getattr(getattr(model, "model", None), "layers", None)
    if not isinstance(blocks, nn.ModuleList):
        raise TypeError(
            "shard_model: expected a language model with blocks in model.model.layers, got "
            f"{type(model).__name__}"
        )
    if blocks_per_group < 1:
        raise ValueError(
            f"shard_model: expected blocks_per_group to be at least 1, got {blocks_per_group}"
        )
    options = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype, param_dtype and torch.float32),
        "reshard_after_forward": reshard_after_forward,
    }
    count = len(blocks)
    groups = [blocks[i : i + blocks_per_group] for i in range(0, count, blocks_per_group)]
    firsts = [model]
    for group in groups:
        fully_shard(list(group) if len(group) > 1 else group[0], **options)
        firsts.append(group[0])
    fully_shard(model, **options)
    for first, second in pairwise(firsts):
        first.set_modules_to_forward_prefetch([second])
    return Shards(model)


class Shards:
    """A sharded model's part on this rank.

        shards = shard_model(model, mesh)
        optimizer = torch.optim.AdamW(shards.parameters.values(), fused=True)
        for last, tokens in ((False, first_part), (True, second_part)):
            with shards.part(last):
                (model(tokens, labels=tokens).loss / 2).backward()
        norm = shards.clip_gradients(1.0)
        optimizer.step()
        optimizer.zero_grad()

    Args:
        model: as `shard_model` left it.

    Attributes:
        parameters: this rank's part of each weight, by its name: plain parameters, which take the
            host less than DTensors. They share the DTensors' memory.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.whole = model, dict(model.named_parameters())
        self.parameters = {
            name: nn.Parameter(p.detach().to_local()) for name, p in self.whole.items()
        }
        self._sends = True
        self._groups = {name: _cut_over(p) for name, p in self.whole.items()}

    @contextlib.contextmanager
    def part(self, last: bool) -> Iterator[None]:
        """For forward and backward of a part of a batch: before the last, gradients are summed on
        each rank and nothing is sent.
        """
        if last != self._sends:  # each goes through all modules
            self._sends = last
            self.model.set_is_last_backward(last)
            self.model.set_requires_gradient_sync(last)
            self.model.set_reshard_after_backward(last)  # else the next part gathers weights again
        yield

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Moves the gradients to `parameters`."""
        for name, p in self.whole.items():
            if p.grad is not None:
                self.parameters[name].grad, p.grad = p.grad.to_local(), None

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Takes the gradients, and scales them if their norm over all ranks is larger.

        Returns:
            The norm before, a scalar.
        """
        self.take_gradients()
        gradients = {n: p.grad for n, p in self.parameters.items() if p.grad is not None}
        cut_alike: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
        for name, gradient in gradients.items():
            cut_alike[self._groups[name]].append(gradient)
        squares = []
        for groups, parts in cut_alike.items():
            squares.append(torch.stack(torch._foreach_norm(parts)).square().sum())
            for group in groups:
                dist.all_reduce(squares[-1], group=group)
        norm = torch.stack(squares).sum().sqrt()
        torch._foreach_mul_(list(gradients.values()), (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def drop_gathered(self) -> None:
        """Frees weights that a forward without a backward has gathered."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def as_dtensor(self, name: str, own: Tensor) -> DTensor:
        """A tensor like the part of a weight, such as the optimizer's state of it, as part of a
        tensor like the weight.
        """
        p = self.whole[name]
        sizes = {"shape": p.shape, "stride": p.stride(), "run_check": False}
        return DTensor.from_local(own, p.device_mesh, p.placements, **sizes)


def _cut_over(t: DTensor) -> tuple[dist.ProcessGroup, ...]:
    """The groups of the ranks that have different parts of a tensor."""
    places = enumerate(t.placements)
    return tuple(t.device_mesh.get_group(dim) for dim, x in places if not x.is_replicate())
