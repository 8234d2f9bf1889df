"""FLA's operators and the gla_ext operators that replace them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from gla_ext.ops import chunk, linear_attn, recurrent, simple_gla

# For operators with one gate per head, or none: the module, such as fla.ops.simple_gla.fused_chunk.
# Another version of FLA may have the operator elsewhere.
HOMES = {
    f"{form}_{name}": f"fla.ops.{name}.{form}"
    for name in ("simple_gla", "retention", "lightning_attn", "linear_attn")
    for form in ("chunk", "fused_chunk", "fused_recurrent")
    if (form, name) != ("fused_chunk", "lightning_attn")
}
# Keywords of FLA that only affect how its kernels compute.
_IGNORED = ("chunk_size", "cu_seqlens_cpu")

Run = Callable[..., Any]


# Arguments after q, k and v, in FLA's order, with their defaults.
_REQUIRED = object()
_GATE_NAMES = ("g", "g_gamma", "gk", "gv")
_GATES = {"g": None, "g_gamma": None}
_STATE = {"scale": None, "initial_state": None, "output_final_state": False}
_CHUNK = _STATE | {"cu_seqlens": None}
_CHUNK_REVERSE = _STATE | {"reverse": False, "cu_seqlens": None}
_GATED_CHUNK = _STATE | {"state_v_first": False, "cu_seqlens": None}
_RECURRENT = _STATE | {"reverse": False, "state_v_first": False, "cu_seqlens": None}
_LAYER = {"layer_idx": _REQUIRED, "num_layers": _REQUIRED}
_LINEAR = _STATE | {"normalize": True, "cu_seqlens": None}
_LINEAR_REVERSE = _STATE | {"reverse": False, "normalize": False, "cu_seqlens": None}


# name -> (gla_ext's function, its arguments)
_OURS: dict[str, tuple[Callable, dict[str, Any]]] = {
    "chunk_gla": (chunk.chunk_gla, {"g": _REQUIRED} | _GATED_CHUNK | {"cu_seqlens_cpu": None}),
    "fused_recurrent_gla": (recurrent.fused_recurrent_gla, {"gk": None, "gv": None} | _RECURRENT),
    "chunk_simple_gla": (simple_gla.chunk_simple_gla, _GATES | _GATED_CHUNK),
    "fused_chunk_simple_gla": (simple_gla.chunk_simple_gla, _GATES | _CHUNK),
    "fused_recurrent_simple_gla": (simple_gla.fused_recurrent_simple_gla, _GATES | _RECURRENT),
    "chunk_retention": (simple_gla.chunk_retention, _CHUNK),
    "fused_chunk_retention": (simple_gla.chunk_retention, _CHUNK),
    "fused_recurrent_retention": (simple_gla.fused_recurrent_retention, _RECURRENT),
    "chunk_lightning_attn": (simple_gla.chunk_lightning_attn, _LAYER | _CHUNK),
    "fused_recurrent_lightning_attn": (
        simple_gla.fused_recurrent_lightning_attn,
        _LAYER | _CHUNK_REVERSE,
    ),
    "chunk_linear_attn": (linear_attn.chunk_linear_attn, _LINEAR),
    "fused_chunk_linear_attn": (linear_attn.chunk_linear_attn, _LINEAR),
    "fused_recurrent_linear_attn": (linear_attn.fused_recurrent_linear_attn, _LINEAR_REVERSE),
}


def arguments(name: str) -> list[str]:
    """Argument names of FLA 0.6.0's function, in order, without **kwargs and ignored ones."""
    return ["q", "k", "v", *(x for x in _OURS[name][1] if x not in _IGNORED)]


def arguments_of(theirs: Callable) -> list[str]:
    """Argument names of a given function, listed in the same way."""
    return [x for x in inspect.signature(theirs).parameters if x not in (*_IGNORED, "kwargs")]


def replacements(run: Run) -> dict[str, Callable]:
    """A function for every name, with FLA's arguments.

    Args:
        run: `run(name, ours, (q, k, v), gates, arguments, ignored, unknown)` calls `ours`, or FLA's
            function of that name if gla_ext does not support the call.
    """
    return {name: _replacement(run, name, *ours) for name, ours in _OURS.items()}


def _replacement(run: Run, name: str, ours: Callable, parameters: dict[str, Any]) -> Callable:
    names = tuple(parameters)

    def operator(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
        if len(args) > len(names):
            raise TypeError(
                f"{name}: expected at most {3 + len(names)} positional arguments, got "
                f"{3 + len(args)}"
            )
        positional = dict(zip(names, args, strict=False))
        twice = sorted(positional.keys() & kwargs.keys())
        if twice:
            raise TypeError(f"{name}: got several values for {', '.join(twice)}")
        given = positional | kwargs
        arguments = {key: given.pop(key, default) for key, default in parameters.items()}
        missing = [key for key, value in arguments.items() if value is _REQUIRED]
        if missing:
            raise TypeError(f"{name}: expected {', '.join(missing)}, got none")
        gates = {key: arguments.pop(key) for key in _GATE_NAMES if key in arguments}
        ignored = {key: x.pop(key) for x in (arguments, given) for key in _IGNORED if key in x}
        return run(name, ours, (q, k, v), gates, arguments, ignored, given)

    operator.__name__ = operator.__qualname__ = name
    operator.__doc__ = f"FLA's `{name}` on gla_ext, or on FLA where gla_ext does not support it."
    return operator
