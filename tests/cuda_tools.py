"""Where programs of the CUDA toolkit are, and what the extension was built for."""

import os
import shutil
from pathlib import Path

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
