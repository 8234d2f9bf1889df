"""The plan of a call of chunk_gla: the kernels that would run."""

import os
from dataclasses import dataclass

import torch

from gla_ext import _C
from gla_ext.ops import chunk

_MEBIBYTE = 2**20
# The GPU to plan for if there is none: compute capability and multiprocessors of H100 and H200.
_HOPPER = ("9.0", 132)
# Compute capabilities on which the steps were run; for others they are compiled alone.
_STEPS_RUN = ("9.0",)


@dataclass(frozen=True)
class Plan:
    """The plan of both passes of a call of `chunk_gla`; `print` it to read it.

    Attributes:
        path: "fused" (the kernels for Hopper) or "steps" (one kernel per step, any GPU).
        standing: "fused"; "steps, run" where the authors ran the steps on that compute capability;
            "steps, compiled and never run" elsewhere.
        fused_expects: the condition of the fused path that this call does not meet; None if it
            does.
        forward, backward: the kernels that each pass launches, in order; csrc/README.md has a table
            of their names. With several ranks, "all-gather" and "fold_ranks" mark the point between
            the two halves of a pass.
        forward_segments, backward_segments: the number of segments into which each pass cuts the
            sequences of one batch row, to fill the GPU; 0: sequences are not cut.
        forward_workspace_bytes, backward_workspace_bytes: memory that each pass allocates besides
            inputs and outputs, and frees when it ends.
        for_backward_bytes: memory that forward keeps for backward besides its inputs.
    """

    path: str
    standing: str
    fused_expects: str | None
    forward: tuple[str, ...]
    backward: tuple[str, ...]
    forward_segments: int
    backward_segments: int
    forward_workspace_bytes: int
    backward_workspace_bytes: int
    for_backward_bytes: int

    def __str__(self) -> str:
        reason = f" (fused expects {self.fused_expects})" if self.fused_expects else ""
        lines = [f"path: {self.path}{reason}{self.standing.removeprefix(self.path)}"]
        for name in ("forward", "backward"):
            segments = getattr(self, f"{name}_segments")
            workspace = getattr(self, f"{name}_workspace_bytes") / _MEBIBYTE
            cut = f", {segments} segments a row" if segments else ""
            lines.append(f"{name}: {' -> '.join(getattr(self, name))}")
            lines.append(f"    {workspace:,.1f} MiB of workspace{cut}")
        lines.append(f"left for backward: {self.for_backward_bytes / _MEBIBYTE:,.1f} MiB")
        return "\n".join(lines)


def plan(
    B: int,
    T: int,
    H: int,
    K: int,
    V: int,
    N: int | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    gate_dtype: torch.dtype | None = None,
    g: bool = True,
    gv: bool = False,
    head_gates: bool = False,
    gate_gradient: bool = True,
    across_ranks: bool = False,
    gpu: torch.device | str | int | tuple[str, int] | None = None,
) -> Plan:
    """The kernels that a call of `chunk_gla` on CUDA launches, and why the fused path is not used.

    The plan is for a call with a backward pass, in the current `batch_invariant` mode, with the
    environment's `GLA_EXT_CUDA_PATH` and `GLA_EXT_KEEP_OPERANDS`, and with rows that start at
    multiples of 16 bytes. This function needs no GPU and launches nothing.

    Args:
        B, T, H, K, V: the sizes of q `[B, T, H, K]` and v `[B, T, H, V]`.
        N: the number of sequences packed in one row (B = 1). Default: none are packed.
        dtype: dtype of q, k and v: torch.bfloat16 (the default), float16 or float32.
        gate_dtype: dtype of g and gv. Default: `dtype`.
        g: whether there are gates on keys. Default: True.
        gv: whether there are gates on values. Default: False.
        head_gates: whether g is one gate per head, `[B, T, HK]`. Default: False.
        gate_gradient: whether g needs a gradient, which constant decays do not. Default: True.
        across_ranks: whether the call has a cp_context on several ranks; T is then the number of
            this rank's tokens. Default: False.
        gpu: a CUDA device, or a pair of compute capability and number of multiprocessors such as
            `("9.0", 132)`. Default: the current device, or an H100 if there is none. Only a pair's
            plan has the fused path in a build for other GPUs, which lacks it.

    Returns:
        A `Plan`.

    Raises:
        ValueError: a size or dtype that CUDA kernels do not support; packed sequences across ranks,
            since the first and the last sequence of each rank get a summary of their own.

    Example:
        >>> print(gla_ext.plan(8, 2048, 4, 256, 512, gpu=("9.0", 132)))
        path: fused
        forward: prepare -> forward.prepared
        ...
    """
    capability, processors = _capability(gpu)
    missing = None
    forced = os.environ.get("GLA_EXT_CUDA_PATH", "")
    if forced not in ("", "fused", "steps"):
        raise ValueError(f"GLA_EXT_CUDA_PATH: expected fused or steps, got {forced}")
    if forced == "steps":
        missing = "no GLA_EXT_CUDA_PATH=steps"
    elif capability == "9.0" and not isinstance(gpu, tuple) and _lacks_fused_kernels():
        missing = "a build for 9.0a"
    found = _C.plan(
        B,
        T,
        H,
        K,
        V,
        N,
        dtype=str(dtype).removeprefix("torch."),
        gate_dtype=str(gate_dtype or dtype).removeprefix("torch."),
        batch_invariant=chunk.is_batch_invariant(),
        key_gated=g,
        value_gated=gv,
        head_gated=head_gates,
        gate_gradient=gate_gradient,
        for_backward=chunk.keeps_for_backward(),
        in_halves=across_ranks,
        capability="8.0" if missing else capability,
        processors=processors,
        device="cuda",
    )
    forward, backward = found["forward"], found["backward"]
    was_run = "run" if capability in _STEPS_RUN else "compiled and never run"
    return Plan(
        path=found["path"],
        standing="fused" if found["path"] == "fused" else f"steps, {was_run}",
        fused_expects=missing or found["fused_expects"],
        forward=_kernels(forward, across_ranks),
        backward=_kernels(backward, across_ranks),
        forward_segments=forward["segments"],
        backward_segments=backward["segments"],
        forward_workspace_bytes=forward["workspace_bytes"] + forward["summary_bytes"],
        backward_workspace_bytes=backward["workspace_bytes"] + backward["summary_bytes"],
        for_backward_bytes=found["for_backward_bytes"],
    )


def _kernels(found: dict, across_ranks: bool) -> tuple[str, ...]:
    """The kernels that a pass launches. On the step path, a separate pass makes a rank's
    summary.
    """
    kernels = tuple(found["kernels"])
    if not across_ranks:
        return kernels
    first = found["summary_kernels"]
    summary, rest = (kernels[:first], kernels[first:]) if first else (kernels, kernels)
    return (*summary, "all-gather", "fold_ranks", *rest)


def _lacks_fused_kernels() -> bool:
    """Whether this build is one for GPUs, but not for Hopper."""
    archs = _C.build_info()["cuda_archs"]
    return bool(archs) and not any(arch.removesuffix("+PTX") == "9.0a" for arch in archs)


def _capability(gpu: torch.device | str | int | tuple[str, int] | None) -> tuple[str, int]:
    if isinstance(gpu, tuple):
        return gpu
    if gpu is None and not torch.cuda.is_available():
        return _HOPPER
    properties = torch.cuda.get_device_properties(gpu)
    return f"{properties.major}.{properties.minor}", properties.multi_processor_count
