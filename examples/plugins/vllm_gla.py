"""What vLLM asks of a layer with a state: its shapes and dtypes, and its work on vLLM's blocks.

`GLAStates` is the part of a vLLM layer of GLA that concerns states. The layer's projections, norm
and gate, `nn.Linear`s of the local heads, are what `GatedLinearAttention` has; its convolutions
keep a state of their own, which comes first in vLLM's tuples.

    class GLALayer(GLAStates, nn.Module):
        def forward(self, x):  # [tokens, hidden size]
            q, k, v, g = ...  # [tokens, local heads, K or V]
            metadata = get_forward_context().attn_metadata[self.prefix]
            return self.o_proj(self.norm(self.attend(q, k, v, g, metadata)))
"""

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from gla_ext import chunk_gla_, recurrent_gla_step_

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

        Args:
            q, k, v, g: `[tokens, heads, K | V]`, one-token requests first, as vLLM orders them.
            metadata: vLLM's `LinearAttentionMetadata`.
        """
        pool, slots = self.kv_cache[-1], metadata.state_indices_tensor
        D, o = metadata.num_decodes, torch.empty_like(v)
        if D > 0:
            step = [x[:D].unsqueeze(1) for x in (q, k, v, g)]
            rows = {"state": pool, "slots": slots[:D]}
            recurrent_gla_step_(*step, **rows, state_v_first=True, out=o[:D].unsqueeze(1))
        if metadata.num_prefills > 0:
            self._prefill(q[D:], k[D:], v[D:], g[D:], metadata, o[D:])
        return o

    def _prefill(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, metadata: Any, out: Tensor
    ) -> None:
        D = metadata.num_decodes
        pool, slots = self.kv_cache[-1], metadata.state_indices_tensor[D:]
        offsets = metadata.query_start_loc[D:] - D
        # A request starts from nothing unless it has had more tokens than pass now.
        goes_on = metadata.seq_lens[D:] > offsets.diff()
        packed = (x.unsqueeze(0) for x in (q, k, v, g))
        rows = {"state": pool, "slots": slots, "has_initial_state": goes_on}
        options = {"state_v_first": True, "cu_seqlens": offsets, "out": out.unsqueeze(0)}
        chunk_gla_(*packed, **rows, **options)
