"""Whether a call runs, or is written down to be run later."""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def is_recorded() -> bool:
    """Whether torch.compile, torch.export or torch.jit.trace makes a graph of what is called."""
    # As torch.jit.is_tracing, a Python call less: decoding asks several times a layer.
    return torch.compiler.is_compiling() or torch._C._is_tracing()


def can_be_read(t: torch.Tensor) -> bool:
    """Whether a program may look at a tensor's values now and branch on them: not in a graph, a
    transform of torch.func or a CUDA graph's capture, nor of a tensor without values.
    """
    if is_recorded() or torch._C._are_functorch_transforms_active():
        return False
    if type(t) not in (torch.Tensor, torch.nn.Parameter) or t.is_meta:
        return False
    # Fake tensors and proxies may come of any operation while such a mode is on.
    if torch._C._len_torch_dispatch_stack() and _fakes_or_traces():
        return False
    return not (t.is_cuda and torch.cuda.is_current_stream_capturing())


def _fakes_or_traces() -> bool:
    keys = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)
    return any(torch._C._get_dispatch_mode(key) is not None for key in keys)


def is_recorded_for_onnx() -> bool:
    """Whether torch.onnx.export does: ONNX has none of gla_ext's operators."""
    return is_recorded() and torch.onnx.is_in_onnx_export()


def refuse_pool_in_onnx(op: str, instead: str, of: str = "states") -> None:
    """Raises NotImplementedError where torch.onnx.export records an operator on a pool."""
    if is_recorded_for_onnx():
        raise NotImplementedError(f"{op}: a pool of {of} has no form in ONNX; use {instead}")


def is_one(T: int | torch.SymInt) -> bool:
    """Whether T is 1, without a guard where it is symbolic."""
    if not isinstance(T, torch.SymInt) and not torch.compiler.is_compiling():
        return bool(T == 1)  # torch.jit.trace makes a tensor of T
    # Where there are symbols torch has loaded it; without, it would cost a second of import.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(T == 1)


def is_of_unknown_class(t: torch.Tensor) -> bool:
    """Whether a tensor is of a subclass for which the operators have no rules: all but DTensor,
    for which ops/_sharding.py has them.
    """
    if type(t) is torch.Tensor or type(t) is torch.nn.Parameter:
        return False
    return is_traceable_wrapper_subclass(t) and not is_sharded(t)


def is_sharded(t: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor, without importing what that is."""
    return type(t).__name__ == "DTensor"


def have_no_rule(*tensors: torch.Tensor) -> bool:
    """Whether an operator without rules of its own meets what needs one: subclasses but DTensor,
    transforms of torch.func, forward-mode AD, ONNX.
    """
    if any(map(is_of_unknown_class, tensors)):
        return True
    if torch._C._are_functorch_transforms_active() or is_recorded_for_onnx():
        return True
    return not is_recorded() and any(map(has_tangent, tensors))


def in_forward_mode() -> bool:
    """Whether a level of forward-mode AD is open."""
    return forward_ad._current_level >= 0


def has_tangent(t: torch.Tensor) -> bool:
    """Whether forward-mode AD differentiates with respect to a tensor."""
    # unpack_dual asks for the level too, but takes a microsecond.
    return in_forward_mode() and forward_ad.unpack_dual(t).tangent is not None


def in_graphs(traced: Callable[..., Any], eager: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is `traced` where torch.compile makes a graph of it, else `eager`."""

    def routed(*args: Any, **kwargs: Any) -> Any:
        return (traced if torch.compiler.is_compiling() else eager)(*args, **kwargs)

    return routed
