"""Gated Linear Attention for PyTorch: C++ operators, a drop-in layer and a language model."""

from gla_ext._compat import check_build
from gla_ext._version import __version__

check_build()

from gla_ext import _vmap  # noqa: E402, F401  registers the operators' rules
from gla_ext._flops import register_when_counted  # noqa: E402
from gla_ext._plan import Plan, plan  # noqa: E402
from gla_ext.inputs import check_inputs  # noqa: E402
from gla_ext.layers import GatedLinearAttention  # noqa: E402
from gla_ext.multihead import MultiheadGLA  # noqa: E402
from gla_ext.ops import batch_invariant, chunk_gla, fused_chunk_gla  # noqa: E402
from gla_ext.recurrent import (  # noqa: E402
    fused_recurrent_gla,
    recurrent_gla_commit_,
    recurrent_gla_step_,
    recurrent_gla_verify,
)

register_when_counted()

__all__ = [
    "GatedLinearAttention",
    "MultiheadGLA",
    "Plan",
    "__version__",
    "batch_invariant",
    "check_inputs",
    "chunk_gla",
    "fused_chunk_gla",
    "fused_recurrent_gla",
    "plan",
    "recurrent_gla_commit_",
    "recurrent_gla_step_",
    "recurrent_gla_verify",
]
