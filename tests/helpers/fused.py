"""Inputs and plans for tests of the fused path on Hopper."""

import dataclasses

import torch
from common import Inputs, make_inputs, ours
from plans import one_pass

from gla_ext import _C

BF16 = torch.bfloat16
UNEVEN_LENGTHS = (0, 1, 130, 64, 0, 65, 15, 400, 0)  # with a tail of 20 tokens, 695 in all
TOKENS = ("o", "dq", "dk", "dv", "dg")


def for_this_gpu(count: int) -> int:
    """As many sequences or heads as `count` on an H200 in proportion to the multiprocessors, which
    decide who sweeps, how often a block or a cluster goes on, and where sequences are cut."""
    return -(-count * torch.cuda.get_device_properties().multi_processor_count // 132)


def plan_of(x: Inputs, backward: bool = True, **options) -> dict[str, object]:
    """The plan of a call with such inputs on this GPU."""
    plan = _C.plan(
        *x.q.shape,
        x.v.shape[-1],
        N=None if x.cu_seqlens is None else len(x.cu_seqlens) - 1,
        dtype="bfloat16",
        gate_dtype=str(x.g.dtype).removeprefix("torch."),
        processors=torch.cuda.get_device_properties().multi_processor_count,
        device="cuda",
        **options,
    )
    return one_pass(plan, backward)


def packed(T: int, lengths, *sizes, gate: float | str = 0.1, **options) -> Inputs:
    return make_inputs(1, T, *sizes, BF16, gate, lengths=lengths, device="cuda", **options)


def v_first_results(x: Inputs) -> dict[str, torch.Tensor]:
    """`ours`, of states that lie [V, K]."""
    turned = {name: getattr(x, name).mT.contiguous() for name in ("initial_state", "dht")}
    results = ours(dataclasses.replace(x, **turned), state_v_first=True)
    for name in ("final_state", "dh0"):
        results[name] = results[name].mT
    return results


def mixed_gates(x: Inputs, kind: str) -> Inputs:
    """Gates that put chunks, or channels of them, in and out of tier 1's range."""
    g = x.g.clone()
    if kind == "every other chunk":
        for start in range(64, x.q.shape[1], 128):
            g[:, start : start + 64] *= 100
    elif kind == "one channel":
        g[..., 5] *= 200
    elif kind == "one head":
        g[:, :, 1] *= 100
    elif kind == "the last token":
        g[:, -1] = -torch.inf
    elif kind == "every first token":
        g[:, ::64] = -80.0
    else:
        g[:] = -torch.inf
    return dataclasses.replace(x, g=g)


MIXED = ["every other chunk", "one channel", "one head", "the last token", "every first token"]


def operators(x: Inputs, kept: int = -1, between=lambda kept: None) -> dict[str, torch.Tensor]:
    """Results of the operators, which alone are told how many bytes to keep.

    `between` them, it is called with what forward has kept.
    """
    op, inputs = torch.ops.gla_ext, (x.q, x.k, x.v, x.g, None, x.initial_state, x.cu_seqlens)
    with torch.no_grad():
        o, final_state, kept = op.chunk_gla_fwd(*inputs, None, True, False, False, kept)
        between(kept)
        dq, dk, dv, dg, _, dh0 = op.chunk_gla_bwd(x.do, x.dht, *inputs, None, False, False, kept)
    gradients = {"dq": dq, "dk": dk, "dv": dv, "dg": dg, "dh0": dh0}
    return {"o": o, "final_state": final_state} | gradients
