"""No kernel of the built extension spills registers or keeps an array in local memory."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gla_ext import _C

FUNCTION = re.compile(r"Function (\S+?):\s+(REG:.*)")


def cuobjdump() -> str | None:
    """From the PATH, a CUDA toolkit, or Triton's package."""
    folders = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"]
    try:
        import triton
    except ImportError:
        pass
    else:
        folders.append(Path(triton.__file__).parent / "backends" / "nvidia" / "bin")
    places = [None, *map(str, folders)]
    return next(filter(None, (shutil.which("cuobjdump", path=p) for p in places)), None)


def resources(dump: str) -> dict[str, dict[str, int]]:
    """REG, STACK, SHARED and LOCAL of every kernel in the output of --dump-resource-usage."""
    return {
        name: {key: int(value) for key, value in re.findall(r"(\w+)(?:\[0\])?:(\d+)", row)}
        for name, row in FUNCTION.findall(dump)
    }


def in_local_memory(dump: str) -> dict[str, dict[str, int]]:
    """Kernels with a stack, where registers are spilled to and arrays lie, or with static local
    memory."""
    return {name: x for name, x in resources(dump).items() if x["STACK"] or x["LOCAL"]}


DUMP = """
 Function _Z6spillsPfi:
  REG:32 STACK:256 SHARED:0 LOCAL:0 CONSTANT[0]:540 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function _Z4finePf:
  REG:8 STACK:0 SHARED:16 LOCAL:0 CONSTANT[0]:536 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


def test_a_spill_is_seen():
    assert set(resources(DUMP)) == {"_Z6spillsPfi", "_Z4finePf"}
    assert set(in_local_memory(DUMP)) == {"_Z6spillsPfi"}


@pytest.fixture(scope="module")
def dump() -> str:
    if _C.build_info()["cuda"] is None:
        pytest.skip("this build of gla_ext has no CUDA kernels")
    if (tool := cuobjdump()) is None:
        pytest.skip("no cuobjdump on the PATH, in a CUDA toolkit or in Triton's package")
    command = [tool, "--dump-resource-usage", _C.__file__]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_no_kernel_uses_local_memory(dump):
    assert len(resources(dump)) >= 10  # there are ten steps
    assert not in_local_memory(dump)
