"""`pytest -p emulated`: tests marked `cuda` on the emulated GPU of tests/emulator.

gla_ext's own kernels run there; torch's run on the CPU, on the same memory. See
tests/emulator/README.md.
"""

import functools
import os
import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten
# What makes tensors of the right device by itself, and launches nothing.
NATIVE = {aten.empty, aten.empty_strided, aten.empty_like, aten.new_empty, aten.set_, aten.resize_}


def on_cpu(x: torch.Tensor) -> torch.Tensor:
    """The same memory, as a tensor of the CPU."""
    storage = x.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), torch.device("cpu"), storage.nbytes()
    )
    return torch.empty(0, dtype=x.dtype).set_(storage, x.storage_offset(), x.size(), x.stride())


@functools.cache
def generator_on_cpu(generator: torch.Generator) -> torch.Generator:
    """One of the CPU with the same seed, always the same for a generator."""
    return torch.Generator().manual_seed(generator.initial_seed())


def run_on_cpu(function, args, kwargs):
    """A torch operator of CUDA tensors, by the CPU's kernel."""
    originals = {}
    found = False

    def replace(x):
        nonlocal found
        if x.device.type != "cuda":
            return x
        found = True
        copy = on_cpu(x)
        originals[id(copy)] = x, copy
        return copy

    args, kwargs = tree_map_only(torch.Tensor, replace, (args, kwargs))
    generator, device = kwargs.get("generator"), kwargs.get("device")
    if generator is not None and generator.device.type == "cuda":
        kwargs = kwargs | {"generator": generator_on_cpu(generator)}
    if device is not None:
        found = torch.device(device).type == "cuda"
        kwargs = kwargs | {"device": "cpu", "pin_memory": None} if found else kwargs
    results = function(*args, **kwargs)

    def back(x):
        if id(x) in originals:  # written in place
            return originals[id(x)][0]
        if not found or x.device.type != "cpu":
            return x
        moved = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="cuda")
        on_cpu(moved).copy_(x)
        return moved

    return tree_map_only(torch.Tensor, back, results)


class TorchOnCPU(TorchDispatchMode):
    """Sends torch's operators of CUDA tensors to the CPU, but for views, which launch nothing."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        ours = function.namespace not in ("aten", "_c10d_functional")
        if ours or function.is_view or function.overloadpacket in NATIVE:
            return function(*args, **kwargs)
        return run_on_cpu(function, args, kwargs)


def override_what_operators_call() -> torch.library.Library:
    """What gla_ext's operators call of torch's, where no mode of Python's sees it."""
    library = torch.library.Library("aten", "IMPL")
    for name in ("copy_", "fill_.Scalar", "fill_.Tensor", "zero_", "sum.dim_IntList", "cat"):
        packet, _, overload = name.partition(".")
        function = getattr(getattr(aten, packet), overload or "default")
        library.impl(
            name,
            lambda *args, _function=function, **kwargs: run_on_cpu(_function, args, kwargs),
            "CUDA",
        )
    return library


def pytest_configure(config):
    assert "GLA_EMULATOR_PTX" in os.environ, "run by tests/emulator/run.py"
    assert torch.cuda.get_device_name() == "emulated GPU"
    with warnings.catch_warnings():  # that kernels are overridden
        warnings.simplefilter("ignore")
        config.gla_library = override_what_operators_call()


@pytest.fixture(autouse=True)
def torch_on_cpu():
    with TorchOnCPU():
        yield
