"""The operators of gla_ext as Python functions, and what says how a call of them would run."""

from gla_ext.ops.chunk import (
    batch_invariant,
    chunk_gla,
    fused_chunk_gla,
    in_mode_of_now,
    is_batch_invariant,
    keeps_for_backward,
)
from gla_ext.ops.inputs import check_inputs
from gla_ext.ops.recurrent import (
    fused_recurrent_gla,
    recurrent_gla_commit_,
    recurrent_gla_step_,
    recurrent_gla_verify,
)

__all__ = [
    "batch_invariant",
    "check_inputs",
    "chunk_gla",
    "fused_chunk_gla",
    "fused_recurrent_gla",
    "in_mode_of_now",
    "is_batch_invariant",
    "keeps_for_backward",
    "recurrent_gla_commit_",
    "recurrent_gla_step_",
    "recurrent_gla_verify",
]
