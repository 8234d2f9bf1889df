"""Replaces FLA's operators by those of gla_ext, wherever they were imported, and restores them."""

from __future__ import annotations

import importlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gla_ext import _C
from gla_ext.fla import layers, simple
from gla_ext.fla.activations import needs_torch
from gla_ext.layers import swiglu

__all__ = ["accelerate_fla", "is_accelerated", "restore_fla"]

_MAX_CUDA_SIZE = 1024
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)

_lock = threading.RLock()
_originals: dict[str, Callable] = {}
_warned: set[tuple[str, str]] = set()
_old_gpus: set[int] = set()
_layers_before: list[tuple[Any, str, Any]] | None = None  # the result of `layers.replace`


def accelerate_fla() -> None:
    """Replaces FLA's GLA operators, wherever they were imported, by those of gla_ext.

    - `chunk_gla`, `fused_chunk_gla` and `fused_recurrent_gla` are replaced in every loaded module
      that holds them, including the layers of other models and the caller's own modules, and in the
      modules from which later imports take them. References elsewhere (in a closure, as a default
      argument) stay FLA's.
    - Operators with one gate per head, or none, are replaced too: `chunk_simple_gla`,
      `chunk_retention`, `chunk_lightning_attn`, `chunk_linear_attn` and their fused_chunk and
      fused_recurrent forms, and so the layers that call them (`SimpleGatedLinearAttention`,
      `MultiScaleRetention`, `LinearAttention`, `YOCOGatedRetention`). This requires that the
      installed FLA has them with 0.6.0's arguments.
    - A call that gla_ext does not support runs FLA's code; a warning is given once for each reason.
    - `FusedRMSNormGated` without a residual becomes gla_ext's operator, `rms_norm` of
      `gla_ext.layers.norms`, where this build has kernels. `RMSNorm` without a bias becomes
      `rms_norm_residual` where gradients are computed. It norms the sum as it is stored, FLA's
      norms the sum before rounding. Inside `torch.compile`, where FLA's kernels would break the
      graph, this `RMSNorm` is plain torch operations.
    - On a CPU and inside `torch.compile`, `ShortConvolution` (with SiLU) becomes gla_ext's
      operator, where this build has kernels. It returns the next cache and does not overwrite the
      given one. There, `swiglu` and `swiglu_linear`, and so the MLPs of FLA's models, become
      gla_ext's operators, and the activations of existing and future `GatedLinearAttention` layers
      become plain torch operations. Inside `torch.compile` so does the unpadding of that layer,
      which then compiles into one graph. Elsewhere these stay FLA's.
    - On a CPU `FusedCrossEntropyLoss` and `FusedLinearCrossEntropyLoss` are plain torch operations,
      so that FLA's GLA models train and generate there.
    - `generate` of FLA's models gets the cache, which transformers 5.24 passes as `cache`.
    - FLA's `Attention`, in hybrid models, needs the package flash_attn. If that is missing,
      gla_ext's functions, based on torch's kernels, replace its functions until `restore_fla`. Call
      `accelerate_fla` before such a model is built. On a CPU its rotary embedding is torch's
      operations.
    - `chunk_gla` and FLA's `GatedLinearAttention` accept `cp_context`, gla_ext's or FLA's own,
      which FLA's versions do not: see `gla_ext.distributed`.
    - FLA's layers in mode 'fused_chunk' still raise NotImplementedError: their call passes neither
      `cu_seqlens` nor the layout of the state.

    A second call also replaces FLA's functions in modules and layers that were loaded since the
    first. It may be called from any thread.

    Raises:
        ImportError: if FLA is not installed, or cannot be imported.
        NotImplementedError: if this version of FLA has other signatures; nothing is replaced then.
    """
    global _layers_before
    with _lock:
        if _layers_before is None:
            _find_originals()
            _find_old_gpus()
            _layers_before = layers.replace(_has_kernels)
        layers.replace_in_layers()
        _swap({id(original): _REPLACEMENTS[name] for name, original in _originals.items()})


