"""The ten step operators by name, for tests and benchmarks."""

import types

import torch
from common import Inputs

ops = torch.ops.gla_ext

# name: (call with everything a step may need, names of its results)
STEPS = {
    "_gate_cumsum": (lambda x: ops._gate_cumsum(x.g, x.cu_seqlens), ["b"]),
    "_chunk_states": (
        lambda x: ops._chunk_states(x.k, x.v, x.b, x.initial_state, x.cu_seqlens, x.state_v_first),
        ["S", "final_state"],
    ),
    "_scores_off_diagonal": (
        lambda x: ops._scores_off_diagonal(x.q, x.k, x.b, x.cu_seqlens, x.scale),
        ["A"],
    ),
    "_scores_diagonal": (
        lambda x: ops._scores_diagonal(x.q, x.k, x.b, x.cu_seqlens, x.scale),
        ["A_diagonal"],
    ),
    "_output": (
        lambda x: ops._output(x.q, x.v, x.b, x.A, x.A_diagonal, x.S, x.cu_seqlens, x.scale),
        ["o"],
    ),
    "_state_grads": (
        lambda x: ops._state_grads(x.q, x.do, x.b, x.dht, x.cu_seqlens, x.scale, x.state_v_first),
        ["dS", "dh0"],
    ),
    "_value_grads": (
        lambda x: ops._value_grads(x.k, x.do, x.b, x.A, x.A_diagonal, x.dS, x.cu_seqlens),
        ["dv"],
    ),
    "_score_grads": (  # has no K to take a default scale from
        lambda x: ops._score_grads(x.do, x.v, x.cu_seqlens, x.scale or x.q.shape[-1] ** -0.5),
        ["dA"],
    ),
    "_intra_grads": (
        lambda x: ops._intra_grads(x.q, x.k, x.b, x.dA, x.cu_seqlens),
        ["dq_intra", "dk_intra", "dg_intra"],
    ),
    "_merge_grads": (
        lambda x: ops._merge_grads(
            *(x.q, x.k, x.v, x.do, x.b, x.S, x.dS, x.dq_intra, x.dk_intra, x.dg_intra),
            *(x.cu_seqlens, x.scale),
        ),
        ["dq", "dk", "dg"],
    ),
}


def as_tuple(results) -> tuple[torch.Tensor, ...]:
    return (results,) if isinstance(results, torch.Tensor) else tuple(results)


def compose_steps(inputs: Inputs, scale: float | None = None) -> types.SimpleNamespace:
    """Runs the ten in their order: the inputs and every result, by name."""
    x = types.SimpleNamespace(**vars(inputs), scale=scale, state_v_first=False)
    for call, names in STEPS.values():
        vars(x).update(zip(names, as_tuple(call(x)), strict=True))
    return x
