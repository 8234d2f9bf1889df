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
    gate_dtype: str | None = None,
    backward: bool = False,
    save_states: bool = False,
    device: str = "cpu",
    threads: int | None = None,
) -> dict[str, object]:
    """The plan chosen for a shape, on any build and without a GPU.

    Args:
        B, T, H, K, V: sizes of the call.
        N: the number of packed sequences; B is 1 then.
        dtype: of q, k and v; float64 on CPU only.
        gate_dtype: CUDA only: of g; default dtype.
        backward: the plan of the backward pass.
        save_states: CUDA only: forward returns its states, or backward is given them.
        device: "cpu" or "cuda".
        threads: CPU only; default all.

    Returns:
        path, mode, workspace_bytes and state_bytes (of S and, in backward, dS). On CPU threads and
        tasks, and the workspace is without the states. On CUDA tiles and launches (kernels), and
        workspace_bytes is all that is allocated besides outputs, states that are not saved
        included.

    Raises:
        ValueError: a size or dtype that the device does not take.
    """
