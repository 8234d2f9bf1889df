"""GLA on several processes: shards, context parallelism, tensor parallelism, DTensors.

All of it uses torch.distributed. `import gla_ext` does not load this package.
"""

from gla_ext.distributed import sharding
from gla_ext.distributed._fla_context import from_fla
from gla_ext.distributed.context import CPContext, build_cp_context
from gla_ext.distributed.shards import Shards, shard_model
from gla_ext.distributed.tensor_parallel import tensor_parallel_plan

__all__ = [
    "CPContext",
    "Shards",
    "build_cp_context",
    "from_fla",
    "shard_model",
    "sharding",
    "tensor_parallel_plan",
]
