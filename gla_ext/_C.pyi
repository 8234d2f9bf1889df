"""What is not a tensor operator; importing the module registers torch.ops.gla_ext.*"""

from typing import TypedDict

class BuildInfo(TypedDict):
    torch: str
    cuda: str | None
    cuda_archs: list[str]
    cpu_capabilities: list[str]
    openmp: bool
    cxx: str

def build_info() -> BuildInfo:
    """What the extension was built with."""

def cpu_capability() -> str:
    """The CPU capability in use: "DEFAULT", "AVX2" or "AVX512"; follows ATEN_CPU_CAPABILITY."""

def plan(
    B: int,
    T: int,
    H: int,
    K: int,
    V: int,
    N: int | None = None,
    *,
    dtype: str = "float32",
    backward: bool = False,
    device: str = "cpu",
    threads: int | None = None,
) -> dict[str, object]:
    """The plan chosen for a shape: path, mode, threads, tasks, workspace and state bytes."""
