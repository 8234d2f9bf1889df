"""The one place that asks what surrounds a call: a graph, a transform, DTensors, ONNX, and which
form of an operator serves there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gla_ext.ops._checks import check_plain_tensors


def is_recorded() -> bool:
    """Whether torch.compile, torch.export or torch.jit.trace makes a graph of what is called."""
    # As torch.jit.is_tracing, a Python call less: decoding asks several times a layer.
    return torch.compiler.is_compiling() or torch._C._is_tracing()


def form_of(operator: Any, plain: Any, compiled: Any = None) -> Any:
    """The form of an operator that serves here.

    Args:
        operator: what runs, and what a graph takes.
        plain: what torch.onnx.export takes: ONNX has none of gla_ext's operators.
        compiled: what graphs of torch.compile and torch.export take. Default: operator.
    """
    if torch.compiler.is_compiling():
        form = operator if compiled is None else compiled
    elif torch._C._is_tracing():
        form = operator
    else:
        return operator
    return plain if torch.onnx.is_in_onnx_export() else form


def at_once(function: Callable[..., None]) -> Callable[..., None]:
    """A function that looks or warns, and that graphs of torch.compile do without."""
    return form_of(function, _nothing, compiled=_nothing)


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def form_on(
    operator: Any,
    plain: Any,
    *tensors: Tensor,
    compiled: Any = None,
    sharded: Callable[[Tensor], Any] | None = None,
    of_subclasses: Any = None,
    has_rules: bool = False,
) -> Any:
    """`form_of` for these tensors: `plain` too where the operator has no kernels, fp64 on CUDA and
    sparse tensors, and no rules: subclasses but DTensor, transforms of torch.func, forward-mode AD.

    Args:
        sharded: gives the form that takes a DTensor, compiled or not. Default: operator.
        of_subclasses: the form for other subclasses. Default: plain.
        has_rules: the operator has rules for transforms, and sentences for what it does not take.
    """
    for t in tensors:
        if type(t) is not Tensor and type(t) is not torch.nn.Parameter:
            if is_sharded(t):
                if sharded is not None:
                    operator = compiled = sharded(t)
            elif is_traceable_wrapper_subclass(t):
                return plain if of_subclasses is None else of_subclasses
        if t.is_cuda and t.dtype == torch.float64:
            return plain
        if not has_rules and t.layout != torch.strided:
            return plain
    if has_rules:
        return form_of(operator, plain, compiled)
    if torch._C._are_functorch_transforms_active() or any(map(has_tangent, tensors)):
        return plain
    return form_of(operator, plain, compiled)


def have_no_rule(*tensors: Tensor) -> bool:
    """Whether an operator without rules of its own meets what needs one, or has no kernels."""
    return form_on(False, True, *tensors)


def not_in_onnx(op: str, instead: str, of: str = "states") -> Callable[..., None]:
    """The plain form of an operator on a pool, which raises NotImplementedError."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"{op}: a pool of {of} has no form in ONNX; use {instead}")

    return refuse


def on_pool(
    operator: Any, in_onnx: Callable[..., None], *args: Any, out: Tensor | None = None
) -> Tensor:
    """Calls an operator that reads or writes a pool: its result, or out, which then has it."""
    if out is None:
        return form_of(operator.default, in_onnx)(*args)
    form_of(operator.out, in_onnx)(*args, out=out)
    return out


def on_shards(op: str, names: str, values: Sequence[Any]) -> ModuleType | None:
    """What serves DTensors, where the first value is one. Else, of plain tensors, None.

    Raises: as `check_plain_tensors`, where the first value is no DTensor.
    """
    if type(values[0]) is Tensor or not is_sharded(values[0]):
        check_plain_tensors(op, names, *values)
        return None
    return several_ranks().sharding


def several_ranks() -> ModuleType:
    """`gla_ext.distributed`, loaded when the first tensor or context of several ranks comes."""
    import gla_ext.distributed

    return gla_ext.distributed


def is_sharded(t: Tensor) -> bool:
    """Whether a tensor is a DTensor, without importing what that is."""
    return type(t).__name__ == "DTensor"


def can_be_read(t: Tensor) -> bool:
    """Whether a program may look at a tensor's values now and branch on them: not in a graph, a
    transform of torch.func or a CUDA graph's capture, nor of a tensor without values.
    """
    if is_recorded() or torch._C._are_functorch_transforms_active():
        return False
    if type(t) not in (Tensor, torch.nn.Parameter) or t.is_meta:
        return False
    # Fake tensors and proxies may come of any operation while such a mode is on.
    keys = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)
    if any(torch._C._get_dispatch_mode(key) is not None for key in keys):
        return False
    return not (t.is_cuda and torch.cuda.is_current_stream_capturing())


def when_read(t: Tensor, check: Callable[..., None], *args: Any) -> None:
    """Calls a check that looks at t's values, where a program may."""
    if can_be_read(t):
        check(*args)


def is_one(T: int | torch.SymInt) -> bool:
    """Whether T is 1, without a guard where it is symbolic."""
    if not isinstance(T, torch.SymInt) and not torch.compiler.is_compiling():
        return bool(T == 1)  # torch.jit.trace makes a tensor of T
    # Where there are symbols torch has loaded it; without, it would cost a second of import.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(T == 1)


def in_forward_mode() -> bool:
    """Whether a level of forward-mode AD is open."""
    return forward_ad._current_level >= 0


def has_tangent(t: Tensor) -> bool:
    """Whether forward-mode AD differentiates with respect to a tensor."""
    # unpack_dual asks for the level too, but takes a microsecond.
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(t).tangent is not None


def in_graphs(traced: Callable[..., Any], eager: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is `traced` where torch.compile makes a graph of it, else `eager`."""

    def routed(*args: Any, **kwargs: Any) -> Any:
        return (traced if torch.compiler.is_compiling() else eager)(*args, **kwargs)

    return routed
