"""Whether a call runs, or is written down to be run later."""

import torch


def is_recorded() -> bool:
    """Whether torch.compile, torch.export or torch.jit.trace makes a graph of what is called."""
    # As torch.jit.is_tracing, a Python call less: decoding asks several times a layer.
    return torch.compiler.is_compiling() or torch._C._is_tracing()


def is_recorded_for_onnx() -> bool:
    """Whether torch.onnx.export does: ONNX has none of gla_ext's operators."""
    return is_recorded() and torch.onnx.is_in_onnx_export()
