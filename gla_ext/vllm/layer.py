"""The GLA layer on vLLM's blocks: its maps are vLLM's, its states and convolutions in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE, direct_register_custom_op
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from gla_ext.layers.gated_linear_attention import GatedLinearAttention
from gla_ext.model import GLAConfig
from gla_ext.model.blocks import gla_options
from gla_ext.ops import chunk_gla_
from gla_ext.ops.short_convolution import short_convolution_


class GLALayer(GatedLinearAttention, MambaBase):
    """`GatedLinearAttention` for vLLM's packed tokens `[tokens, hidden_size]`.

    q, k, v and the output gate are one map, `in_proj`; the weights of the three convolutions lie
    side by side in `conv_weight`. With tensor parallelism all hold the heads of this rank.
    """

    def __init__(self, config: GLAConfig, vllm_config: VllmConfig, layer_idx: int, prefix: str):
        with torch.device("meta"):
            super().__init__(**gla_options(config), layer_idx=layer_idx)
        ranks = vllm_config.parallel_config.tensor_parallel_size
        self.prefix = prefix
        self.state_shapes = state_shapes(config, ranks)
        self.state_dtypes = state_dtypes(config, vllm_config)
        self.value_dim_of_rank = self.value_dim // ranks
        widths = [self.key_dim, self.key_dim_per_group, self.value_dim_per_group]
        self.widths_of_rank = [width // ranks for width in widths]
        self.norm.to_empty(device=torch.empty(0).device)
        gate = [self.value_dim] if self.use_output_gate else []
        for name in ("q_proj", "k_proj", "v_proj", "g_proj", "q_conv1d", "k_conv1d", "v_conv1d"):
            if hasattr(self, name):
                delattr(self, name)

        def linear(kind: type, name: str, *sizes: Any, bias: bool = False) -> nn.Module:
            quantization = vllm_config.quant_config
            return kind(*sizes, bias=bias, quant_config=quantization, prefix=f"{prefix}.{name}")

        D, rank = self.hidden_size, self.gk_proj[0].out_features
        self.in_proj = linear(MergedColumnParallelLinear, "in_proj", D, [*widths, *gate])
        down = linear(ReplicatedLinear, "gk_proj.0", D, rank)
        up = linear(ColumnParallelLinear, "gk_proj.1", rank, self.key_dim_per_group, bias=True)
        self.gk_proj = nn.Sequential(down, up)
        self.o_proj = linear(RowParallelLinear, "o_proj", self.value_dim, D)
        if self.use_short_conv:
            weight = torch.empty(sum(self.widths_of_rank), 1, self.conv_size)
            self.conv_weight = nn.Parameter(weight, requires_grad=False)
            self.conv_weight.weight_loader = self._load_convolution
        vllm_config.compilation_config.static_forward_context[prefix] = self

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        return MambaAttentionBackendEnum.LINEAR

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return self.state_shapes

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return self.state_dtypes

    def _load_convolution(self, param: Tensor, loaded: Tensor, place: int) -> None:
        """Copies this rank's channels of the convolution of q (place 0), k or v."""
        width = self.widths_of_rank[place]
        mine = loaded.narrow(0, get_tensor_model_parallel_rank() * width, width)
        param.data.split(self.widths_of_rank)[place].copy_(mine)

    def forward(self, x: Tensor) -> Tensor:
        qkv, *gate = self.in_proj(x)[0].split(
            [sum(self.widths_of_rank), *[self.value_dim_of_rank] * self.use_output_gate], -1
        )
        down, up = self.gk_proj
        g = self._finish_log_gates(up(down(x)[0])[0].float())
        o = x.new_empty(x.shape[0], self.value_dim_of_rank)
        torch.ops.vllm.gla_attention(qkv, g, o, self.prefix)
        o = o.unflatten(-1, (-1, self.head_v_dim))
        return self.o_proj(self._norm_and_gate(o, *(gate or [None])))[0]

    def attend(self, qkv: Tensor, g: Tensor, out: Tensor) -> None:
        """Convolutions and recurrence; the blocks' states are moved on.

        Args:
            qkv: `[tokens, channels of q, k and v]`, before the convolutions.
            g: log gates, `[tokens, heads of keys * K]`.
            out: the heads' outputs, `[tokens, heads * V]`.
        """
        metadata = (get_forward_context().attn_metadata or {}).get(self.prefix)
        if metadata is None:  # vLLM measures memory and has no blocks yet
            out.zero_()
            return
        rows = rows_of(metadata)
        if metadata.num_prefills == 0:  # a token each: as rows of a batch they take a third less
            del rows["cu_seqlens"]
            count = len(rows["slots"])
            out[count:].zero_()  # rows that fill up a graph of parts of the model
            qkv, g, out = (x[:count].unsqueeze(1) for x in (qkv, g, out))
        else:
            qkv, g, out = (x.unsqueeze(0) for x in (qkv, g, out))
        if self.use_short_conv:
            qkv = short_convolution_(qkv, self.conv_weight, state=self.kv_cache[1], **rows)
        q, k, v = self._heads_of(*qkv.split(self.widths_of_rank, -1))
        pool = {"state": self.kv_cache[0], "state_v_first": True}
        out = out.unflatten(-1, (-1, self.head_v_dim))
        chunk_gla_(q, k, v, self._gates_of_heads(g), **pool, **rows, out=out)


def rows_of(metadata: Any) -> dict[str, Tensor]:
    """Arguments for `chunk_gla_` and `short_convolution_` from vLLM's `LinearAttentionMetadata`.

    A request that starts must not see what the last owner of its block left there. It starts if all
    its tokens so far pass now. vLLM's own counts do not tell: a prompt of one token is among the
    decodes. Requests that fill up a CUDA graph have no token, and get no block.
    """
    offsets = metadata.query_start_loc
    new = offsets.diff()
    return {
        "slots": metadata.state_indices_tensor.where(new > 0, -1),
        "has_initial_state": metadata.seq_lens > new,
        "cu_seqlens": offsets,
    }


def state_shapes(config: GLAConfig, ranks: int) -> tuple[tuple[int, ...], ...]:
    """Of a block: states `[heads of a rank, V, K]`, then the convolutions' last inputs.

    The states come first, so that they start at a multiple of their element's size.
    """
    with torch.device("meta"):
        layer = GatedLinearAttention(**gla_options(config))
    state = (layer.num_heads // ranks, layer.head_v_dim, layer.head_k_dim)
    channels = layer.key_dim + layer.key_dim_per_group + layer.value_dim_per_group
    return (state, (channels // ranks, config.conv_size)) if config.use_short_conv else (state,)


def state_dtypes(config: GLAConfig, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
    """mamba_ssm_cache_dtype, else mamba_cache_dtype, else float32; the convolutions' is the
    model's.
    """
    cache = vllm_config.cache_config
    names = (cache.mamba_ssm_cache_dtype, cache.mamba_cache_dtype, "float32")
    state = STR_DTYPE_TO_TORCH_DTYPE[next(name for name in names if name != "auto")]
    return (state, vllm_config.model_config.dtype) if config.use_short_conv else (state,)


@eager_break_during_capture
def gla_attention(qkv: Tensor, g: Tensor, out: Tensor, layer_name: str) -> None:
    get_forward_context().no_compile_layers[layer_name].attend(qkv, g, out)


def _fake(qkv: Tensor, g: Tensor, out: Tensor, layer_name: str) -> None:
    pass


direct_register_custom_op(
    op_name="gla_attention", op_func=gla_attention, mutates_args=["out"], fake_impl=_fake
)
