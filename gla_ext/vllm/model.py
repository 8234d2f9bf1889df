"""The model classes that vLLM makes; names of modules and parameters are those of checkpoints."""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.interfaces import (
    HasInnerState,
    IsAttentionFree,
    IsHybrid,
    SupportsLoRA,
    SupportsMambaPrefixCaching,
)
from vllm.model_executor.models.utils import maybe_prefix
from vllm.sequence import IntermediateTensors

from gla_ext.layers.attention import rotary_embedding
from gla_ext.layers.norms import RMSNorm
from gla_ext.layers.swiglu import swiglu
from gla_ext.model import GLAConfig
from gla_ext.model import GLAForCausalLM as PlainModel
from gla_ext.model.attention import Spec
from gla_ext.model.legacy import modern_tensors
from gla_ext.model.tensors import check_tensors_of
from gla_ext.vllm.layer import GLALayer, state_dtypes, state_shapes

# Maps of a checkpoint that are one map here.
_TOGETHER = {
    "in_proj": ["q_proj", "k_proj", "v_proj", "g_proj"],
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}


class SoftmaxAttention(nn.Module):
    """`gla_ext.layers.attention.Attention` on vLLM's blocks of keys and values."""

    def __init__(self, D: int, spec: Spec, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        heads, kv_heads = spec["num_heads"], spec["num_kv_heads"]
        ranks = vllm_config.parallel_config.tensor_parallel_size
        self.width, self.theta = D // heads, spec["rope_theta"]
        self.widths = [heads * self.width // ranks, *[kv_heads * self.width // ranks] * 2]
        given = {"quant_config": vllm_config.quant_config}
        self.qkv_proj = QKVParallelLinear(
            *(D, self.width, heads, kv_heads),
            bias=spec["qkv_bias"],
            prefix=f"{prefix}.qkv_proj",
            **given,
        )
        self.o_proj = RowParallelLinear(D, D, bias=False, prefix=f"{prefix}.o_proj", **given)
        self.attn = Attention(
            *(heads // ranks, self.width, self.width**-0.5, kv_heads // ranks),
            cache_config=vllm_config.cache_config,
            per_layer_sliding_window=spec["window_size"],
            prefix=f"{prefix}.attn",
            **given,
        )

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(x)[0].split(self.widths, -1)
        q, k = (
            rotary_embedding(x.unflatten(-1, (-1, self.width)), positions, self.theta).flatten(1)
            for x in (q, k)
        )
        return self.o_proj(self.attn(q, k, v))[0]


class MLP(nn.Module):
    """`gla_ext.model.GLAMLP`."""

    def __init__(self, config: GLAConfig, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        D, width, given = config.hidden_size, config.mlp_size, {"bias": False}
        given["quant_config"] = vllm_config.quant_config
        self.gate_up_proj = MergedColumnParallelLinear(
            D, [width, width], prefix=f"{prefix}.gate_up_proj", **given
        )
        self.down_proj = RowParallelLinear(width, D, prefix=f"{prefix}.down_proj", **given)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(*self.gate_up_proj(x)[0].chunk(2, -1)))[0]


class Block(nn.Module):
    """`gla_ext.model.GLABlock`; x and the residual are added by the norm that follows."""

    def __init__(self, config: GLAConfig, vllm_config: VllmConfig, i: int, prefix: str) -> None:
        super().__init__()
        D, spec = config.hidden_size, config.attention_of(i)
        self.attn_norm = RMSNorm(D, eps=config.norm_eps)
        if spec is None:
            self.attn = GLALayer(config, vllm_config, i, f"{prefix}.attn")
        else:
            self.attn = SoftmaxAttention(D, spec, vllm_config, f"{prefix}.attn")
        self.positioned = spec is not None
        self.mlp_norm = RMSNorm(D, eps=config.norm_eps)
        self.mlp = MLP(config, vllm_config, f"{prefix}.mlp")

    def forward(
        self, x: Tensor, residual: Tensor | None, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.attn_norm(x, residual, prenorm=True)
        x = self.attn(x, positions) if self.positioned else self.attn(x)
        x, residual = self.mlp_norm(x, residual, prenorm=True)
        return self.mlp(x), residual


@support_torch_compile
class GLAModel(nn.Module):
    """Embeddings, blocks and a last norm."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config.core()
        self.embeddings = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, prefix=f"{prefix}.embeddings"
        )
        self.layers = nn.ModuleList(
            Block(config, vllm_config, i, f"{prefix}.layers.{i}")
            for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        x = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        residual = None
        for block in self.layers:
            x, residual = block(x, residual, positions)
        return self.norm(x, residual)


class _CausalLM(nn.Module, HasInnerState, SupportsLoRA, SupportsMambaPrefixCaching):
    packed_modules_mapping = _TOGETHER

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.config = config = vllm_config.model_config.hf_config.core()
        self.is_quantized = vllm_config.quant_config is not None
        if not config.use_output_gate:
            self.packed_modules_mapping = {**_TOGETHER, "in_proj": _TOGETHER["qkv_proj"]}
        self.model = GLAModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.lm_head = ParallelLMHead(
            config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "lm_head")
        )
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embeddings)
        self.logits_processor = LogitsProcessor(config.vocab_size)

    @classmethod
    def get_mamba_state_shape_from_config(
        cls, vllm_config: VllmConfig
    ) -> tuple[tuple[int, ...], ...]:
        config = vllm_config.model_config.hf_config.core()
        return state_shapes(config, vllm_config.parallel_config.tensor_parallel_size)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        return state_dtypes(vllm_config.model_config.hf_config.core(), vllm_config)

    def get_mamba_state_copy_funcs(self, mamba_types: set) -> dict:
        """One for each state of a block: vLLM copies a block when a sequence goes on in another."""
        count = 1 + self.config.use_short_conv
        return dict.fromkeys(mamba_types, (get_temporal_copy_spec,) * count)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embeddings(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Loads a checkpoint of gla_ext or FLA, of 2024 too, or a quantized one, which has scales.

        Raises:
            ValueError: a missing or unknown name, or a wrong shape.
        """
        with torch.device("meta"):
            plain = PlainModel(self.config)
        tensors = modern_tensors(dict(weights))
        scales = {name: x for name, x in tensors.items() if name.endswith("_scale")}
        if not self.is_quantized:
            scales = {}
        given = {name: x for name, x in tensors.items() if name not in scales}
        params, loaded = dict(self.named_parameters()), Counter()
        for name, tensor in {**check_tensors_of(plain, given), **scales}.items():
            name, shard = self._place_of(name)
            if name not in params:  # a scale of another scheme
                raise ValueError(f"gla_ext.vllm: expected no {name!r} in the checkpoint")
            copy = getattr(params[name], "weight_loader", _copy)
            copy(params[name], tensor, *([] if shard is None else [shard]))
            loaded[name] += 1
        for name in params:
            if loaded[name] != loaded[f"{name.rpartition('.')[0]}.weight"] and "scale" in name:
                raise ValueError(f"gla_ext.vllm: expected the checkpoint to hold all of {name!r}")
        return set(loaded)

    def _place_of(self, name: str) -> tuple[str, int | str | None]:
        """The parameter that holds a tensor of a checkpoint, and which part of it is the tensor."""
        *owner, module, leaf = name.split(".")
        convolution = {"q_conv1d": 0, "k_conv1d": 1, "v_conv1d": 2}.get(module)
        if convolution is not None:
            return ".".join([*owner, "conv_weight"]), convolution
        here = self.get_submodule(".".join(owner))
        for joint, parts in _TOGETHER.items():
            if module in parts and hasattr(here, joint):
                shards = "qkv" if joint == "qkv_proj" else range(len(parts))
                return ".".join([*owner, joint, leaf]), shards[parts.index(module)]
        return name, None


def _copy(param: Tensor, loaded: Tensor) -> None:
    param.data.copy_(loaded)


class GLAForCausalLM(_CausalLM, IsAttentionFree):
    """A model of GLA blocks alone."""


class GLAHybridForCausalLM(_CausalLM, IsHybrid):
    """A model with attention in some blocks."""
