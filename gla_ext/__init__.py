"""Gated Linear Attention for PyTorch: C++ operators, a drop-in layer and a language model.

Contents:
    gla_ext.ops: the operators as functions, `check_inputs`, `plan`; `gla_ext.reference`: their
        equations in plain PyTorch; `gla_ext.export`: for programs without gla_ext's kernels.
    gla_ext.layers: the layer, `MultiheadGLA`, norms, the short convolution, SwiGLU.
    gla_ext.model: the language model, its configuration, loss and files; `gla_ext.losses`: cross
        entropy of logits and of their linear map; `gla_ext.cache`: states.
    gla_ext.decode: `generate`, `Decoder`, sampling.
    gla_ext.train: `python -m gla_ext.train` and its parts.
    gla_ext.distributed: several processes: contexts, tensor parallel plans.
    gla_ext.fla, gla_ext.hf: for programs of flash-linear-attention, and of transformers.
    gla_ext.selftest, gla_ext.info: run by `python -m`, check an installation, and print what is
    installed; gla_ext.devices: the devices that gla_ext can use.
"""

from gla_ext._compat import check_build
from gla_ext._version import __version__

check_build()

from gla_ext.layers.gated_linear_attention import GatedLinearAttention  # noqa: E402
from gla_ext.layers.multihead import MultiheadGLA  # noqa: E402
from gla_ext.ops import (  # noqa: E402
    batch_invariant,
    check_inputs,
    chunk_gla,
    chunk_gla_,
    chunk_lightning_attn,
    chunk_linear_attn,
    chunk_retention,
    chunk_simple_gla,
    fused_chunk_gla,
    fused_recurrent_gla,
    fused_recurrent_lightning_attn,
    fused_recurrent_linear_attn,
    fused_recurrent_retention,
    fused_recurrent_simple_gla,
    recurrent_gla_buffered_step_,
    recurrent_gla_commit_,
    recurrent_gla_step_,
    recurrent_gla_verify,
    short_convolution_,
)
from gla_ext.ops.plan import Plan, plan  # noqa: E402

__all__ = [
    "GatedLinearAttention",
    "MultiheadGLA",
    "Plan",
    "__version__",
    "batch_invariant",
    "check_inputs",
    "chunk_gla",
    "chunk_gla_",
    "chunk_lightning_attn",
    "chunk_linear_attn",
    "chunk_retention",
    "chunk_simple_gla",
    "fused_chunk_gla",
    "fused_recurrent_gla",
    "fused_recurrent_lightning_attn",
    "fused_recurrent_linear_attn",
    "fused_recurrent_retention",
    "fused_recurrent_simple_gla",
    "plan",
    "recurrent_gla_buffered_step_",
    "recurrent_gla_commit_",
    "recurrent_gla_step_",
    "recurrent_gla_verify",
    "short_convolution_",
]
