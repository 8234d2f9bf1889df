"""All checks of a call's surroundings (graphs, transforms, DTensors, ONNX), and the choice of the
form of an operator that works there.
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
    """Whether torch.compile, torch.export or torch.jit.trace is recording a graph."""
    # Like torch.jit.is_tracing with one Python call less: decoding checks this often in each layer.
    return torch.compiler.is_compiling() or torch._C._is_tracing()


def form_of(operator: Any, plain: Any, compiled: Any = None) -> Any:
    """The form of an operator to call in the current mode.

    Args:
        operator: the form for eager mode and for graphs.
        plain: the form for torch.onnx.export: ONNX has no operators of gla_ext.
        compiled: the form for graphs of torch.compile and torch.export. Default: operator.
    """
    if torch.compiler.is_compiling():
        form = operator if compiled is None else compiled
    elif torch._C._is_tracing():
        form = operator
    else:
        return operator
    return plain if torch.onnx.is_in_onnx_export() else form


def at_once(function: Callable[..., None]) -> Callable[..., None]:
    """A function that only checks or warns; graphs of torch.compile leave it out."""
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
    """`form_of` for these tensors. Also returns `plain` where the operator has no kernels (fp64 on
    CUDA, sparse tensors) or no rules (tensor subclasses other than DTensor, transforms of
    torch.func, forward-mode AD).

    Args:
        sharded: returns the form for a DTensor, compiled or not. Default: operator.
        of_subclasses: the form for other subclasses. Default: plain.
        has_rules: the operator has rules for transforms and raises its own errors otherwise.
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
    """Whether an operator without rules cannot take these tensors, for lack of a rule or a
    kernel.
    """
    return form_on(False, True, *tensors)


def not_in_onnx(op: str, instead: str, of: str = "states") -> Callable[..., None]:
    """A stand-in for an operator on a pool in ONNX export: it raises NotImplementedError."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"{op}: a pool of {of} has no form in ONNX; use {instead}")

    return refuse


def on_pool(
    operator: Any, in_onnx: Callable[..., None], *args: Any, out: Tensor | None = None
) -> Tensor:
    """Calls an operator that reads or writes a pool. Returns its result, in `out` if that is
    given.
    """
    if out is None:
        return form_of(operator.default, in_onnx)(*args)
    form_of(operator.out, in_onnx)(*args, out=out)
    return out


def on_shards(op: str, names: str, values: Sequence[Any]) -> ModuleType | None:
    """The module that runs operators on DTensors if the first value is a DTensor, else None.

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
    """Whether a tensor is a DTensor, checked without importing that class."""
    return type(t).__name__ == "DTensor"


def can_be_read(t: Tensor) -> bool:
    """Whether a program may now read a tensor's values and branch on them. Not allowed in a graph,
    a transform of torch.func or a CUDA graph's capture, or if the tensor has no values.
    """
    if is_recorded() or torch._C._are_functorch_transforms_active():
        return False
    if type(t) not in (Tensor, torch.nn.Parameter) or t.is_meta:
        return False
    # While one of these modes is on, any operation may return fake tensors or proxies.
    keys = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)
    if any(torch._C._get_dispatch_mode(key) is not None for key in keys):
        return False
    return not (t.is_cuda and torch.cuda.is_current_stream_capturing())


def when_read(t: Tensor, check: Callable[..., None], *args: Any) -> None:
    """Calls a check that reads t's values, if they can be read now."""
    if can_be_read(t):
        check(*args)


def is_one(T: int | torch.SymInt) -> bool:
    """Whether T is 1, without a guard where it is symbolic."""
    if not isinstance(T, torch.SymInt) and not torch.compiler.is_compiling():
        return bool(T == 1)  # torch.jit.trace makes a tensor of T
    # torch has imported this where there are symbols; elsewhere the import would take a second.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(T == 1)


def in_forward_mode() -> bool:
    """Whether a level of forward-mode AD is open."""
    return forward_ad._current_level >= 0


def has_tangent(t: Tensor) -> bool:
    """Whether forward-mode AD differentiates with respect to a tensor."""
    # unpack_dual checks the level too, but takes a microsecond.
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(t).tangent is not None


def in_graphs(traced: Callable[..., Any], eager: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs `traced` in graphs of torch.compile, else `eager`."""

    def routed(*args: Any, **kwargs: Any) -> Any:
        return (traced if torch.compiler.is_compiling() else eager)(*args, **kwargs)

    return routed
