"""The operators on sharded tensors (`torch.distributed.tensor.DTensor`).

Once a program imports DTensors every operator of gla_ext has a rule of one of two kinds: which
shards it computes alone, the placements of the largest inputs that are such shards being kept and
other inputs redistributed to them; or an error that says what to call instead. `chunk_gla` and the
recurrence choose their shards in Python, see gla_ext/distributed/sharding.py: their operators'
results are not all sharded tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gla_ext import _C  # noqa: F401  loading it registers torch.ops.gla_ext
from gla_ext._when_imported import when_imported

_ops = torch.ops.gla_ext

# On one dimension of a mesh: where tensors are sharded, by the names of an operator's schema, or
# _SUM of outputs that are summed over the ranks. What has no name here is replicated.
_SUM = "sum"
_Shards = dict[str, int | str]
_Given = dict[str, Any]
_Rule = Callable[[_Given], Iterator[_Shards]]

# What a program calls in place of an operator that takes no sharded tensors.
_INSTEAD = {
    "chunk_gla_fwd": "gla_ext.chunk_gla",
    "chunk_gla_bwd": "gla_ext.chunk_gla",
    "chunk_gla_across_ranks": "gla_ext.chunk_gla with a cp_context",
    "recurrent_gla_fwd": "gla_ext.fused_recurrent_gla",
    "recurrent_gla_bwd": "gla_ext.fused_recurrent_gla",
    "recurrent_gla_step_": "gla_ext.recurrent_gla_step_",
    "recurrent_gla_verify": "gla_ext.recurrent_gla_verify",
    "recurrent_gla_commit_": "gla_ext.recurrent_gla_commit_",
    "cross_entropy_bwd_": "gla_ext.losses.cross_entropy_loss",
    "cross_entropy_with_grad_": "gla_ext.losses.cross_entropy_loss",
    "linear_cross_entropy_fwd": "gla_ext.losses.fused_linear_cross_entropy_loss",
}


def register_when_sharded() -> None:
    """Gives DTensor the rules, now or when it is imported, which `import gla_ext` does not do."""
    when_imported("torch.distributed.tensor", _register)


def names_of_operators() -> list[str]:
    """Of all that are registered, without their namespace."""
    names = (name.split("::") for name in torch._C._dispatch_get_all_op_names())
    return sorted(name for namespace, name in names if namespace == "gla_ext")


def _register(tensor: ModuleType) -> None:
    for name in names_of_operators():
        function = _DECOMPOSED.get(name, _refuse)
        if name in _RULES:
            function = functools.partial(_on_shards, tensor, _RULES[name])
        torch.library.register_torch_dispatch(f"gla_ext::{name}", tensor.DTensor, function)


# Arguments, and the output that is not there where they are False.
_ASKS_FOR = {"output_state": "state", "product": "y", "output": "y"}


@torch.no_grad()  # below autograd, which sees an operator of DTensors
def _on_shards(
    tensor: ModuleType,
    rule: _Rule,
    cls: type,
    op: Any,
    types: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """Calls the operator on every rank's shards."""
    schema = op._schema
    given = {argument.name: argument.default_value for argument in schema.arguments}
    given |= dict(zip(given, args, strict=False)) | (kwargs or {})
    inputs = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    mesh = next(t.device_mesh for t in inputs.values() if isinstance(t, cls))
    for name, t in inputs.items():
        if not isinstance(t, cls) and name != "cu_seqlens":  # the same on every rank
            raise NotImplementedError(
                f"{_name(op)}: expected {name} to be a DTensor like the others, got a plain "
                "tensor; make it one with distribute_tensor, or call it on to_local() tensors"
            )
    sharded = {name: t for name, t in inputs.items() if isinstance(t, cls)}
    choices: list[_Shards] = [{}, *rule(given)]

    def placement(where: int | str | None) -> Any:
        if where is None:
            return tensor.Replicate()
        return tensor.Partial() if where == _SUM else tensor.Shard(where)

    chosen = []
    for dim in range(mesh.ndim):

        def stays(shards: _Shards, dim: int = dim) -> int:
            """Elements of inputs that lie as this choice has them."""
            kept = (n for n, t in sharded.items() if t.placements[dim] == placement(shards.get(n)))
            return sum(sharded[n].numel() for n in kept)

        chosen.append(max(choices, key=stays))
    local = {}
    for name, t in sharded.items():
        placements = tuple(placement(c.get(name)) for c in chosen)
        if t.placements != placements:
            t = t.detach().redistribute(placements=placements)
        local[name] = t.to_local()
    outputs = op(*(given | local).values())
    single = isinstance(outputs, Tensor)
    # Outputs without elements: gradients of what is absent, and what nobody asks for.
    absent = {f"d{argument.name}" for argument in schema.arguments} - {f"d{n}" for n in inputs}
    absent |= {name for flag, name in _ASKS_FOR.items() if given.get(flag) is False}
    found = []
    for output, t in zip(schema.returns, [outputs] if single else outputs, strict=True):
        name = output.name or "result"
        if name == "dx" and t.ndim != given["dy"].ndim:  # dresidual serves for both
            absent.add(name)
        shards = [None if name in absent else c.get(name) for c in chosen]
        shape = list(t.shape)
        for c, where in zip(chosen, shards, strict=True):
            if isinstance(where, int):
                like = next(n for n in c if n in sharded)
                shape[where] = sharded[like].shape[c[like]]
        options = {"run_check": False, "shape": torch.Size(shape), "stride": _contiguous(shape)}
        found.append(cls.from_local(t, mesh, [placement(where) for where in shards], **options))
    return found[0] if single else tuple(found)


