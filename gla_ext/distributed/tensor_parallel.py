"""Tensor parallelism: heads, MLP channels and the vocabulary are split over the ranks of a mesh.

Parameters become DTensors, for checkpoints and FSDP2. Tensors passed between modules stay plain: a
module computes with its own shards. Each layer needs two collectives per direction, as in
Megatron-LM (Shoeybi et al., 2019, arXiv:1909.08053).
"""

from __future__ import annotations

from fnmatch import fnmatch
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from gla_ext.layers import ShortConvolution
from gla_ext.layers.attention import Attention
from gla_ext.layers.gated_linear_attention import GatedLinearAttention
from gla_ext.layers.multihead import MultiheadGLA
from gla_ext.layers.norms import GatedRMSNorm, RMSNorm
from gla_ext.layers.swiglu import swiglu_linear
from gla_ext.model.blocks import GLAMLP
from gla_ext.ops._collectives import first_row, sum_gradients, sum_over_ranks
from gla_ext.ops._sharding import contiguous_strides

_CONVOLUTIONS = ("q_conv1d", "k_conv1d", "v_conv1d")
_BY_ROWS = ("q_proj", "k_proj", "v_proj", "g_proj", *_CONVOLUTIONS)
_MLP = ("gate_proj", "up_proj", "down_proj")
# Allowed classes of the submodules of a sharded module, by the last part of their names.
_KINDS: dict[str, tuple[type[nn.Module], ...]] = {
    **dict.fromkeys((*_BY_ROWS, *_MLP, "o_proj", "0", "1"), (nn.Linear,)),
    **dict.fromkeys(_CONVOLUTIONS, (ShortConvolution,)),
    "gk_proj": (nn.Sequential,),
    "g_norm": (RMSNorm, GatedRMSNorm),
    "g_norm_swish_gate": (GatedRMSNorm,),
    "attention": (GatedLinearAttention,),
}
_MAY_HAVE_BIAS = (*_BY_ROWS, "1")  # "1": the second map of gk_proj


def tensor_parallel_plan(
    module: nn.Module, *, loss_parallel: bool = False
) -> dict[str, ParallelStyle] | ParallelStyle:
    """The plan to pass to `torch.distributed.tensor.parallel.parallelize_module` to shard a module.

    Heads are divided over the ranks, so num_heads and num_kv_heads must be multiples of the mesh's
    size, and so must the MLP's channels. The vocabulary may be split unevenly. Caches then hold a
    rank's heads. All ranks of the mesh must get the same tokens, and the same seed if they sample,
    so that they draw the same tokens. Merge adapters into the weights and remove parametrizations
    first.

    Args:
        module: a `GatedLinearAttention`, `Attention`, `MultiheadGLA`, `GLAMLP`, or a language model
            of `gla_ext.model` or `gla_ext.hf`.
        loss_parallel: in train mode, lm_head returns a DTensor `[B, T, vocab_size]` sharded by the
            vocabulary, and no rank computes the loss from all logits. Default: False (all logits on
            every rank).

    Returns:
        Names of modules and their styles; for a single layer its style.

    Raises:
        TypeError: for another module. Also for a submodule, which it names, that differs from what
            gla_ext builds: an adapter, a parametrization, a bias that gla_ext does not build, a
            quantized or sharded weight.
    """
    if isinstance(module, HeadsParallel.kinds):
        return HeadsParallel().checked(module)
    if isinstance(module, GLAMLP):
        return MLPParallel().checked(module)
    heads = {"lm_head": VocabularyParallel(loss_parallel)} if hasattr(module, "lm_head") else {}
    inner = getattr(module, "model", module)
    if not hasattr(inner, "embeddings") or not hasattr(inner, "layers"):
        raise TypeError(
            "tensor_parallel_plan: expected a layer or a language model of gla_ext, got "
            f"{type(module)}"
        )
    prefix = "" if inner is module else "model."
    plan = {
        f"{prefix}embeddings": VocabularyParallel(),
        f"{prefix}layers.*.attn_norm": Replicated(),
        f"{prefix}layers.*.attn": HeadsParallel(),
        f"{prefix}layers.*.mlp_norm": Replicated(),
        f"{prefix}layers.*.mlp": MLPParallel(),
        f"{prefix}norm": Replicated(),
        **heads,
    }
    for name, part in module.named_modules():
        for pattern, style in plan.items():
            if fnmatch(name, pattern):
                style.checked(part, name)
    return plan


