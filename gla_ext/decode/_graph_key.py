"""What a captured step has taken in of a model, as a value that can be compared later.

A CUDA graph replays kernels: it sees what changes in the memory that they read, and nothing that
Python would now do otherwise. `refresh` keeps one that would be captured the same now.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import os
import sys
import types
import weakref
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from gla_ext.ops.chunk import is_batch_invariant

_EXACT = frozenset(  # whose values are all there is to them
    {bool, int, str, bytes, complex, type(None), type(...), range}
    | {torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format}
)
_OWNERS = (types.NoneType, types.ModuleType, type)  # of builtins that hold no values
_MOST_HOST_VALUES = 16  # of a tensor that a step reads on the host
_DEEPEST = 8  # of lists in lists; also the end of a list that holds itself

# What nn.Module has of its own: of it a call reads modules, tensors and hooks.
_OF_NN_MODULE = frozenset(vars(nn.Module())) - {"training"} | {"_compiled_call_impl"}


class _UnknownError(Exception):
    """Something that may change a step and that cannot be compared."""


def graph_key(model: nn.Module) -> list[Any] | None:
    """All that a captured step of the model depends on and that may be otherwise by the next call,
    but for autocast.

    Of every module: its type with what its classes define, its own forward, its hooks, the places
    of its tensors, and the plain values that it holds: numbers, strings, flags, dtypes, enums,
    functions without a closure, dataclasses and configurations of these, and containers of all
    that. What functions read elsewhere, in globals, is not seen.

    Returns:
        A value that equals the one of another call if the step is the same. It keeps neither the
        model nor a part of it alive. None where a module holds anything else.
    """
    try:
        return [_modes(), *_Key(model).modules()]
    except _UnknownError:
        return None


class GraphKeys:
    """The keys that a model had when its graphs were captured; it may have changed in between."""

    def __init__(self) -> None:
        self._keys: list[Any] = []

    def add(self, model: nn.Module) -> None:
        """Notes that a graph of the model, as it is now, is captured."""
        key = graph_key(model)
        if key is None or key not in self._keys:
            self._keys.append(key)

    def fit(self, model: nn.Module) -> bool:
        """Whether the model, as it is now, would give the same graphs."""
        if not self._keys:
            return True
        key = graph_key(model)
        return key is not None and self._keys == [key]


def _modes() -> list[Any]:
    """What holds for the whole process or thread."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return [
        is_batch_invariant(),
        matmul.fp32_precision,
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_fp16_reduced_precision_reduction,
        (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.conv.fp32_precision),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        os.environ.get("GLA_EXT_CUDA_PATH"),
    ]


