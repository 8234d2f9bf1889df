"""What vLLM asks about a GLA model before it makes one, and what is refused when it starts."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.model_executor.models.config import MambaModelConfig
from vllm.platforms import current_platform
from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

from gla_ext.model import GLAConfig

# The classes of gla_ext.vllm.model, for config.json's one name.
PLAIN, HYBRID = "GLAForCausalLM", "GLAHybridForCausalLM"


class GLAArchitecture(ModelArchConfigConvertorBase):
    """The sizes that vLLM reads from a configuration: of keys and values, which hybrids alone have.

    A GLA model reads sequences of any length, so `max_position_embeddings` limits nothing.
    """

    def get_architectures(self) -> list[str]:
        return [PLAIN if self.hf_config.core().attn is None else HYBRID]

    def get_total_num_attention_heads(self) -> int:
        return attention_sizes(self.hf_config.core())[0]

    def get_total_num_kv_heads(self) -> int:
        return attention_sizes(self.hf_config.core())[1]

    def derive_max_model_len_and_key(self) -> tuple[float, str | None]:
        return float("inf"), None


def attention_sizes(config: GLAConfig) -> tuple[int, int]:
    """Heads of queries, and of keys and values, of a hybrid's attention; 0 in a plain model.

    Raises:
        NotImplementedError: blocks with different numbers.
    """
    specs = [] if config.attn is None else config.attn
    specs = [specs] if isinstance(specs, dict) else specs
    sizes = {(spec["num_heads"], spec["num_kv_heads"], spec["window_size"]) for spec in specs}
    if len(sizes) > 1:
        raise NotImplementedError(
            "gla_ext.vllm: attention blocks of different heads or windows are not implemented, got "
            f"(num_heads, num_kv_heads, window_size) = {sorted(sizes, key=str)}"
        )
    return next(iter(sizes))[:2] if sizes else (0, 0)


class GLAServing(MambaModelConfig):
    """Sets the sizes of vLLM's blocks, after it has refused what is not supported."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        refuse(vllm_config)
        super().verify_and_update_config(vllm_config)


def refuse(vllm_config: VllmConfig) -> None:
    """Raises NotImplementedError for what no test has seen to be right."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    context = max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size)
    quantization = model.quantization
    unsupported: dict[str, bool] = {
        f"quantization = {quantization}": quantization not in (None, "compressed-tensors"),
        # vLLM 0.32 there gives requests without an adapter that of the last slot: index -1.
        "LoRA on a CPU": vllm_config.lora_config is not None and current_platform.is_cpu(),
        "speculative decoding": vllm_config.speculative_config is not None,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "data parallelism": parallel.data_parallel_size > 1,
        "context parallelism": context > 1,
        "a transfer of keys and values": vllm_config.kv_transfer_config is not None,
        "pooling": model.runner_type != "generate",
        "prompts of embeddings": model.enable_prompt_embeds,
        f"kv_cache_dtype = {vllm_config.cache_config.cache_dtype}": (
            vllm_config.cache_config.cache_dtype != "auto"
        ),
    }
    for name, is_asked in unsupported.items():
        if is_asked:
            raise NotImplementedError(f"gla_ext.vllm: {name} is not implemented for GLA models")
    config, ranks = model.hf_config.core(), parallel.tensor_parallel_size
    heads = {"num_heads": config.num_heads, "num_kv_heads": config.num_kv_heads}
    heads["num_kv_heads of attn"] = attention_sizes(config)[1]
    for name, count in heads.items():
        if (count or 0) % ranks:
            raise NotImplementedError(
                f"gla_ext.vllm: expected tensor_parallel_size to divide {name} = {count}, got "
                f"{ranks}"
            )
