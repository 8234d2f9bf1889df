"""CUDA: where the toolkit is, what the extension was built for, what calls allocate and may."""

import contextlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from gla_ext import _C


def find_tool(name: str) -> str | None:
    """From the PATH, a CUDA toolkit, or Triton's package, which has the disassemblers."""
    folders = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"]
    try:
        import triton
    except ImportError:
        pass
    else:
        folders.append(Path(triton.__file__).parent / "backends" / "nvidia" / "bin")
    places = [None, *map(str, folders)]
    return next(filter(None, (shutil.which(name, path=p) for p in places)), None)


def built_for_hopper() -> bool:
    """Whether the build has the kernels of compute capability 9.0a."""
    return any(arch.removesuffix("+PTX") == "9.0a" for arch in _C.build_info()["cuda_archs"])


def backward_in_this_thread():
    """For memory: torch's thread of a device may hold a call's gradients, and what waited for it, a
    moment longer than the call takes.
    """
    return torch.autograd.set_multithreading_enabled(False)


def requested_bytes() -> int:
    """What tensors hold on the GPU, without what blocks of torch's cache are larger by."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def peak_bytes(call: Callable[[], object]) -> int:
    """The most that a call allocates beside what was there."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with backward_in_this_thread():
        call()
    return torch.cuda.max_memory_allocated() - before


@contextlib.contextmanager
def waits_for_nothing():
    """Inside, a wait of the host for the GPU that torch knows of is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextlib.contextmanager
def gpu_of(size: int):
    """A GPU with `size` bytes for this process, beside what CUDA graphs of other tests hold."""
    torch.cuda.empty_cache()
    size += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(min(1.0, size / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


def launched(call) -> tuple[list[str], tuple[torch.Tensor, ...]]:
    """The kernels that call() launches, but torch's own, by plan names, and what it returns."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        results = call()
        torch.cuda.synchronize()
    names = [e.name for e in profile.events() if "gla_ext::cuda::" in e.name]
    return [kernel_of(name) for name in names], results


def kernel_of(name: str) -> str:
    """A profiler's name of a kernel as plans have it, without what stands behind for a variant."""
    path = re.match(r"(?:void )?gla_ext::cuda::(?:sm90::|steps::)?([\w:]+)", name).group(1)
    return path.removesuffix("::kernel").replace("::", ".")


def move(t):
    """To the GPU, copied, not computed: initcheck sees copies write. Strides and alignment stay."""
    if t is None:
        return None
    extent = 1 + sum(s * (n - 1) for n, s in zip(t.shape, t.stride(), strict=True))
    start = t.storage_offset() if t.numel() else 0
    flat = t.as_strided((start + extent,), (1,), 0) if t.numel() else t.flatten()
    return flat.to("cuda").as_strided(t.shape, t.stride(), start)