class _Key:
    """The part of the key that a model's modules make."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = {id(model): model}
        waiting = [model]
        while waiting:  # as model.modules(), which takes longer
            for child in waiting.pop()._modules.values():
                if child is not None and id(child) not in self._modules:
                    self._modules[id(child)] = child
                    waiting.append(child)
        self._device = next(model.parameters()).device
        self._classes: dict[type, Any] = {}

    def modules(self) -> list[Any]:
        # One flat list: thousands of small ones would set off the garbage collector.
        every = torch.nn.modules.module
        hooks = (every._global_forward_pre_hooks, every._global_forward_hooks)
        found = [self._value(dict(x)) for x in hooks]
        for module in self._modules.values():
            self._module(module, found)
        return found

    def _module(self, module: nn.Module, found: list[Any]) -> None:
        state, kind = vars(module), type(module)
        if kind not in self._classes:
            self._classes[kind] = self._class(kind)
        found.append(self._classes[kind])
        for name, value in state.items():
            if name not in _OF_NN_MODULE:
                kind = type(value)
                found += name, kind, value if kind in _EXACT else self._value(value)
        if children := state["_modules"]:
            found += *children, *map(id, children.values())
        for tensors in (state["_parameters"], state["_buffers"]):
            for name, x in tensors.items():
                found.append(name)
                found += (None,) if x is None else self._tensor(x)
        for hooks in (state["_forward_pre_hooks"], state["_forward_hooks"]):
            found.append(self._value(hooks) if hooks else None)
        # Their numbers: they do nothing here, but a module that has one is called.
        found += *state["_backward_pre_hooks"], *state["_backward_hooks"]
        compiled = module._compiled_call_impl
        found.append(None if compiled is None else weakref.ref(compiled))

    def _class(self, kind: type) -> list[Any]:
        """A module's type, and all that its classes define by now."""
        found: list[Any] = [weakref.ref(kind)]
        for owner in kind.__mro__[:-1]:  # but object
            members = vars(owner)
            if members.get("__slots__"):
                raise _UnknownError  # values that vars() of an instance does not show
            for name, value in members.items():
                if not name.startswith("__") or name in ("__call__", "__getattr__"):
                    found += name, self._member(value)
        return found

    def _member(self, value: Any) -> Any:
        """What a class defines: a function, whatever it closes over, by identity."""
        if isinstance(value, (classmethod, staticmethod)):
            value = value.__func__
        if isinstance(value, types.FunctionType):
            return weakref.ref(value)
        try:
            return type(value), self._value(value)
        except _UnknownError:
            return id(value)

    def _value(self, value: Any, depth: int = 0) -> Any:
        """An attribute's value, or an element's."""
        kind = type(value)
        if kind in _EXACT:
            return kind, value
        if kind is float:
            return kind, value.hex()  # tells -0.0 from 0.0, and knows a NaN again
        if depth > _DEEPEST:
            raise _UnknownError
        if kind in (list, tuple):
            return kind, [self._value(x, depth + 1) for x in value]
        if kind in (dict, OrderedDict):
            return kind, self._value([*value], depth), self._value([*value.values()], depth)
        if kind in (set, frozenset):
            return kind, sorted(map(repr, self._value([*value], depth)[1]))
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, enum.Enum):
            return weakref.ref(kind), value.name
        if isinstance(value, type):
            return weakref.ref(value)
        if kind is functools.partial:
            return kind, self._value([value.func, value.args, value.keywords], depth)
        if isinstance(value, nn.Module) and id(value) in self._modules:
            return id(value)  # its own entry tells the rest
        if kind is types.MethodType and id(value.__self__) in self._modules:
            return id(value.__self__), self._function(value.__func__, depth)
        if _is_configuration(value):
            return weakref.ref(kind), self._value(vars(value), depth + 1)
        return self._function(value, depth)

    def _function(self, function: Any, depth: int) -> Any:
        """A function that does the same every time, by identity and its arguments' defaults.

        Raises:
            _UnknownError: what holds values of its own, as a closure and a bound method do.
        """
        kind, owner = type(function), getattr(function, "__self__", None)
        if kind is types.FunctionType and function.__closure__ is None:
            defaults = [function.__defaults__, function.__kwdefaults__]
            return weakref.ref(function), self._value(defaults, depth)
        if kind is types.BuiltinFunctionType and isinstance(owner, _OWNERS):
            return id(owner), function.__name__
        if kind is types.MethodType and isinstance(owner, type):
            return weakref.ref(function.__func__), weakref.ref(owner)
        if isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            return str(function)
        raise _UnknownError

    def _tensor(self, x: Tensor) -> tuple[Any, ...]:
        """Where a tensor lies; the values of one that a step would read on the host."""
        if type(x) not in (Tensor, nn.Parameter) or x.layout is not torch.strided:
            raise _UnknownError  # its memory may be elsewhere
        if x.device == self._device or x.is_cuda:
            return x.data_ptr(), x.dtype, x.shape, x.stride()
        if x.device.type != "cpu" or x.numel() > _MOST_HOST_VALUES:
            raise _UnknownError
        return x.dtype, x.shape, repr(x.tolist())


def _is_configuration(value: Any) -> bool:
    """Whether vars() of an object is all that it holds: a dataclass, a configuration of
    transformers.
    """
    if dataclasses.is_dataclass(value):
        slots = (vars(owner).get("__slots__") for owner in type(value).__mro__)
        return hasattr(value, "__dict__") and not any(slots)
    transformers = sys.modules.get("transformers")
    kinds = ("PretrainedConfig", "GenerationConfig") if transformers is not None else ()
    return isinstance(value, tuple(getattr(transformers, kind) for kind in kinds))
