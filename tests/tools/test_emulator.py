"""The emulated GPU (tests/emulator) sees what is wrong with a kernel, and nothing where all is
right."""

import importlib
import json
import os
import re
import subprocess
import sys

import pytest
from cuda_tools import find_tool
from source_tree import ROOT

EMULATOR, CSRC = ROOT / "tests" / "emulator", ROOT / "csrc"
NVCC = find_tool("nvcc")
pytestmark = [
    pytest.mark.skipif(NVCC is None, reason="no nvcc on the PATH or in CUDA_HOME"),
    pytest.mark.slow,  # compiles the emulator
]

# Two warps out of order are seen by whoever comes second.
OUT_OF_ORDER = (
    r"(reads|writes) shared byte \d+(, which .* without being waited for| while a copy is on)"
)
FAULTS = {  # what is said of each kernel of faults.cu, and what the right one writes
    "read_of_another_warp": (OUT_OF_ORDER, None),
    "write_over_what_is_read": (OUT_OF_ORDER, None),
    "stay_in_shared_memory": (r"shared memory of 16384 bytes has no 4 at 16384", 1),
    "stay_in_global_memory": (r"global memory at \d+ is nobody's", 1),
    "fence_before_a_product": (r"product or bulk copy reads .* without a proxy fence between", 16),
    "wait_for_a_product": (OUT_OF_ORDER, 16),
    "wait_for_a_bulk_copy": (OUT_OF_ORDER, 7),
    "wait_for_lane_copies": (OUT_OF_ORDER, 9),
    "wait_for_a_bulk_store": (r"ends without waiting for its bulk stores", 3),
    "arrive_at_a_barrier": (r"(?s)all wait for ever.*waits for 1 of 128 arrivals", 1),
    "make_a_barrier": (r"no barrier was made at shared byte", 1),
    "wait_for_another_block": (OUT_OF_ORDER, None),
}


@pytest.fixture(scope="module")
def run():
    """The module that builds the emulator."""
    sys.path.insert(0, str(EMULATOR))
    try:
        return importlib.import_module("run")
    finally:
        sys.path.remove(str(EMULATOR))


