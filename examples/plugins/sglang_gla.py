"""A kernel of GLA for SGLang's linear attention backends.

SGLang's backend of a layer (`KDAAttnBackend` is the one to copy from) splits q, k and v, runs the
convolutions, and calls `decode` and `extend` of a kernel, with its pool of states. This is that
kernel. `a` and `g` carry the log of the decays, `[1, tokens, heads, K]`; GLA has no beta, A_log
and dt_bias. States are `[slots, heads, V, K]`, of the dtype that `--mamba-ssm-dtype` says: float32,
the default, bfloat16 or float16.

    self.kernel_dispatcher = GLAKernel()  # in a subclass of KDAAttnBackend
"""

from typing import Any

import torch
from sglang.srt.layers.attention.linear.kernels.kernel_backend import LinearAttnKernelBase
from torch import Tensor

from gla_ext import chunk_gla_, recurrent_gla_step_, recurrent_gla_verify


class GLAKernel(LinearAttnKernelBase):
    """Works in place on SGLang's pool; rows of slot -1, padding of CUDA graphs, are skipped."""

    @torch.no_grad()
    def decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor | None = None,
        *,
        ssm_states: Tensor,
        cache_indices: Tensor,
        query_start_loc: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The next token of each of N requests: `[1, N, heads, V]`."""
        q, k, v, a = (x.transpose(0, 1) for x in (q, k, v, a))  # [N, 1, heads, ..]
        pool = {"state": ssm_states, "slots": cache_indices, "state_v_first": True}
        return recurrent_gla_step_(q, k, v, a, **pool).transpose(0, 1)

    @torch.no_grad()
    def extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor | None = None,
        *,
        ssm_states: Tensor,
        cache_indices: Tensor,
        query_start_loc: Tensor,
        **kwargs: Any,
    ) -> Tensor:
        """Prompts, or what follows a cached prefix, packed: `[1, tokens, heads, V]`.

        SGLang has zeroed the slot of a request that starts.
        """
        pool = {"state": ssm_states, "slots": cache_indices, "state_v_first": True}
        return chunk_gla_(q, k, v, g, cu_seqlens=query_start_loc, **pool)

    @torch.no_grad()
    def target_verify(
        self,
        A_log: Tensor | None,
        dt_bias: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor | None = None,
        *,
        ssm_states: Tensor,
        cache_indices: Tensor,
        query_start_loc: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Drafts of equal length, with the states left as they are: no buffer of states a token.

        `recurrent_gla_commit_` of the same k, v and a then moves states past what was accepted.
        """
        N = cache_indices.shape[0]
        drafts = (x.squeeze(0).unflatten(0, (N, -1)) for x in (q, k, v, a))
        pool = {"state": ssm_states, "slots": cache_indices, "state_v_first": True}
        return recurrent_gla_verify(*drafts, **pool).flatten(0, 1).unsqueeze(0)
