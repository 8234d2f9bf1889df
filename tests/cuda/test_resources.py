"""No kernel of the built extension spills registers, keeps an array in local memory, or waits for
warpgroups' products one by one."""

import re
import subprocess

import pytest
from cuda_tools import built_for_hopper, find_tool

from gla_ext import _C

FUNCTION = re.compile(r"Function (\S+?):\s+(REG:.*)")


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


def waits_for_products(sass: str) -> dict[str, float]:
    """Waits a product of every kernel of cuobjdump -sass that has warpgroup products."""
    kernels = (part.split(None, 1) for part in sass.split("Function : ")[1:])
    counts = {name: (body.count("HGMMA"), body.count("WARPGROUP.DEPBAR")) for name, body in kernels}
    return {name: waits / products for name, (products, waits) in counts.items() if products}


def cuobjdump_of_extension(*options: str) -> str:
    if _C.build_info()["cuda"] is None:
        pytest.skip("this build of gla_ext has no CUDA kernels")
    if (tool := find_tool("cuobjdump")) is None:
        pytest.skip("no cuobjdump on the PATH, in a CUDA toolkit or in Triton's package")
    result = subprocess.run([tool, *options, _C.__file__], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def dump() -> str:
    return cuobjdump_of_extension("--dump-resource-usage")


def test_no_kernel_uses_local_memory(dump):
    assert len(resources(dump)) >= 10  # there are ten steps
    assert not in_local_memory(dump)


@pytest.mark.slow
def test_products_are_not_waited_for_one_by_one(dump):
    """ptxas serialises all of a kernel's products where it runs out of registers for one of them,
    and says so nowhere but in verbose output (C7510 to C7512)."""
    if not built_for_hopper():
        pytest.skip("this build of gla_ext has no kernels for 9.0a")
    kernels = [name for name in resources(dump) if "4sm90" in name]
    waits = waits_for_products(
        cuobjdump_of_extension("-sass", "-arch", "sm_90a", "-fun", ",".join(kernels))
    )
    assert len(waits) >= 10
    assert {name: x for name, x in waits.items() if x > 0.5} == {}