@pytest.fixture(scope="module")
def ptx(tmp_path_factory):
    """Of faults.cu."""
    ptx = tmp_path_factory.mktemp("faults") / "faults.ptx"
    options = ["-ptx", "-arch=compute_90a", "-std=c++17", f"-I{CSRC}", "-o", ptx]
    result = subprocess.run(
        [NVCC, *options, EMULATOR / "faults.cu"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return ptx


@pytest.fixture(scope="module")
def emulate(run, ptx):
    """Runs a kernel of faults.cu: the words that it has written, or what is wrong with it."""
    program = run.program()

    def start(kernel: str, seed: int = 0) -> list[int] | str:
        cluster = 2 if "block" in kernel else 1
        numbers = (cluster, 128, cluster, 16384, 128 * cluster)
        result = subprocess.run(
            [program, ptx, kernel, *map(str, numbers)],
            capture_output=True,
            text=True,
            env=os.environ | {"GLA_EMULATOR_SEED": str(seed)},
        )
        assert result.returncode in (0, 1), result.stderr
        return result.stdout if result.returncode else list(map(int, result.stdout.split()))

    return start


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", FAULTS)
def test_what_is_wrong_is_seen_and_what_is_right_passes(name, seed, emulate):
    message, written = FAULTS[name]
    wrong = emulate(f"{name}_wrong", seed)
    assert isinstance(wrong, str), "nothing was seen"
    assert re.search(message, wrong), wrong
    words = emulate(f"{name}_right", seed)
    assert isinstance(words, list), words
    assert written is None or set(words) == {written}


LAUNCHES = """
import ctypes, json, sys
from ctypes import c_int, c_size_t, c_uint, c_void_p

class Dim3(ctypes.Structure):
    _fields_ = [(name, c_uint) for name in "xyz"]

class Attribute(ctypes.Structure):
    _fields_ = [("id", c_int), ("pad", c_int), ("value", c_int), ("rest", ctypes.c_char * 60)]

class Configuration(ctypes.Structure):
    _fields_ = [
        ("grid", Dim3), ("block", Dim3), ("bytes", c_size_t), ("stream", c_void_p),
        ("attributes", ctypes.POINTER(Attribute)), ("count", c_uint),
    ]

runtime = ctypes.CDLL(sys.argv[1])
runtime.cudaGetErrorString.restype = ctypes.c_char_p
out = c_void_p()
runtime.cudaMalloc(ctypes.byref(out), c_size_t(1 << 12))
arguments, functions = (c_void_p * 1)(ctypes.addressof(out)), {}
for name, overlaps, grid, block, bytes, allowed in json.loads(sys.argv[2]):
    if name not in functions:
        function = functions[name] = ctypes.create_string_buffer(name.encode())
        runtime.__cudaRegisterFunction(None, function, None, function, *[None] * 6)
    function = functions[name]
    if allowed:
        runtime.cudaFuncSetAttribute(function, 8, allowed)
    early = Attribute(id=6, value=overlaps)
    configuration = Configuration(
        Dim3(*grid), Dim3(*block), bytes, None, ctypes.pointer(early), 1
    )
    runtime.cudaLaunchKernelExC(ctypes.byref(configuration), function, arguments)
    error = runtime.cudaGetLastError()
    print(runtime.cudaGetErrorString(error).decode().replace("\\n", " ") if error else "starts")
"""


@pytest.fixture
def launch(run, ptx):
    """What the runtime says to launches of kernels of faults.cu in a stream: name, whether it may
    start early, blocks, threads, shared memory, and what of it is allowed before.
    """

    def launch(*launches):
        result = subprocess.run(
            [sys.executable, "-c", LAUNCHES, run.library(), json.dumps(launches)],
            capture_output=True,
            text=True,
            env=os.environ | {"GLA_EMULATOR_PTX": str(ptx)},
        )
        assert result.returncode == 0, result.stderr
        return result.stdout.splitlines()

    return launch


ONE, MANY, ALL_SHARED = (1, 1, 1), (128, 1, 1), 227 << 10
REFUSED = [  # blocks, threads, shared memory and what of it is allowed before, and what is said
    (ONE, MANY, 48 << 10, 0, "starts"),
    (ONE, MANY, 49 << 10, 0, "50176 bytes .*, which cudaFuncSetAttribute has not"),
    (ONE, MANY, 49 << 10, 49 << 10, "starts"),
    (ONE, MANY, 50 << 10, 0, "51200 bytes .*, which cudaFuncSetAttribute has not"),
    (ONE, MANY, 49 << 10, ALL_SHARED + 1, "an error of the emulated GPU"),
    (ONE, MANY, ALL_SHARED, ALL_SHARED, "starts"),
    (ONE, MANY, ALL_SHARED + 1, 0, "232449 bytes .*, of which there are 232448"),
    (ONE, (1025, 1, 1), 16384, 0, "1025 threads a block"),
    ((0, 1, 1), MANY, 16384, 0, "0 x 1 x 1 blocks"),
    ((1, 65536, 1), MANY, 16384, 0, "1 x 65536 x 1 blocks"),
    ((1, 1, 65536), MANY, 16384, 0, "1 x 1 x 65536 blocks"),
]


def test_launches_that_a_gpu_refuses(launch):
    found = launch(*[("stay_in_shared_memory_right", False, *case[:4]) for case in REFUSED])
    for case, said in zip(REFUSED, found, strict=True):
        assert re.search(case[4], said), (case, said)


READ_EARLY = "global memory is read that a kernel before writes, which is not waited for"
EARLY = [  # kernels behind `write`, and what is said of the last
    (["read_behind_wait"], "starts"),
    (["read_behind_wait_of_a_warp"], "starts"),
    (["read_before_wait"], READ_EARLY),
    (["write_before_wait"], "global memory is written before the kernel before is waited for"),
    (["never_wait"], "no block waits for the kernel before"),
    (["release_before_wait", "read_before_wait"], READ_EARLY),
    (["release_behind_wait", "read_before_wait"], "starts"),
    (["release_before_wait", "release_before_wait", "read_before_wait"], READ_EARLY),
    (["read_behind_wait", "read_before_wait"], "starts"),
]


@pytest.mark.parametrize("names, expected", EARLY, ids=[" ".join(x) for x, _ in EARLY])
def test_kernels_that_start_early(launch, names, expected):
    rest = (ONE, MANY, 0, 0)
    *before, last = launch(("write", False, *rest), *[(name, True, *rest) for name in names])
    assert before == ["starts"] * len(names) and expected in last
    *_, last = launch(("write", False, *rest), *[(name, False, *rest) for name in names])
    assert last == "starts"
