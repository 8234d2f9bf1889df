"""The gated linear attention layer: projections, low-rank gate, `chunk_gla`, gated norm.

Constructor, attributes, state_dict keys and forward signature are those of
`fla.layers.GatedLinearAttention` 0.6.0, so that weights and training scripts carry over.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gla_ext.layers._history import History, check_hidden_states
from gla_ext.layers._options import (
    check_keywords,
    check_options,
    check_sizes,
    expanded_dim,
    typed_options,
)
from gla_ext.layers._projections import is_plain, lay_side_by_side, nobody_sees, split_heads
from gla_ext.layers._route import makes_input_again, project, recurs
from gla_ext.layers.activations import activation
from gla_ext.layers.gate_projection import gate_projection
from gla_ext.layers.norms import GatedRMSNorm, RMSNorm
from gla_ext.layers.short_convolution import ShortConvolution
from gla_ext.ops._checks import check_tensors
from gla_ext.ops.buffered import recurrent_gla_buffered_step_
from gla_ext.ops.chunk import chunk_gla
from gla_ext.ops.pool import chunk_gla_
from gla_ext.ops.recurrent import fused_recurrent_gla, recurrent_gla_step_


class GatedLinearAttention(nn.Module):
    """Gated linear attention (Yang et al., 2023, arXiv:2312.06635, section 4.4).

    For an input x and each head: `S_t = diag(exp(gk_t)) S_{t-1} + k_t v_t^T`,
    `o_t = K^-0.5 S_t^T q_t` with `gk = logsigmoid(x W1 W2 + b) / gate_logit_normalizer`; the
    layer returns `(rms_norm(o) * swish(x Wg)) Wo`. In training, with the norm and o_proj that the
    constructor makes by default, autograd saves o and `x Wg`; backward computes the input of Wo
    again.

    Args:
        mode: 'chunk' and 'fused_chunk' run `chunk_gla`, except for decoding: in eval mode, without
            gradients and outside `batch_invariant`, a single token that continues from a state runs
            `fused_recurrent_gla`. 'fused_recurrent' always runs that. Default: 'chunk'.
        hidden_size: width of the input and the output. Default: 1024.
        expand_k: key width over hidden_size. Default: 0.5.
        expand_v: value width over hidden_size. Default: 1.0.
        num_heads: number of heads H. Default: 4.
        num_kv_heads: number of heads of k, v and gk; divides num_heads. Head h reads head h //
            (num_heads / num_kv_heads) in place, without a copy. Default: None (num_heads).
        feature_map: activation on q and k, after the convolution; see gate_fn. Default: None.
        use_short_conv: causal convolutions of each channel of q, k and v, with SiLU, see
            `gla_ext.layers.short_convolution.ShortConvolution`. Default: False.
        conv_size: kernel size of the convolutions, in tokens. Default: 4.
        conv_bias: whether the convolutions have a bias. Default: False.
        use_output_gate: multiply the output by a gate. Default: True.
        gate_fn: activation of that gate, one of `gla_ext.layers.activations.ACTIVATIONS`: 'relu',
            'sigmoid', 'logsigmoid', 'silu', 'swish', 'sqrelu' (relu squared), 'gelu' (by tanh).
            Default: 'swish'.
        elementwise_affine: whether the norm has a weight. Default: True.
        norm_eps: epsilon of the norm. Default: 1e-5.
        gate_logit_normalizer: divides the log gate; above 0, larger forgets more slowly.
            Default: 16.
        gate_low_rank_dim: rank of the gate projection. Default: 16.
        clamp_min: lower bound of the log gate (natural log), at most 0. Default: None.
        fuse_norm: norm and output gate are one operator, which rounds once, instead of two. With
            gate_fn 'swish' (not 'silu') this also names the norm `g_norm_swish_gate` instead of
            `g_norm`. Default: True.
        layer_idx: index of this layer in a cache. Default: None.

    In train mode, q, k, v, the output gate and the gate's first map are one product with
    concatenated weights, if these modules are `nn.Linear`s of one dtype without hooks, adapters,
    quantized or sharded weights. Forward concatenates the weights and backward does it again; the
    copy is not kept between. `batch_projections = False`, set on an instance or on the class, makes
    them separate products. Without gradients they are one product after
    `gla_ext.model.fuse_projections`.

    If tensor parallelism has sharded the projections by columns, forward computes only the heads of
    this rank. The output of o_proj is then this rank's summand.

    Raises:
        TypeError: an option of another type: a flag that is no bool, a size that is no integer.
        ValueError: sizes that do not divide, an unknown mode or activation.
        NotImplementedError: 'bias_gelu' as an activation.
    """

    batch_projections = True

    @typed_options
    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        feature_map: str | None = None,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        use_output_gate: bool = True,
        gate_fn: str = "swish",
        elementwise_affine: bool | None = True,
        norm_eps: float = 1e-5,
        gate_logit_normalizer: float = 16,
        gate_low_rank_dim: int = 16,
        clamp_min: float | None = None,
        fuse_norm: bool = True,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_options(mode, num_heads, num_kv_heads, gate_logit_normalizer, clamp_min)
        sizes = {"conv_size": conv_size, "gate_low_rank_dim": gate_low_rank_dim}
        check_sizes("GatedLinearAttention", **sizes)
        self.mode = mode
        self.hidden_size = hidden_size
        self.expand_k, self.expand_v = expand_k, expand_v
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.num_kv_groups = num_heads // num_kv_heads
        self.feature_map_fn = (
            None if feature_map is None else activation(feature_map, "feature_map")
        )
        self.use_short_conv = use_short_conv
        self.conv_size, self.conv_bias = conv_size, conv_bias
        self.use_output_gate = use_output_gate
        self.gate_logit_normalizer = gate_logit_normalizer
        self.clamp_min = clamp_min
        self.layer_idx = layer_idx

        self.key_dim = expanded_dim("expand_k", hidden_size, expand_k, num_heads)
        self.value_dim = expanded_dim("expand_v", hidden_size, expand_v, num_heads)
        self.key_dim_per_group = self.key_dim // self.num_kv_groups
        self.value_dim_per_group = self.value_dim // self.num_kv_groups
        self.head_k_dim = self.key_dim // num_heads
        self.head_v_dim = self.value_dim // num_heads

        self.q_proj = nn.Linear(hidden_size, self.key_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, self.key_dim_per_group, bias=False)
        self.v_proj = nn.Linear(hidden_size, self.value_dim_per_group, bias=False)
        if use_output_gate:
            self.g_proj = nn.Linear(hidden_size, self.value_dim, bias=False)
        if use_short_conv:
            self.q_conv1d = ShortConvolution(self.key_dim, conv_size, conv_bias)
            self.k_conv1d = ShortConvolution(self.key_dim_per_group, conv_size, conv_bias)
            self.v_conv1d = ShortConvolution(self.value_dim_per_group, conv_size, conv_bias)
        self.gk_proj = nn.Sequential(
            nn.Linear(hidden_size, gate_low_rank_dim, bias=False),
            nn.Linear(gate_low_rank_dim, self.key_dim_per_group, bias=True),
        )
        self.o_proj = nn.Linear(self.value_dim, hidden_size, bias=False)

        self.gate_fn = activation(gate_fn, "gate_fn")
        self.fuse_norm_and_gate = fuse_norm and use_output_gate
        options = (self.head_v_dim, elementwise_affine, norm_eps)
        if not self.fuse_norm_and_gate:
            self.g_norm = RMSNorm(*options, torch.float32)
        elif gate_fn == "swish":
            self.g_norm_swish_gate = GatedRMSNorm(*options)
        else:
            self.g_norm = GatedRMSNorm(*options, torch.float32, gate_fn)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any | None = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        cu_seqlens: Tensor | None = None,
        cp_context: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None, Any | None]:
        """Applies the layer to a batch of sequences.

        Args:
            hidden_states: `[B, T, hidden_size]`.
            attention_mask: `[B, >= T]` of 0 (padding) and 1, of which the last T columns are used;
                any dtype. The recurrence and the convolutions skip padded tokens, which return 0.
                Other values, as in an additive mask, raise ValueError in eager mode on CPU.
                Elsewhere nothing is read back, and a token with another value is kept.
                Default: None.
            past_key_values: a cache (`gla_ext.cache.GLACache`, or one with its methods). Its entry
                for layer_idx is the state in which the recurrence and the convolutions start; for
                the latter see `gla_ext.layers.short_convolution.ShortConvolution`. Default: None.
            use_cache: store the final states in past_key_values. Default: False.
            output_attentions: accepted and ignored: there are no attention maps.
            cu_seqlens: int32 or int64 `[N + 1]`, offsets of the N sequences packed into a batch of
                one; attention_mask is then ignored. Default: None.
            cp_context: the context if these are one rank's tokens of a longer sequence, see
                `chunk_gla`; it replaces cu_seqlens. Default: None.
            **kwargs: keywords that models pass to every layer, without effect:
                `gla_ext.layers._options.OF_MODELS`.

        Returns:
            The output `[B, T, hidden_size]`, None, and past_key_values.

        Raises:
            ValueError: for shapes that do not fit, a mask with values other than 0 and 1, or
                past_key_values without layer_idx.
            TypeError: if hidden_states, attention_mask or cu_seqlens is no tensor; for other
                keywords, which it names.
            NotImplementedError: for nested tensors; for cp_context together with a mask or in mode
                'fused_recurrent'.
        """
        check_keywords("GatedLinearAttention", kwargs)
        names = "hidden_states attention_mask cu_seqlens"
        check_tensors("GatedLinearAttention", names, hidden_states, attention_mask, cu_seqlens)
        check_hidden_states("GatedLinearAttention", hidden_states, self.hidden_size)
        history = History(self, past_key_values, use_cache, cp_context)
        x = history.take(hidden_states, attention_mask, cu_seqlens)
        (q, k, v, *gate), gk = self._project(x)
        if self.use_short_conv:
            convolutions = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
            q, k, v = history.convolve(convolutions, (q, k, v))
        q, k, v = self._heads_of(q, k, v)
        o = self._attend(q, k, v, self._gates_of_heads(gk), history)
        return history.keep(self._output(o, *gate)), None, past_key_values

    def _project(self, x: Tensor) -> tuple[Sequence[Tensor], Tensor]:
        """The linear maps of x `[B, T, hidden_size]`: a sequence of q, k, v and, if there is one,
        the output gate before its activation; then the log gates. With sharded maps, these are this
        rank's heads.
        """
        linears = self._input_projections()
        together = self.training and self.batch_projections
        if not self._gate_is_two_maps():
            return project(x, linears, together), self._finish_log_gates(self.gk_proj(x))
        down, up = self.gk_proj
        if is_plain(down):
            *outputs, h = project(x, [*linears, down], together)
            return outputs, self._log_gates(h, up)
        return project(x, linears, together), self._log_gates(down(x), up)

    def _heads_of(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q `[B, T, H, K]`, k and v `[B, T, HK, K | V]`, with H heads of queries and HK of keys."""
        K, V = self.head_k_dim, self.head_v_dim
        q, k, v = split_heads(q, K), split_heads(k, K), split_heads(v, V)
        if self.feature_map_fn is not None:
            q, k = self.feature_map_fn(q), self.feature_map_fn(k)
        return q, k, v

    def _gates_of_heads(self, gk: Tensor) -> Tensor:
        """The log gates `[B, T, HK * K]` in the shape that `chunk_gla` takes, `[B, T, HK, K]`."""
        return split_heads(gk, self.head_k_dim)

    def _log_gates(self, h: Tensor, up: nn.Module) -> Tensor:
        """The log gates from the output h of the gate's first map, by its second map `up`."""
        if not is_plain(up, biased=True):
            return self._finish_log_gates(up(h))
        return gate_projection(h, up.weight, up.bias, self.gate_logit_normalizer, self.clamp_min)

    def _finish_log_gates(self, gk: Tensor) -> Tensor:
        gk = F.logsigmoid(gk) / self.gate_logit_normalizer
        return gk if self.clamp_min is None else gk.clamp_min(self.clamp_min)

    def fuse_projections(self) -> None:
        """See `gla_ext.model.fuse_projections`."""
        first = [self.gk_proj[0]] if self._gate_is_two_maps() else []
        lay_side_by_side([*self._input_projections(), *first])

    def _input_projections(self) -> list[nn.Module]:
        linears = [self.q_proj, self.k_proj, self.v_proj]
        return [*linears, self.g_proj] if self.use_output_gate else linears

    def _gate_is_two_maps(self) -> bool:
        """Whether gk_proj is as the constructor made it: two modules that may be called
        separately.
        """
        gk_proj = self.gk_proj
        return type(gk_proj) is nn.Sequential and len(gk_proj) == 2 and nobody_sees(gk_proj)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, gk: Tensor, history: History) -> Tensor:
        """The heads' outputs `[B, T, H, V]`; history gets the states `[N, H, V, K]` after them."""
        state, cu_seqlens = history.state, history.cu_seqlens
        buffers = history.token_buffers(k, v, gk)
        if buffers is not None:
            options = {"slots": history.slots, "state_v_first": True}
            return recurrent_gla_buffered_step_(q, k, v, gk, state=state, **buffers, **options)
        if history.pool is not None:
            history.state = history.pool["state"]
            options = {**history.pool, "state_v_first": True, "cu_seqlens": cu_seqlens}
            return chunk_gla_(q, k, v, gk, **options)
        if not recurs(self, q.shape[1], history):
            attend = partial(chunk_gla, cp_context=history.cp_context)
        elif history.in_place and state is not None and cu_seqlens is None:
            slots = history.slots
            return recurrent_gla_step_(q, k, v, gk, state=state, slots=slots, state_v_first=True)
        else:
            attend = fused_recurrent_gla
        if state is not None and state.element_size() == 2:  # from a cache of 16-bit states
            state = state.float()
        states = {"initial_state": state, "output_final_state": history.wants_state}
        o, history.state = attend(q, k, v, gk, **states, state_v_first=True, cu_seqlens=cu_seqlens)
        return o

    @property
    def norm(self) -> RMSNorm:
        """The norm of the heads' outputs, whose name follows from the options."""
        named = "g_norm_swish_gate" if hasattr(self, "g_norm_swish_gate") else "g_norm"
        return getattr(self, named)

    def _output(self, o: Tensor, gate: Tensor | None = None) -> Tensor:
        """From the heads' outputs `[B, T, H, V]` to the layer's `[B, T, hidden_size]`."""
        if gate is None or not makes_input_again(self, o, gate):
            return self.o_proj(self._norm_and_gate(o, gate))
        return self.norm._into_linear(o, gate, self.o_proj.weight)

    def _norm_and_gate(self, o: Tensor, gate: Tensor | None) -> Tensor:
        """From the heads' outputs `[B, T, H, V]` to the input of o_proj `[B, T, H * V]`."""
        if self.fuse_norm_and_gate:
            return self.norm(o, split_heads(gate, self.head_v_dim)).flatten(-2)
        o = self.norm(o).flatten(-2)
        return o if gate is None else o * self.gate_fn(gate)
