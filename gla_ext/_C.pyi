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
    batch_invariant: bool = False,
    aligned: bool = True,
    key_gated: bool = True,
    value_gated: bool = False,
    kept: bool = False,
    capability: str = "9.0",
    processors: int = 132,
    device: str = "cpu",
    threads: int | None = None,
) -> dict[str, object]:
    """The plan chosen for a shape, on any build and without a GPU.

    Args:
        B, T, H, K, V: sizes of the call.
        N: the number of packed sequences; B is 1 then.
        dtype: of q, k and v; float64 on CPU only.
        gate_dtype: CUDA only: of g and gv; default dtype.
        backward: the plan of the backward pass.
        batch_invariant: CUDA only: of a call in `gla_ext.batch_invariant`.
        aligned: CUDA only: every row of q, k, v, g and, in backward, do starts at a multiple of 16
            bytes.
        key_gated: CUDA only: whether there is a g.
        value_gated: whether there is a gv.
        kept: CUDA only: forward keeps operands for backward wherever it can, as it does under
            autograd unless GLA_EXT_KEEP_OPERANDS=0, or backward is given them.
        capability: CUDA only: of the GPU, as "8.0"; "9.0" has the fused path, whose kernels are
            taken to be built.
        processors: CUDA only: multiprocessors of the GPU; 132 are an H200's.
        device: "cpu" or "cuda".
        threads: CPU only; default all.

    Returns:
        path ("cpu"; on CUDA "steps" or "fused", as GLA_EXT_CUDA_PATH may force), mode,
        workspace_bytes and state_bytes (of S and, in backward, dS). On CPU threads and tasks, and
        the workspace is without the states. On CUDA tiles, launches (kernels), segments (of one
        batch row, into which the fused sweeps cut sequences; 0: they do not) and segment_chunks
        (of one segment), swept_gradients (whether backward makes all gradients in one sweep, dS on
        chip), paired_states (whether S and the operands of that sweep are made in one pass),
        paired_parts (whether segments' own parts and operands are), packed_parts (whether those
        parts, of packed sequences, are made by themselves for a forward that gates), paired_chunks
        (whether gradients of two neighbouring chunks are made from one S and one dS),
        scores (whether operands that are made first in this pass have A of chunks in tier 1),
        cluster_pieces (how many heads a pair of blocks goes over, one by one; 0: no blocks are
        paired), block_pieces (how many a block of forward does, where K and V are at most 64 and g
        is bf16), kept_bytes (of what forward so keeps for backward besides inputs), and
        workspace_bytes is all that is allocated besides these and outputs.

    Raises:
        ValueError: a size or dtype that the device does not take.
    """
