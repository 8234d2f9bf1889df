"""The operators as plain torch operations, for programs without gla_ext's kernels.

`torch.onnx.export(model, args, path)` does not need this module: during the export, gla_ext's
functions, layers and models use plain operations automatically. For an exported program, pass
`decompositions`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gla_ext.ops._operator import PLAIN


def decompositions() -> dict[torch._ops.OperatorBase, Callable]:
    """`torch.export.default_decompositions()`, extended by gla_ext's operators.

        program = torch.export.export(model, args)
        program = program.run_decompositions(gla_ext.export.decompositions())

    The program then has only torch operations, computes in fp32 (fp64 for fp64 inputs), and is
    correct for any gate, including -inf, and for symbolic lengths. It is for inference and slower
    than the operators. Its cost is linear in the length T except for T^2 / 256^2 products with
    decays of head states. These become noticeable from about 65,536 tokens on, with gates on values
    from 4,096.

    Operators without a decomposition stay in the graph: those of training, and `chunk_gla_`,
    `recurrent_gla_step_` and `recurrent_gla_commit_`, which write into a pool.

    Returns:
        A new table for `torch.export.ExportedProgram.run_decompositions`.
    """
    return torch.export.default_decompositions() | PLAIN
