"""The plan of `from_pretrained(tp_plan="auto")`: names for the styles of gla_ext.distributed.

transformers calls a style with each module while its weights are placeholders, then loads into
every rank its own part of them.
"""

from __future__ import annotations

from torch import distributed, nn

try:
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer
except ImportError:  # older ones have other interfaces
    TensorParallelLayer = object

BASE_PLAN: dict[str, str] = {}  # of a GLAModel
HEAD_PLAN: dict[str, str] = {}  # of an lm_head

if distributed.is_available() and hasattr(TensorParallelLayer, "install_forward"):
    from gla_ext.distributed import tensor_parallel

    class _Style(TensorParallelLayer):
        def __init__(self, style: type) -> None:
            self.style = style()

        def install_forward(self, module: nn.Module, mesh: object) -> nn.Module:
            return self.style._apply(module, mesh)

    ALL_PARALLEL_STYLES.register("gla_heads", _Style(tensor_parallel.HeadsParallel))
    ALL_PARALLEL_STYLES.register("gla_mlp", _Style(tensor_parallel.MLPParallel))
    ALL_PARALLEL_STYLES.register("gla_norm", _Style(tensor_parallel.Replicated))
    ALL_PARALLEL_STYLES.register("gla_vocabulary", _Style(tensor_parallel.VocabularyParallel))
    BASE_PLAN |= {
        "embeddings": "gla_vocabulary",
        "layers.*.attn_norm": "gla_norm",
        "layers.*.attn": "gla_heads",
        "layers.*.mlp_norm": "gla_norm",
        "layers.*.mlp": "gla_mlp",
        "norm": "gla_norm",
    }
    HEAD_PLAN["lm_head"] = "gla_vocabulary"
