"""What vLLM asks of a layer with a state: its shapes and dtypes, and its work on vLLM's blocks.

`GLAStates` is the part of a vLLM layer of GLA that concerns states. The layer's projections, norm
and gate, `nn.Linear`s of the local heads, are what `GatedLinearAttention` has; its convolutions
keep a state of their own, which comes first in vLLM's tuples. `short_convolution_` with
`rows_of(metadata)` moves it on.

    class GLALayer(GLAStates, nn.Module):
        def forward(self, x):  # [tokens, hidden size]
            q, k, v, g = ...  # [tokens, local heads, K or V]
            metadata = (get_forward_context().attn_metadata or {}).get(self.prefix)
            return self.o_proj(self.norm(self.attend(q, k, v, g, metadata)))

The constructor puts the layer into `compilation_config.static_forward_context[prefix]`. vLLM 0.32
also asks of the model:

- the bases HasInnerState, IsAttentionFree and SupportsMambaPrefixCaching, and class methods
  get_mamba_state_shape_from_config, get_mamba_state_dtype_from_config and
  get_mamba_state_copy_func: `get_temporal_copy_spec` for each state, convolutions' too;
- `MODELS_CONFIG_MAP["GLAForCausalLM"] = MambaModelConfig` where `ModelRegistry.register_model` is
  called; without that the blocks have no size;
- a number for num_kv_heads in config.json. vLLM refuses null, which here and in FLA stands for
  num_heads.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from gla_ext import chunk_gla_

STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class GLAStates(MambaBase):
    """The states of a GLA layer on one rank of tensor parallelism.

    Set by the layer: num_heads and key and value width a head, K and V, of the whole model; the
    number of ranks; conv_size, or None without convolutions; the model's dtype; and state_dtype,
    what vLLM's mamba_ssm_cache_dtype says, or mamba_cache_dtype where that is "auto". Arithmetic is
    fp32 with each.
    """

    num_heads: int
    K: int
    V: int
    tensor_parallel_size: int = 1
    conv_size: int | None = None
    dtype: torch.dtype = torch.bfloat16
    state_dtype: torch.dtype = torch.float32

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        return MambaAttentionBackendEnum.LINEAR

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """Of a block: the last conv_size inputs of q, k and v, and `[local heads, V, K]`."""
        if self.num_heads % self.tensor_parallel_size:
            raise ValueError(
                "GLAStates: expected tensor_parallel_size to divide num_heads = "
                f"{self.num_heads}, got {self.tensor_parallel_size}"
            )
        heads = self.num_heads // self.tensor_parallel_size
        state = (heads, self.V, self.K)
        if self.conv_size is None:
            return (state,)
        return ((heads * (2 * self.K + self.V), self.conv_size), state)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """The model's for the convolutions' inputs, state_dtype for the states."""
        if self.state_dtype not in STATE_DTYPES:
            raise ValueError(
                "GLAStates: expected state_dtype to be torch.float32, torch.bfloat16 or "
                f"torch.float16, got {self.state_dtype}"
            )
        if self.conv_size is None:
            return (self.state_dtype,)
        return (self.dtype, self.state_dtype)

    @torch.no_grad()
    def attend(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, metadata: Any) -> Tensor:
        """The heads' outputs `[tokens, heads, V]`, and the states in their blocks moved on.

        On CUDA the tokens that decode have the bits of `recurrent_gla_step_`. That is faster, but
        goes on from whatever state is there, a former owner's too.

        Args:
            q, k, v, g: `[tokens, heads, K | V]`.
            metadata: vLLM's `LinearAttentionMetadata`; None while vLLM measures memory and has no
                blocks yet.
        """
        if metadata is None:
            return torch.zeros_like(v)
        packed = (x.unsqueeze(0) for x in (q, k, v, g))
        pool = {"state": self.kv_cache[-1], "state_v_first": True}
        return chunk_gla_(*packed, **pool, **rows_of(metadata)).squeeze(0)


def rows_of(metadata: Any) -> dict[str, Tensor]:
    """Arguments for `chunk_gla_` and, for the convolutions, `short_convolution_`.

    A request that starts must not see what the last owner of its block left there. It starts if all
    its tokens so far pass now. vLLM's own counts do not tell: a prompt of one token is among the
    decodes.
    """
    offsets = metadata.query_start_loc
    return {
        "slots": metadata.state_indices_tensor,
        "has_initial_state": metadata.seq_lens > offsets.diff(),
        "cu_seqlens": offsets,
    }