def _contiguous(shape: list[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(size, 1))
    return tuple(strides[: len(shape)])


def _name(op: Any) -> str:
    return op._schema.name.removeprefix("gla_ext::")


def _each_but_last(names: str, summed: str = "") -> _Rule:
    """Rows: any dimension but the last, in all that are named. The first is always given."""

    def rule(given: _Given) -> Iterator[_Shards]:
        for dim in range(given[names.split()[0]].ndim - 1):
            yield dict.fromkeys(names.split(), dim) | dict.fromkeys(summed.split(), _SUM)

    return rule


def _each(names: str) -> _Rule:
    """Elements: any dimension."""

    def rule(given: _Given) -> Iterator[_Shards]:
        for dim in range(given[names.split()[0]].ndim):
            yield dict.fromkeys(names.split(), dim)

    return rule


def _rows_or_channels(rows: str, summed: str, channels: _Shards) -> _Rule:
    """As `_each_but_last`, or channels of the parameters; -1 is the last dimension."""

    def rule(given: _Given) -> Iterator[_Shards]:
        yield from _each_but_last(rows, summed)(given)
        last = given[rows.split()[0]].ndim - 1
        yield {name: last if dim == -1 else dim for name, dim in channels.items()}

    return rule


def _batch_or_channels(batch: str, summed: str, channels: _Shards) -> _Rule:
    """The batch, where sequences are not packed, or channels."""

    def rule(given: _Given) -> Iterator[_Shards]:
        if given["cu_seqlens"] is None:
            yield dict.fromkeys(batch.split(), 0) | dict.fromkeys(summed.split(), _SUM)
        yield channels

    return rule


def _rows_of_logits(given: _Given) -> Iterator[_Shards]:
    if given.get("inplace_backward"):
        raise NotImplementedError(
            "cross_entropy_fwd: expected no inplace_backward with DTensors, which "
            "cross_entropy_bwd_ does not take"
        )
    yield dict.fromkeys(("logits", "target", "lse", "dloss", "loss", "z_loss", "result"), 0)


_CONVOLUTION: _Shards = {"x": 2, "y": 2, "dx": 2, "dy": 2, "weight": 0, "bias": 0, "cache": 1}
_CONVOLUTION |= {"dweight": 0, "dbias": 0, "dcache": 1, "state": 1, "dstate": 1}
_GATE: _Shards = {"weight": 0, "bias": 0, "dweight": 0, "dbias": 0, "dh": _SUM}

_RULES: dict[str, _Rule] = {
    "rms_norm_gate_fwd": _each_but_last("x gate y rstd"),
    "rms_norm_gate_bwd": _each_but_last("dy x gate rstd dx dgate y", "dweight"),
    "rms_norm_residual_fwd": _each_but_last("x residual y stream rstd"),
    "rms_norm_residual_bwd": _each_but_last("dy dstream stream rstd dx dresidual", "dweight"),
    "swiglu_fwd": _each("gate up result"),
    "swiglu_bwd": _each("dy gate up dgate dup y"),
    "short_convolution_fwd": _batch_or_channels("x cache y state", "", _CONVOLUTION),
    "short_convolution_bwd": _batch_or_channels(
        "dy dstate x cache dx dcache", "dweight dbias", _CONVOLUTION
    ),
    "gate_projection_fwd": _rows_or_channels("h result", "", _GATE | {"result": -1}),
    "gate_projection_bwd": _rows_or_channels("dg h dh", "dweight dbias", _GATE | {"dg": -1}),
    "cross_entropy_fwd": _rows_of_logits,
    "cross_entropy_bwd": _rows_of_logits,
}


def _swiglu_linear(cls: type, op: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor:
    gate, up, weight, bias = args
    return F.linear(_ops.swiglu_fwd(gate, up), weight, bias)


def _norm_gate_linear(cls: type, op: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor:
    o, gate, weight, norm_weight, activation, eps = args
    y, _ = _ops.rms_norm_gate_fwd(o, norm_weight, gate.unflatten(-1, o.shape[-2:]), activation, eps)
    return F.linear(y.flatten(-2), weight)


def _joint_projection(
    cls: type, op: Any, types: Any, args: tuple[Any, ...], kwargs: Any
) -> list[Tensor]:
    x, weights, dtype = args[:3]  # together or apart, of one product each
    return [F.linear(x, weight.to(dtype)) for weight in weights]


# Operators that are made of others, which inference mode hands on as they are.
_DECOMPOSED = {
    "swiglu_linear": _swiglu_linear,
    "norm_gate_linear": _norm_gate_linear,
    "joint_projection": _joint_projection,
}


def _refuse(cls: type, op: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> None:
    name = _name(op)
    instead = f"call {_INSTEAD[name]}, or redistribute" if name in _INSTEAD else "redistribute"
    raise NotImplementedError(
        f"{name}: expected plain tensors, got a DTensor; {instead} to whole sequences, sharded "
        "over batch or heads, and call it on to_local() tensors"
    )
