"""GLA models in vLLM: `vllm serve FOLDER` and `LLM(model=FOLDER)`.

vLLM calls `register` in every process, by the entry point `vllm.general_plugins`. Nothing else
imports this package, which needs vLLM.
"""

import warnings

import vllm
from vllm.config import CompilationConfig
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm.model_executor.models.registry import ModelRegistry
from vllm.transformers_utils.config import _CONFIG_REGISTRY
from vllm.transformers_utils.model_arch_config_convertor import MODEL_ARCH_CONFIG_CONVERTORS

from gla_ext.hf import GLAConfig
from gla_ext.vllm.config import HYBRID, PLAIN, GLAArchitecture, GLAServing

# vLLM's interfaces move between minor versions.
TESTED = ("0.32",)
OPERATOR = "vllm::gla_attention"


def register() -> None:
    """Makes GLA models known to vLLM; may be called again."""
    if vllm.__version__.rpartition(".")[0] not in TESTED:
        warnings.warn(
            f"gla_ext.vllm was run with vLLM {', '.join(TESTED)}, not with {vllm.__version__}",
            stacklevel=2,
        )
    _CONFIG_REGISTRY[GLAConfig.model_type] = GLAConfig
    MODEL_ARCH_CONFIG_CONVERTORS[GLAConfig.model_type] = GLAArchitecture
    for name in (PLAIN, HYBRID):
        ModelRegistry.register_model(name, f"gla_ext.vllm.model:{name}")
        MODELS_CONFIG_MAP[name] = GLAServing
    if OPERATOR not in CompilationConfig._attention_ops:
        CompilationConfig._attention_ops.append(OPERATOR)
