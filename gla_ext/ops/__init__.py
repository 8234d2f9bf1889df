"""The operators of gla_ext as Python functions, and functions about the plan and mode of a call.

Each operator has a file, which also declares the operator's rules to torch: see
`_operator.declare`.
"""

import importlib
import pkgutil

from gla_ext._when_imported import when_imported
from gla_ext.ops import _flops, _sharding
from gla_ext.ops.buffered import recurrent_gla_buffered_step_
from gla_ext.ops.chunk import (
    batch_invariant,
    chunk_gla,
    chunk_gla_step,
    fused_chunk_gla,
    in_mode_of_now,
    is_batch_invariant,
    keeps_for_backward,
)
from gla_ext.ops.inputs import check_inputs
from gla_ext.ops.linear_attn import (
    chunk_linear_attn,
    fused_chunk_linear_attn,
    fused_recurrent_linear_attn,
)
from gla_ext.ops.pool import chunk_gla_
from gla_ext.ops.recurrent import (
    fused_recurrent_gla,
    recurrent_gla_commit_,
    recurrent_gla_step_,
    recurrent_gla_verify,
)
from gla_ext.ops.short_convolution import short_convolution_
from gla_ext.ops.simple_gla import (
    chunk_lightning_attn,
    chunk_retention,
    chunk_simple_gla,
    fused_chunk_retention,
    fused_chunk_simple_gla,
    fused_recurrent_lightning_attn,
    fused_recurrent_retention,
    fused_recurrent_simple_gla,
    lightning_decay,
    retention_decay,
)

__all__ = [
    "batch_invariant",
    "check_inputs",
    "chunk_gla",
    "chunk_gla_",
    "chunk_gla_step",
    "chunk_lightning_attn",
    "chunk_linear_attn",
    "chunk_retention",
    "chunk_simple_gla",
    "fused_chunk_gla",
    "fused_chunk_linear_attn",
    "fused_chunk_retention",
    "fused_chunk_simple_gla",
    "fused_recurrent_gla",
    "fused_recurrent_lightning_attn",
    "fused_recurrent_linear_attn",
    "fused_recurrent_retention",
    "fused_recurrent_simple_gla",
    "in_mode_of_now",
    "is_batch_invariant",
    "keeps_for_backward",
    "lightning_decay",
    "recurrent_gla_buffered_step_",
    "recurrent_gla_commit_",
    "recurrent_gla_step_",
    "recurrent_gla_verify",
    "retention_decay",
    "short_convolution_",
]

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    if "._" not in _module.name:
        importlib.import_module(_module.name)
# Importing torch's flop counter imports Triton, and importing DTensor takes half a second. So only
# programs that import these get what is registered for them.
when_imported("torch.utils.flop_counter", _flops.register)
when_imported("torch.distributed.tensor", _sharding.register)
