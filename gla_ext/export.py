"""The operators as plain torch operations, for programs that have no kernels of gla_ext's.

`torch.onnx.export(model, args, path)` needs nothing of this: while it runs, gla_ext's functions,
layers and models are plain operations by themselves. An exported program takes them from
`decompositions`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gla_ext.layers.gate_projection import plain_gate_projection
from gla_ext.layers.norms import plain_rms_norm
from gla_ext.layers.swiglu import plain_swiglu
from gla_ext.ops import _plain

__all__ = ["decompositions"]


def decompositions() -> dict[torch._ops.OperatorBase, Callable]:
    """`torch.export.default_decompositions()` and those of gla_ext's operators.

        program = torch.export.export(model, args)
        program = program.run_decompositions(gla_ext.export.decompositions())

    The program then has operations of torch alone, computes in fp32 (fp64 of fp64 inputs), and is
    right at any gate, -inf included, for symbolic lengths too. It is for inference and slower than
    the operators. Its cost is linear in the length T but for T^2 / 256^2 products of head states'
    decays, which are seen from some 65,536 tokens on, with gates on values from 4,096.

    Operators that have none keep their place in the graph: those of training, and
    `chunk_gla_`, `recurrent_gla_step_` and `recurrent_gla_commit_`, which write into a pool.

    Returns:
        A new table for `torch.export.ExportedProgram.run_decompositions`.
    """
    ops = torch.ops.gla_ext
    table = torch.export.default_decompositions()
    table.update(
        {
            ops.chunk_gla_fwd.default: _chunk_gla_fwd,
            ops.recurrent_gla_fwd.default: _recurrent_gla_fwd,
            ops.recurrent_gla_verify.default: _recurrent_gla_verify,
            ops.short_convolution_fwd.default: _short_convolution_fwd,
            ops.rms_norm_gate_fwd.default: _rms_norm_gate_fwd,
            ops.rms_norm_residual_fwd.default: _rms_norm_residual_fwd,
            ops.gate_projection_fwd.default: plain_gate_projection,
            ops.swiglu_fwd.default: plain_swiglu,
            ops.swiglu_linear.default: _swiglu_linear,
            ops.norm_gate_linear.default: _norm_gate_linear,
        }
    )
    return table


def _chunk_gla_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    gv: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float | None,
    output_final_state: bool,
    state_v_first: bool,
    batch_invariant: bool,
    for_backward_bytes: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    if for_backward_bytes > 0:
        raise NotImplementedError(
            "chunk_gla: expected a graph of inference to decompose, got one that keeps "
            f"{for_backward_bytes} bytes for backward; export in eval mode, under torch.no_grad()"
        )
    args = (q, k, v, g, gv, initial_state, cu_seqlens, scale, False, state_v_first)
    o, state = _plain.gla(*args)
    nothing = state.new_empty(0)
    kept = torch.empty(0, dtype=torch.uint8, device=q.device)
    return o, state if output_final_state else nothing, kept


def _recurrent_gla_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None,
    gv: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float | None,
    output_final_state: bool,
    reverse: bool,
    state_v_first: bool,
) -> tuple[Tensor, Tensor]:
    args = (q, k, v, gk, gv, initial_state, cu_seqlens, scale, reverse, state_v_first)
    o, state = _plain.gla(*args)
    return o, state if output_final_state else state.new_empty(0)


def _recurrent_gla_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None,
    gv: Tensor | None,
    state: Tensor,
    slots: Tensor | None,
    scale: float | None,
    state_v_first: bool,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    own, there = state.to(torch.promote_types(q.dtype, torch.float32)), None
    if slots is not None:
        there = (slots >= 0) & (slots < state.shape[0])
        own = own.index_select(0, torch.where(there, slots, 0))
    o = _plain.gla(q, k, v, gk, gv, own, cu_seqlens, scale, False, state_v_first)[0]
    if there is None:
        return o
    if cu_seqlens is None:
        return torch.where(there[:, None, None, None], o, 0)
    tokens = torch.arange(q.shape[1], device=q.device, dtype=cu_seqlens.dtype)
    drafts = torch.searchsorted(cu_seqlens, tokens, right=True) - 1
    of_tokens = torch.cat([there, there.new_zeros(1)])[drafts]
    return torch.where(of_tokens[None, :, None, None], o, 0)


def _short_convolution_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cache: Tensor | None,
    cu_seqlens: Tensor | None,
    output_state: bool,
) -> tuple[Tensor, Tensor]:
    y, state = _plain.short_convolution(x, weight, bias, cache, cu_seqlens)
    return y, state if output_state else x.new_empty(0)


def _rms_norm_gate_fwd(
    x: Tensor, weight: Tensor | None, gate: Tensor | None, activation: str, eps: float
) -> tuple[Tensor, Tensor]:
    y = plain_rms_norm(x, weight, eps, gate, activation)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return y, torch.rsqrt(wide.square().mean(-1) + eps)


def _rms_norm_residual_fwd(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    stream = residual + x
    y, rstd = _rms_norm_gate_fwd(stream, weight, None, "swish", eps)
    return y.to(x.dtype), stream, rstd


def _swiglu_linear(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(plain_swiglu(gate, up), weight, bias)


def _norm_gate_linear(
    o: Tensor, gate: Tensor, weight: Tensor, norm_weight: Tensor | None, activation: str, eps: float
) -> Tensor:
    y = plain_rms_norm(o, norm_weight, eps, gate.unflatten(-1, o.shape[-2:]), activation)
    return torch.nn.functional.linear(y.flatten(-2), weight)
