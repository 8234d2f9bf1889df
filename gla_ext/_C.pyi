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

def drop_workspaces(stream: int) -> None:
    """Drops torch's workspaces of cuBLAS on a stream (a cudaStream_t), on which nobody else works.
    The next product there gets another one. Does nothing in a build without CUDA.
    """

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
    batch_invariant: bool = False,
    aligned: bool = True,
    key_gated: bool = True,
    value_gated: bool = False,
    head_gated: bool = False,
    gate_gradient: bool = True,
    for_backward: bool = False,
    in_halves: bool = False,
    on_pool: bool = False,
    capability: str = "9.0",
    processors: int = 132,
    device: str = "cpu",
    threads: int | None = None,
) -> dict[str, object]:
    """The plan of both passes for a shape, on any build and without a GPU.

    Args:
        B, T, H, K, V: sizes of the call.
        N: the number of packed sequences; B is 1 then.
        dtype: of q, k and v; float64 on CPU only.
        gate_dtype: CUDA only: of g and gv; default dtype.
        batch_invariant: CUDA only: of a call in `gla_ext.batch_invariant`.
        aligned: CUDA only: every row of q, k, v, g and, in backward, do starts at a multiple of 16
            bytes.
        key_gated: CUDA only: whether there is a g.
        value_gated: whether there is a gv.
        head_gated: CUDA only: whether g is one gate a head.
        gate_gradient: CUDA only: whether backward makes that of g.
        for_backward: CUDA only: forward leaves for backward what it can, as it does under autograd
            unless GLA_EXT_KEEP_OPERANDS=0.
        in_halves: CUDA only: of a call over several ranks; none are packed then.
        on_pool: CUDA only: of `chunk_gla_`, whose forward alone counts.
        capability: CUDA only: of the GPU, as "8.0"; "9.0" has the fused path, whose kernels are
            taken to be built.
        processors: CUDA only: multiprocessors of the GPU; 132 are an H100's or H200's.
        device: "cpu" or "cuda".
        threads: CPU only; default all.

    Returns:
        path ("cpu"; on CUDA "steps" or "fused"), and a dict for each of forward and backward.
        On CPU these have mode, threads, tasks, workspace_bytes (without the states) and state_bytes
        (of S and, in backward, dS).
        On CUDA: kernels, the names of what the pass launches, in order (csrc/cuda/plan/kernels.h);
        segments (of one batch row, into which sweeps cut sequences; 0: they do not),
        segment_chunks (of one), segment_states, summaries_at_once and replays (the second of two
        segments replays the first); items_each (work items that a block or a cluster takes one by
        one); workspace_bytes, state_bytes; in halves summary_kernels, how many of the kernels make
        the summary, and summary_bytes, what they leave for the others. Beside them fused_expects
        (what the fused path expects that the call does not have, or None) and for_backward_bytes
        (what forward leaves besides the inputs).

    Raises:
        ValueError: a size or dtype that the device does not take.
    """