class _Style(ParallelStyle):
    """Shards modules whose class is exactly one of `kinds`. Code of another class, such as an
    adapter that replaces a module, would mistake a rank's part of a weight for the whole.
    """

    kinds: tuple[type[nn.Module], ...]

    def checked(self, module: nn.Module, name: str = "") -> Any:
        """Returns itself; raises TypeError if the module or a part of it differs from gla_ext's
        own.
        """
        owner = type(self).__name__
        for path, part in module.named_modules(prefix=name):
            last = "" if part is module else path.rpartition(".")[2]
            kinds = self.kinds if part is module else _KINDS.get(last, ())
            where = path or "the module"
            if type(part) not in kinds or "forward" in vars(part):
                expected = " or ".join(kind.__name__ for kind in kinds) or "absent"
                raise TypeError(
                    f"{owner}: expected {where} to be {expected}, as gla_ext builds it, got "
                    f"{type(part)}; merge or remove adapters and parametrizations first"
                )
            biased = last in _MAY_HAVE_BIAS or type(part) is MultiheadGLA
            for key, x in part._parameters.items():
                known = key == "weight" or (key == "bias" and biased)
                if x is not None and not (known and type(x) is nn.Parameter):
                    raise TypeError(
                        f"{owner}: expected {where} to have plain weights, and a bias only where "
                        f"gla_ext builds one, got {key} of {type(x)}"
                    )
        return self


class Replicated(_Style):
    """Every rank holds the parameters and computes everything."""

    kinds = (RMSNorm,)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.checked(module)
        for child in module.modules():
            if child._parameters:
                _hold(child, device_mesh, dict.fromkeys(child._parameters))
        return module


class HeadsParallel(_Style):
    """Shards a `GatedLinearAttention`, the one in a `MultiheadGLA`, or an `Attention` by heads."""

    kinds = (Attention, GatedLinearAttention, MultiheadGLA)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.checked(module)
        if isinstance(module, MultiheadGLA):
            _hold(module, device_mesh, {"bias": None})
            self._apply(module.attention, device_mesh)
            return module
        heads = {name: getattr(module, name) for name in ("num_heads", "num_kv_heads")}
        _check_divides("HeadsParallel", device_mesh, **heads)
        for name in _BY_ROWS:
            child = getattr(module, name, None)
            if child is not None:
                _hold(child, device_mesh, dict.fromkeys(child._parameters, 0))
        _hold(module.o_proj, device_mesh, {"weight": 1})
        if isinstance(module, GatedLinearAttention):
            _hold(module.gk_proj[0], device_mesh, {"weight": None}, partial=True)
            _hold(module.gk_proj[1], device_mesh, {"weight": 0, "bias": 0})
            _hold(module.norm, device_mesh, dict.fromkeys(module.norm._parameters), partial=True)
        return _between_sums(module, device_mesh)


class MLPParallel(_Style):
    """Shards a `GLAMLP` by channels."""

    kinds = (GLAMLP,)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.checked(module)
        _check_divides("MLPParallel", device_mesh, intermediate_size=module.gate_proj.out_features)
        for name, dim in zip(_MLP, (0, 0, 1), strict=True):
            _hold(getattr(module, name), device_mesh, {"weight": dim})

        def forward(self: nn.Module, x: Tensor) -> Tensor:
            return swiglu_linear(self.gate_proj(x), self.up_proj(x), self.down_proj.weight)

        _subclass(module, {"forward": forward})
        return _between_sums(module, device_mesh)


class VocabularyParallel(_Style):
    """Shards embeddings or lm_head by rows of the vocabulary. loss_parallel (default False) is as
    in `tensor_parallel_plan`.
    """

    kinds = (nn.Embedding, nn.Linear)

    def __init__(self, loss_parallel: bool = False) -> None:
        super().__init__()
        self.loss_parallel = loss_parallel

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.checked(module)
        _hold(module, device_mesh, {"weight": 0})
        group_name = device_mesh.get_group().group_name
        if isinstance(module, nn.Embedding):
            return _subclass(module, {"forward": _embed(device_mesh, group_name)})
        return _subclass(module, {"forward": _logits(device_mesh, group_name, self.loss_parallel)})


