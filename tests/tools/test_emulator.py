"""The emulated GPU (tests/emulator) sees what is wrong with a kernel, and nothing where all is
right."""

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
def emulate(tmp_path_factory):
    """Runs a kernel of faults.cu: the words that it has written, or what is wrong with it."""
    sys.path.insert(0, str(EMULATOR))
    try:
        import run
    finally:
        sys.path.remove(str(EMULATOR))
    ptx = tmp_path_factory.mktemp("faults") / "faults.ptx"
    options = ["-ptx", "-arch=compute_90a", "-std=c++17", f"-I{CSRC}", "-o", ptx]
    result = subprocess.run(
        [NVCC, *options, EMULATOR / "faults.cu"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
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