def restore_fla() -> None:
    """Undoes `accelerate_fla` if it was called: every module holds FLA's functions again."""
    global _layers_before
    with _lock:
        if _layers_before is not None:
            _swap({id(_REPLACEMENTS[name]): original for name, original in _originals.items()})
            layers.put_back(_layers_before)
            _layers_before = None


def is_accelerated() -> bool:
    """Whether gla_ext's operators are now in place of FLA's."""
    return _layers_before is not None


def _fused_chunk_gla(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """`chunk_gla`, which FLA's `fused_chunk_gla` tells its callers to use."""
    return _REPLACEMENTS["chunk_gla"](*args, **kwargs)


def _run(
    name: str,
    ours: Callable,
    operands: tuple[Tensor, Tensor, Tensor],
    gates: dict[str, Tensor | None],
    arguments: dict[str, Any],
    ignored: dict[str, Any],
    unknown: dict[str, Any],
) -> Any:
    """Runs an operator of gla_ext, or FLA's if gla_ext does not support the call."""
    if name == "chunk_gla" and "cp_context" in unknown:  # which FLA's function lacks
        if unknown["cp_context"] is not None:
            return _call(ours, *operands, **gates, **arguments, **unknown)
        del unknown["cp_context"]
    q, state = operands[0], arguments["initial_state"]
    pair = state if isinstance(state, tuple) else (state,)
    scale, cu_seqlens = arguments["scale"], arguments["cu_seqlens"]
    others = unknown if name == "chunk_gla" else unknown.keys() - {"transpose_state_layout"}
    why_not = _why_not(*operands, tuple(gates.values()), scale, pair[0], cu_seqlens, others)
    if why_not is None and gates.get("g") is not None and gates.get("g_gamma") is not None:
        why_not = "g and g_gamma in one call"
    if why_not is None and name == "chunk_gla" and state is not None and not _fits(state, q):
        why_not = f"an initial_state in {state.dtype}"
    if why_not is not None:
        _warn_once(name, why_not)
        return _originals[name](*operands, **gates, **arguments, **ignored, **unknown)
    if state is not None:  # FLA accepts any dtype
        wide = torch.promote_types(q.dtype, torch.float32)
        pair = tuple(x if x is None else x.to(wide) for x in pair)
        arguments["initial_state"] = pair if isinstance(state, tuple) else pair[0]
    return _call(ours, *operands, **gates, **arguments, **unknown)


def _swiglu(x: Tensor, y: Tensor) -> Tensor:
    """`fla.modules.activations.swiglu`, by gla_ext where FLA's kernel cannot run."""
    ours = needs_torch(x) and _has_kernels(x)
    return (swiglu.swiglu if ours else _originals["swiglu"])(x, y)


def _swiglu_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`fla.modules.activations.swiglu_linear`, by gla_ext where FLA's kernel cannot run."""
    ours = needs_torch(x) and _has_kernels(x)
    return (swiglu.swiglu_linear if ours else _originals["swiglu_linear"])(x, y, weight, bias)


_REPLACEMENTS = {
    "fused_chunk_gla": _fused_chunk_gla,
    "swiglu": _swiglu,
    "swiglu_linear": _swiglu_linear,
} | simple.replacements(_run)
_HOMES = {
    "chunk_gla": "fla.ops.gla.chunk",
    "fused_chunk_gla": "fla.ops.gla.fused_chunk",
    "fused_recurrent_gla": "fla.ops.gla.fused_recurrent",
    "swiglu": "fla.modules.activations",
    "swiglu_linear": "fla.modules.activations",
}


def _find_originals() -> None:
    """Imports FLA and stores its functions, after a check of their arguments."""
    try:
        originals = {
            name: getattr(importlib.import_module(home), name) for name, home in _HOMES.items()
        }
    except ImportError as error:
        raise ImportError(
            "accelerate_fla: flash-linear-attention cannot be imported "
            f"({error}); pip install flash-linear-attention"
        ) from error
    for name in ("chunk_gla", "fused_recurrent_gla"):
        expected, found = simple.arguments(name), simple.arguments_of(originals[name])
        if found != expected:
            raise NotImplementedError(
                f"accelerate_fla: expected FLA's {name} to take {', '.join(expected)}, as in FLA "
                f"0.5.2 and 0.6.0; this one takes {', '.join(found)}"
            )
    _originals.update(originals)
    for name, home in simple.HOMES.items():
        try:
            function = getattr(importlib.import_module(home), name)
        except (ImportError, AttributeError):
            continue  # this FLA has it elsewhere, or lacks it
        if simple.arguments_of(function) == simple.arguments(name):
            _originals[name] = function


def _find_old_gpus() -> None:
    """Finds the GPUs that gla_ext's kernels do not support; this cannot be queried in a graph."""
    if torch.cuda.is_available():
        gpus = range(torch.cuda.device_count())
        _old_gpus.update(i for i in gpus if torch.cuda.get_device_capability(i) < (8, 0))


def _swap(functions: dict[int, Callable]) -> None:
    """Replaces, in every loaded module, the functions with the given ids."""
    for module_name, module in list(sys.modules.items()):
        if module is sys.modules[__name__] or not isinstance(module, ModuleType):
            continue
        for name, value in list(vars(module).items()):
            function = functions.get(id(value))
            if function is None:
                continue
            if function is _fused_chunk_gla and module_name.startswith("fla.layers."):
                continue  # see accelerate_fla
            vars(module)[name] = function


def _why_not(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: tuple[Tensor | None, ...],
    scale: float | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    unknown: Iterable[str],
) -> str | None:
    """Why gla_ext does not support a call, or None. The operators check shapes themselves."""
    if unknown:
        return f"the keyword {min(unknown)}"
    if scale is not None and not isinstance(scale, int | float):
        return f"a scale of {type(scale)}"
    device, dtype = q.device, q.dtype
    on_cpu = device.type == "cpu"
    if not on_cpu and device.type != "cuda":
        return f"a tensor on {device.type}"
    for x in (q, k, v, *gates, initial_state, cu_seqlens):
        if x is None:
            continue
        if type(x) is not Tensor and type(x).__name__ == "DTensor":
            return "a DTensor"
        if x.device != device:
            return "tensors on several devices"
    if k.dtype != dtype or v.dtype != dtype:
        return f"q, k and v in {dtype}, {k.dtype} and {v.dtype}"
    if dtype not in _FLOATS and not (on_cpu and dtype == torch.float64):
        return f"{dtype} on {device.type}"
    for gate in gates:
        if gate is not None and not _fits(gate, q):
            return f"a gate in {gate.dtype} beside q in {dtype}"
    if cu_seqlens is not None and cu_seqlens.dtype not in (torch.int32, torch.int64):
        return f"cu_seqlens in {cu_seqlens.dtype}"
    if on_cpu:
        return None
    if _has_no_cuda:
        return "CUDA in this build of gla_ext"
    if device.index in _old_gpus:
        return "a GPU below compute capability 8.0"
    if max(q.shape[-1], v.shape[-1]) > _MAX_CUDA_SIZE:
        return f"K or V above {_MAX_CUDA_SIZE}"
    return None


def _has_kernels(x: Tensor) -> bool:
    """Whether this build has kernels for x's device."""
    if x.device.type == "cuda":
        return not _has_no_cuda and x.device.index not in _old_gpus
    return x.device.type == "cpu"


_has_no_cuda = _C.build_info()["cuda"] is None


def _fits(x: Tensor, q: Tensor) -> bool:
    """Whether the operators accept a gate or a state of x's dtype together with q."""
    return x.dtype in (_FLOATS if q.dtype in _FLOATS else (q.dtype,))


def _call(operator: Callable, q: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Calls an operator with autocast off: FLA's operators compute in the dtype of their inputs."""
    if not torch.is_autocast_enabled(q.device.type):
        return operator(q, *args, **kwargs)
    with torch.autocast(q.device.type, enabled=False):
        return operator(q, *args, **kwargs)


@torch.compiler.disable
def _warn_once(name: str, why_not: str) -> None:
    """Warns that a call runs FLA's code, once for each reason."""
    with _lock:
        if (name, why_not) in _warned:
            return
        _warned.add((name, why_not))
    warnings.warn(
        f"{name} runs FLA's kernels where gla_ext does not support the call: {why_not}",
        stacklevel=5,  # the caller's line, outside of the wrappers
    )
