"""The facts about a model that a captured step depends on, as a value to compare later.

A CUDA graph replays kernels: it follows changes in the memory that they read, but no change in what
Python would do. `refresh` keeps a graph if a capture would now give the same graph.
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

_EXACT = frozenset(  # types whose values can be compared with ==
    {bool, int, str, bytes, complex, type(None), type(...), range}
    | {torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format}
)
_OWNERS = (types.NoneType, types.ModuleType, type)  # owners of builtins that hold no values
_MOST_HOST_VALUES = 16  # largest tensor that a step may read on the host
_DEEPEST = 8  # nesting of lists, so that a list that contains itself ends

# nn.Module's own attributes: of these a call reads only modules, tensors and hooks.
_OF_NN_MODULE = frozenset(vars(nn.Module())) - {"training"} | {"_compiled_call_impl"}


class _UnknownError(Exception):
    """The model holds something that may change a step and cannot be compared."""


def graph_key(model: nn.Module) -> list[Any] | None:
    """All facts that a captured step of the model depends on and that may change, except autocast.

    For every module: its type and the members of its classes, its own forward, its hooks, the
    addresses of its tensors, and its plain values. Plain values are numbers, strings, flags,
    dtypes, enums, functions without a closure, dataclasses and configurations of these, and
    containers of all these. Values that functions read from elsewhere, such as globals, are not
    included.

    Returns:
        A value that is equal for two calls if the step is the same. It keeps neither the model nor
        a part of it alive. None if a module holds anything else.
    """
    try:
        return [_modes(), *_Key(model).modules()]
    except _UnknownError:
        return None


class GraphKeys:
    """The keys of a model at the captures of its graphs; it may have changed between captures."""

    def __init__(self) -> None:
        self._keys: list[Any] = []

    def add(self, model: nn.Module) -> None:
        """Records that a graph of the model in its present state is captured."""
        key = graph_key(model)
        if key is None or key not in self._keys:
            self._keys.append(key)

    def fit(self, model: nn.Module) -> bool:
        """Whether captures of the model in its present state would give the same graphs."""
        if not self._keys:
            return True
        key = graph_key(model)
        return key is not None and self._keys == [key]


def _modes() -> list[Any]:
    """Settings of the whole process or thread."""
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
    """The part of the key that depends on the model's modules."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = {id(model): model}
        waiting = [model]
        while waiting:  # like model.modules(), but faster
            for child in waiting.pop()._modules.values():
                if child is not None and id(child) not in self._modules:
                    self._modules[id(child)] = child
                    waiting.append(child)
        self._device = next(model.parameters()).device
        self._classes: dict[type, Any] = {}

    def modules(self) -> list[Any]:
        # One flat list: thousands of small ones would trigger the garbage collector.
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
        # Only their ids: they do nothing here, but a module with such a hook must be called.
        found += *state["_backward_pre_hooks"], *state["_backward_hooks"]
        compiled = module._compiled_call_impl
        found.append(None if compiled is None else weakref.ref(compiled))

    def _class(self, kind: type) -> list[Any]:
        """A module's type, and all current members of its classes."""
        found: list[Any] = [weakref.ref(kind)]
        for owner in kind.__mro__[:-1]:  # except object
            members = vars(owner)
            if members.get("__slots__"):
                raise _UnknownError  # vars() of an instance does not show values in slots
            for name, value in members.items():
                if not name.startswith("__") or name in ("__call__", "__getattr__"):
                    found += name, self._member(value)
        return found

    def _member(self, value: Any) -> Any:
        """A comparable key for a member of a class. A function is identified by its object, so the
        values in its closure are not compared. Other members are compared by value, or by id if
        that fails.
        """
        if isinstance(value, (classmethod, staticmethod)):
            value = value.__func__
        if isinstance(value, types.FunctionType):
            return weakref.ref(value)
        try:
            return type(value), self._value(value)
        except _UnknownError:
            return id(value)

    def _value(self, value: Any, depth: int = 0) -> Any:
        """A comparable key for an attribute's value, or for an element of one."""
        kind = type(value)
        if kind in _EXACT:
            return kind, value
        if kind is float:
            return kind, value.hex()  # distinguishes -0.0 from 0.0, and makes NaN equal to itself
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
            return id(value)  # the module has its own entry in the key
        if kind is types.MethodType and id(value.__self__) in self._modules:
            return id(value.__self__), self._function(value.__func__, depth)
        if _is_configuration(value):
            return weakref.ref(kind), self._value(vars(value), depth + 1)
        return self._function(value, depth)

    def _function(self, function: Any, depth: int) -> Any:
        """A key for a function that always does the same: its identity and its arguments' defaults.

        Raises:
            _UnknownError: for functions that hold values, such as closures and bound methods.
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
        """A tensor's address and layout, or the values of a tensor that a step would read on the
        host.
        """
        if type(x) not in (Tensor, nn.Parameter) or x.layout is not torch.strided:
            raise _UnknownError  # the data may be elsewhere
        if x.device == self._device or x.is_cuda:
            return x.data_ptr(), x.dtype, x.shape, x.stride()
        if x.device.type != "cpu" or x.numel() > _MOST_HOST_VALUES:
            raise _UnknownError
        return x.dtype, x.shape, repr(x.tolist())


def _is_configuration(value: Any) -> bool:
    """Whether vars() shows all values of an object, as for a dataclass or a configuration of
    transformers.
    """
    if dataclasses.is_dataclass(value):
        slots = (vars(owner).get("__slots__") for owner in type(value).__mro__)
        return hasattr(value, "__dict__") and not any(slots)
    transformers = sys.modules.get("transformers")
    kinds = ("PretrainedConfig", "GenerationConfig") if transformers is not None else ()
    return isinstance(value, tuple(getattr(transformers, kind) for kind in kinds))
