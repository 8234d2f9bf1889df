"""The operators as plain torch operations, for programs that have no kernels of gla_ext's.

`torch.onnx.export(model, args, path)` needs nothing of this: while it runs, gla_ext's functions,
layers and models are plain operations by themselves. An exported program takes them from
`decompositions`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gla_ext.ops._operator import PLAIN


def decompositions() -> dict[torch._ops.OperatorBase, Callable]:
    """`torch.export.default_decompositions()` and those of gla_ext's operators.

        program = torch.export.export(model, args)
        program = program.run_decompositions(gla_ext.export.decompositions())

    The program then has operations of torch alone, computes in fp32 (fp64 of fp64 inputs), and is
    right at any gate, -inf included, for symbolic lengths too. It is for inference and slower than
    the operators. Its cost is linear in the length T but for T^2 / 256^2 products of head states'
    decays, which are seen from some 65,536 tokens on, with gates on values from 4,096.

    Operators that have none keep their place in the graph: those of training, and
    `chunk_gla_`, `recurrent_gla_step_` and `recurrent_gla_commit_`, which write into a pool.

    Returns:
        A new table for `torch.export.ExportedProgram.run_decompositions`.
    """
    return torch.export.default_decompositions() | PLAIN
