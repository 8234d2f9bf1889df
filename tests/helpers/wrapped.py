"""A tensor subclass for tests of what takes plain operations."""

import torch


class Wrapped(torch.Tensor):
    """A tensor subclass as DTensor is one: with parts, and what to do with operators."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, *_):
        return Wrapped(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        assert function.namespace == "aten"
        args = (x.inner if isinstance(x, Wrapped) else x for x in args)
        out = function(*args, **(kwargs or {}))
        return Wrapped(out) if isinstance(out, torch.Tensor) else out