def _check_divides(owner: str, mesh: DeviceMesh, **sizes: int) -> None:
    for name, n in sizes.items():
        if n % mesh.size():
            raise ValueError(
                f"{owner}: expected {name} to be a multiple of the mesh's size {mesh.size()}, got "
                f"{n}"
            )


def _embed(mesh: DeviceMesh, group_name: str) -> Any:
    def forward(self: nn.Embedding, ids: Tensor) -> Tensor:
        rows = self.weight.shape[0]
        start = first_row(self.num_embeddings, mesh.size(), mesh.get_local_rank())
        mine = (ids >= start) & (ids < start + rows)
        weight, pad = self.weight, self.padding_idx
        if rows == 0:
            return sum_over_ranks(weight.new_zeros(*ids.shape, weight.shape[1]), group_name)
        pad = pad - start if pad is not None and start <= pad < start + rows else None
        x = F.embedding((ids - start).where(mine, 0), weight, pad)
        return sum_over_ranks(x.where(mine.unsqueeze(-1), 0), group_name)

    return forward


def _logits(mesh: DeviceMesh, group_name: str, loss_parallel: bool) -> Any:
    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        local = F.linear(sum_gradients(x, group_name), self.weight)
        shape = (*local.shape[:-1], self.out_features)
        whole = {"run_check": False, "shape": shape, "stride": contiguous_strides(shape)}
        logits = DTensor.from_local(local, mesh, [Shard(local.ndim - 1)], **whole)
        if loss_parallel and self.training:
            return logits
        return logits.full_tensor(grad_placements=[Replicate()])

    return forward


def _between_sums(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Sums the gradient of the module's input over the ranks, and its output."""
    group_name = mesh.get_group().group_name
    compute = type(module).forward

    def forward(self: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        out = compute(self, sum_gradients(x, group_name), *args, **kwargs)
        if isinstance(out, tuple):
            return (sum_over_ranks(out[0], group_name), *out[1:])
        return sum_over_ranks(out, group_name)

    return _subclass(module, {"forward": forward})


def _hold(
    module: nn.Module, mesh: DeviceMesh, dims: dict[str, int | None], partial: bool = False
) -> None:
    """Makes parameters DTensors, sharded by a dimension or replicated. The module's own code sees
    this rank's part. `partial`: the gradient comes only from this rank's heads, and is summed over
    the ranks.
    """
    group_name = mesh.get_group().group_name
    properties = {}
    for name, dim in dims.items():
        parameter = module._parameters.get(name)
        if parameter is None:
            continue
        placement = Replicate() if dim is None else Shard(dim)
        module._parameters[name] = _distributed(parameter, mesh, placement)
        properties[name] = property(_local_part(name, mesh, group_name if partial else None))
    if properties:
        _subclass(module, properties)


def _distributed(parameter: nn.Parameter, mesh: DeviceMesh, placement: Any) -> nn.Parameter:
    """The parameter as a DTensor. A parameter used twice, as tied embeddings are, becomes one
    DTensor.
    """
    known = getattr(parameter, "_gla_ext_sharded", None)
    if known is not None and known.device_mesh == mesh and known.placements == (placement,):
        return known
    whole = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    made = nn.Parameter(whole, requires_grad=parameter.requires_grad)
    parameter._gla_ext_sharded = made
    return made


def _local_part(name: str, mesh: DeviceMesh, group_name: str | None) -> Any:
    def part(self: nn.Module) -> Tensor:
        parameter = self._parameters[name]
        # FSDP2 reads parameters that it has sharded over further ranks, transformers placeholders
        # that it loads into; return them unchanged.
        if getattr(parameter, "device_mesh", None) != mesh or parameter.is_meta:
            return parameter
        local = parameter.to_local()
        return local if group_name is None else sum_gradients(local, group_name)

    return part


def _subclass(module: nn.Module, members: dict[str, Any]) -> nn.Module:
    """Gives the module its own subclass, with the same name and with these members."""
    cls = type(module)
    module.__class__ = type(cls.__name__, (cls,), {"__module__": cls.__module__, **members})
    return module
