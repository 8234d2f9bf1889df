"""The layers that the experiments compare, each in the place of a block's `GatedLinearAttention`.

All have q and k of half the width and v, output gate and output of the whole, as GLA has; softmax
attention (`gla_ext.layers.attention.Attention`), which has no output gate, has q and k of the whole
width instead: as many parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from gla_ext import GatedLinearAttention, chunk_gla
from gla_ext.model.blocks import GLABlock
from gla_ext.ops import retention_decay

ROTARY_BASE = 10000.0
GATES = ("channel", "head", "constant", "none")
GATE_RANK = 16


def rotate(x: Tensor, first: int = 0) -> Tensor:
    """Turns channel pairs by their token's position (Su et al., 2021, arXiv:2104.09864).

    Args:
        x: `[B, T, H, D]`, D even; halves are pairs.
        first: the position of the first token.
    """
    T, half = x.shape[1], x.shape[-1] // 2
    position = first + torch.arange(T, device=x.device, dtype=torch.float32)
    channel = torch.arange(half, device=x.device, dtype=torch.float32)
    angle = position[:, None, None] * ROTARY_BASE ** (-channel / half)  # [T, 1, D / 2]
    cos, sin = angle.cos(), angle.sin()
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class NoGate(nn.Module):
    """Stands for gk_proj where the gate does not depend on the token: one 0 a head."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        zero = torch.zeros((), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        return zero.expand(*x.shape[:-1], self.heads)


class LinearAttention(GatedLinearAttention):
    """GLA, and what it becomes with less of a gate, or with one on values.

    Args:
        gate: 'channel', a gate for each channel of the keys, is GLA; 'head', one for each head;
            'constant', RetNet's decay of each head; 'none', no decay.
        value_gate: gate the channels of the values too, by a map of rank 16 of its own.
        rotary: turn q and k by their positions, as RetNet does.
        options: of `GatedLinearAttention`.
    """

    def __init__(
        self, gate: str = "channel", value_gate: bool = False, rotary: bool = False, **options: Any
    ) -> None:
        super().__init__(**options)
        if gate not in GATES:
            raise ValueError(f"expected gate to be one of {', '.join(GATES)}, got {gate!r}")
        self.gate, self.rotary = gate, rotary
        H = self.num_heads
        if gate == "head":
            self.gk_proj[1] = nn.Linear(self.gk_proj[0].out_features, H)
        elif gate != "channel":
            self.gk_proj = NoGate(H)
        self.gv_proj = None
        if value_gate:
            low = nn.Linear(self.hidden_size, GATE_RANK, bias=False)
            self.gv_proj = nn.Sequential(low, nn.Linear(GATE_RANK, self.value_dim))
        self._gv: Tensor | None = None

    def _finish_log_gates(self, gk: Tensor) -> Tensor:
        return super()._finish_log_gates(gk) if self.gate in ("channel", "head") else gk

    def _gates_of_heads(self, gk: Tensor) -> Tensor:
        if self.gate == "channel":
            return super()._gates_of_heads(gk)
        # One gate a head: `[B, T, H]`.
        return retention_decay(self.num_heads, gk).expand_as(gk) if self.gate == "constant" else gk

    def _project(self, x: Tensor) -> tuple[Any, Tensor]:
        if self.gv_proj is not None:
            gv = logsigmoid(self.gv_proj(x)) / self.gate_logit_normalizer
            self._gv = gv.unflatten(-1, (self.num_heads, self.head_v_dim))
        return super()._project(x)

    def _heads_of(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super()._heads_of(q, k, v)
        return (rotate(q), rotate(k), v) if self.rotary else (q, k, v)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, gk: Tensor, history: Any) -> Tensor:
        packed, elsewhere = history.cu_seqlens is not None, history.cp_context is not None
        if history.in_place or elsewhere or (self.rotary and packed):
            raise NotImplementedError("LinearAttention: expected plain rows, for training")
        gv, self._gv = self._gv, None
        o, state = chunk_gla(
            q,
            k,
            v,
            None if self.gate == "none" else gk,
            initial_state=history.state,
            output_final_state=history.wants_state,
            state_v_first=True,
            cu_seqlens=history.cu_seqlens,
            gv=gv,
        )
        if self.rotary and state is not None:
            # Positions start from 0 in every call: the state's keys move T back.
            state = rotate(state.flatten(1, 2).unsqueeze(1), -q.shape[1]).view_as(state)
        history.state = state
        return o


class WithoutMLP(nn.Module):
    """A block's norm and layer, `x + attn(attn_norm(x))`, in the place of the whole block."""

    def __init__(self, block: GLABlock) -> None:
        super().__init__()
        self.attn_norm, self.attn = block.attn_norm, block.attn

    def forward(self, x: Tensor, **attn_args: Any) -> Tensor:
        """x `[B, T, hidden_size]`."""
        return x + self.attn(self.attn_norm(x), **attn_args)[0]
