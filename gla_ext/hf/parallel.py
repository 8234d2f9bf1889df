"""The plan of `from_pretrained(tp_plan="auto")`: names for the styles of gla_ext.distributed.

transformers calls a style with each module while its weights are placeholders, then loads into
every rank its own part of them.
"""

from __future__ import annotations

from torch import nn

try:
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer
except ImportError:  # other interfaces, before transformers 5.24
    ALL_PARALLEL_STYLES, TensorParallelLayer = None, object

BASE_PLAN: dict[str, str] = {}  # of a GLAModel
HEAD_PLAN: dict[str, str] = {}  # of an lm_head


class _Style(TensorParallelLayer):
    def __init__(self, name: str) -> None:
        self.name = name

    def install_forward(self, module: nn.Module, mesh: object) -> nn.Module:
        from gla_ext.distributed import tensor_parallel

        return getattr(tensor_parallel, self.name)()._apply(module, mesh)


if hasattr(TensorParallelLayer, "install_forward"):
    _NAMES = {
        "gla_heads": "HeadsParallel",
        "gla_mlp": "MLPParallel",
        "gla_norm": "Replicated",
        "gla_vocabulary": "VocabularyParallel",
    }
    for _name, _style in _NAMES.items():
        ALL_PARALLEL_STYLES.register(_name, _Style(_style))
    BASE_PLAN |= {
        "embeddings": "gla_vocabulary",
        "layers.*.attn_norm": "gla_norm",
        "layers.*.attn": "gla_heads",
        "layers.*.mlp_norm": "gla_norm",
        "layers.*.mlp": "gla_mlp",
        "norm": "gla_norm",
    }
    HEAD_PLAN["lm_head"] = "gla_vocabulary"
