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


class GLAStates(MambaBase):
    """The states of a GLA layer on one rank of tensor parallelism.

    Set by the layer: num_heads and key and value width a head, K and V, of the whole model; the
    number of ranks; conv_size, or None without convolutions; the model's dtype.
    """

    num_heads: int
    K: int
    V: int
    tensor_parallel_size: int = 1
    conv_size: int | None = None
    dtype: torch.dtype = torch.bfloat16

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
        """fp32, which the operators keep states in; vLLM's mamba_cache_dtype is not looked at."""
        if self.conv_size is None:
            return (torch.float32,)
        return (self.dtype, torch.float32)

    @torch.no_grad()
    def attend(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, metadata: Any) -> Tensor:
        """The heads' outputs `[tokens, heads, V]`, and the states in their blocks moved on.

        Args:
            q, k, v, g: `[tokens, heads, K | V]`, one-token requests first, as vLLM orders them.
            metadata: vLLM's `LinearAttentionMetadata`.
        """
        pool, slots = self.kv_cache[-1], metadata.state_indices_tensor
        D, outputs = metadata.num_decodes, []
        if D > 0:
            step = [x[:D].unsqueeze(1) for x in (q, k, v, g)]
            o = recurrent_gla_step_(*step, state=pool, slots=slots[:D], state_v_first=True)
            outputs.append(o.squeeze(1))
        if metadata.num_prefills > 0:
            outputs.append(self._prefill(q[D:], k[D:], v[D:], g[D:], metadata, D))
        return torch.cat(outputs)

    def _prefill(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, metadata: Any, D: int) -> Tensor:
        pool, slots = self.kv_cache[-1], metadata.state_indices_tensor[D:]
        offsets = metadata.query_start_loc[D:] - D
        # A request starts from nothing unless it has had more tokens than pass now.
        goes_on = metadata.seq_lens[D:] > offsets.diff()
        packed = (x.unsqueeze(0) for x in (q, k, v, g))
        rows = {"state": pool, "slots": slots, "has_initial_state": goes_on}
        o = chunk_gla_(*packed, **rows, state_v_first=True, cu_seqlens=offsets)
        return o.squeeze(0)
