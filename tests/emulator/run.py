"""Runs Python with the emulated GPU in the place of a real one:

    python tests/emulator/run.py -m pytest -p emulated -m sanitizer

Compiles the emulator and takes the kernels' PTX out of the extension, each where it is out of date.
The extension must be built for 9.0a+PTX (TORCH_CUDA_ARCH_LIST). See README.md beside this file.
"""

import fcntl
import functools
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch.utils.cpp_extension import CUDA_HOME

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
OUT = ROOT / ".build" / "emulator"
COMPILER = os.environ.get("CXX", "c++")
# Built where it runs; contraction would round other than the GPU does.
FLAGS = ["-std=c++20", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-Wall", "-Wextra"]
# Not of the program that runs one kernel.
OF_THE_LIBRARY = ("cudart.cpp", "allocations.cpp", "streams.cpp", "driver.cpp")


def alone(build):
    """Of several processes one builds at a time: another would run what is half written."""

    @functools.wraps(build)
    def waits():
        OUT.mkdir(parents=True, exist_ok=True)
        with open(OUT / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return build()

    return waits


def newer(target: Path, *sources: Path) -> bool:
    """Whether the target is there, and no source has changed since."""
    return target.exists() and target.stat().st_mtime > max(s.stat().st_mtime for s in sources)


def run(*command: str | Path) -> None:
    result = subprocess.run([str(x) for x in command], capture_output=True, text=True)
    if result.returncode != 0:
        raise SystemExit(f"{command[0]} failed:\n{result.stderr}")
    sys.stderr.write(result.stderr)  # warnings


def compile_objects() -> dict[str, Path]:
    """The emulator's objects by source file."""
    headers = list(FOLDER.glob("*.h"))

    def compile_one(source: Path) -> Path:
        target = OUT / f"{source.stem}.o"
        if not newer(target, source, *headers):
            include = f"-I{CUDA_HOME}/include"
            run(COMPILER, *FLAGS, include, "-c", source, "-o", target)
        return target

    sources = sorted(FOLDER.glob("*.cpp"))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources))
    return {s.name: o for s, o in zip(sources, objects, strict=True)}


def link(target: Path, objects: list[Path], *flags: str) -> Path:
    if not newer(target, *objects):
        run(COMPILER, *flags, *objects, "-o", target)
    return target


@alone
def library() -> Path:
    """What stands for the CUDA runtime, and by its name for the driver too."""
    objects = compile_objects()
    del objects["main.cpp"]
    name = "-Wl,-soname,libcuda.so.1"
    return link(OUT / "libemulator.so", list(objects.values()), "-shared", name)


@alone
def program() -> Path:
    """What runs one kernel of a .ptx file."""
    objects = compile_objects()
    parts = [o for name, o in objects.items() if name not in OF_THE_LIBRARY]
    return link(OUT / "emulate", parts)


@alone
def kernels() -> Path:
    """The PTX of the extension's kernels."""
    sys.path[:0] = [str(ROOT), str(FOLDER.parent / "helpers")]
    from cuda_tools import find_tool

    from gla_ext import _C

    if "9.0a+PTX" not in _C.build_info()["cuda_archs"]:
        raise SystemExit(
            "tests/emulator/run.py: expected an extension built for 9.0a+PTX "
            "(TORCH_CUDA_ARCH_LIST), got one for "
            + (", ".join(_C.build_info()["cuda_archs"]) or "no GPU")
        )
    if (tool := find_tool("cuobjdump")) is None:
        raise SystemExit("tests/emulator/run.py: no cuobjdump on the PATH or in a CUDA toolkit")
    target, extension = OUT / "kernels.ptx", Path(_C.__file__)
    if not newer(target, extension):
        text = subprocess.run([tool, "-ptx", extension], capture_output=True, check=True).stdout
        target.write_bytes(text)
    return target


def main() -> None:
    if CUDA_HOME is None or not shutil.which(COMPILER):
        raise SystemExit("tests/emulator/run.py: needs a C++ compiler and a CUDA toolkit's headers")
    environment = {
        "LD_PRELOAD": str(library()),
        "GLA_EMULATOR_PTX": str(kernels()),
        # Every tensor an allocation of its own, beyond which nothing may be read or written.
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        # Few, so that small batches fill them.
        "GLA_EMULATOR_PROCESSORS": os.environ.get("GLA_EMULATOR_PROCESSORS", "16"),
    }
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], os.environ | environment)


if __name__ == "__main__":
    main()
