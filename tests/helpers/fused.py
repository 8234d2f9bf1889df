"""Inputs and plans for tests of the fused path on Hopper."""

import dataclasses

import torch
from common import Inputs, make_inputs, ours
from large import large_inputs
from plans import cluster_items, one_pass

from gla_ext import _C

BF16 = torch.bfloat16
UNEVEN_LENGTHS = (0, 1, 130, 64, 0, 65, 15, 400, 0)  # with a tail of 20 tokens, 695 in all
# With a tail of 100 tokens; two of them in several segments of 32 chunks or a few more.
SWEPT_LENGTHS = (0, 1, 4300, 64, 0, 65, 2200, 15, 1755, 0)
SWEPT_TOKENS = 8500
TOKENS = ("o", "dq", "dk", "dv", "dg")


def for_this_gpu(count: int) -> int:
    """The number of sequences or heads on this GPU that corresponds to `count` on an H200. It is
    proportional to the multiprocessors. Their number decides whether a call sweeps, how many items
    a block or a cluster takes, and where sequences are cut.
    """
    return -(-count * torch.cuda.get_device_properties().multi_processor_count // 132)


def call_plan(x: Inputs, **options) -> dict[str, object]:
    """The plan of a call with such inputs on this GPU."""
    return _C.plan(
        *x.q.shape,
        x.v.shape[-1],
        N=None if x.cu_seqlens is None else len(x.cu_seqlens) - 1,
        dtype="bfloat16",
        gate_dtype=str(x.g.dtype).removeprefix("torch."),
        processors=torch.cuda.get_device_properties().multi_processor_count,
        device="cuda",
        **options,
    )


def plan_of(x: Inputs, backward: bool = True, **options) -> dict[str, object]:
    """One pass of it."""
    return one_pass(call_plan(x, **options), backward)


def facts_of(x: Inputs, **options) -> set[str]:
    """What a call does on this GPU: the kernels of both ways, and how they share out the work."""
    facts = set()
    for way in ("forward", "backward"):
        plan = plan_of(x, way == "backward", **options)
        facts |= {plan["path"], *plan["kernels"]}
        if plan["segments"] == 0:
            facts.add(f"{way} whole")
        else:
            chunks = plan["segment_chunks"]
            facts |= {f"{way} in segments", f"{way} in segments of {chunks} chunks"}
        if plan["replays"]:
            facts.add("a segment sums the one before")
        if cluster_items(plan) > 1:
            facts.add(f"{way} of several heads a cluster")
    return facts


def half_of_the_gpu(H: int, V: int) -> int:
    """Rows whose heads leave two places of forward's sweep for each of their blocks."""
    return for_this_gpu(66) // (H * -(-V // 128))


DRAWN_ON_CPU = 2**22  # elements of q and v that `make_inputs`, which draws there, still makes soon


def draw(
    B: int,
    T: int,
    H: int,
    K: int,
    V: int,
    gates: float | str = 0.1,
    gate_dtype: torch.dtype = BF16,
    lengths: tuple[int, ...] | None = None,
    **options,
) -> Inputs:
    """Random inputs. Gates are as one of `GATES` says; for one of `KINDS` they are weak, except
    where the kind says otherwise.
    """
    options |= {"lengths": lengths, "gate_dtype": gate_dtype, "device": "cuda"}
    options = {"states": True} | options
    gate = 0.1 if gates in KINDS else gates
    make = make_inputs if B * T * H * (K + V) <= DRAWN_ON_CPU else large_inputs
    x = make(B, T, H, K, V, BF16, gate, **options)
    return mixed_gates(x, gates) if gates in KINDS else x


def draw_packed_sweep(H: int, K: int, V: int, lengths=SWEPT_LENGTHS, **options) -> Inputs:
    """Packed sequences whose gradients are swept for: H are heads enough on an H200."""
    x = draw(1, SWEPT_TOKENS, for_this_gpu(H), K, V, lengths=lengths, **options)
    assert {"gradients.sweep", "gradients.small_sweep"} & facts_of(x)
    return x


def v_first_results(x: Inputs) -> dict[str, torch.Tensor]:
    """`ours`, of states that lie [V, K]."""
    turned = {name: getattr(x, name).mT.contiguous() for name in ("initial_state", "dht")}
    results = ours(dataclasses.replace(x, **turned), state_v_first=True)
    for name in ("final_state", "dh0"):
        results[name] = results[name].mT
    return results


MIXED = ("every other chunk", "one channel", "one head", "the last token", "every first token")
FIRST = ("first of two chunks", "first of two chunks and one")
KINDS = (*MIXED, *FIRST, "resets alone")


def mixed_gates(x: Inputs, kind: str) -> Inputs:
    """Gates that put chunks, or channels of them, in and out of tier 1's range."""
    g = x.g.clone()
    if kind in ("every other chunk", *FIRST):
        for start in range(0 if kind in FIRST else 64, x.q.shape[1], 128):
            g[:, start : start + 64] *= 100
        if kind.endswith("and one"):
            g[:, 64:128] *= 100
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
