"""The ten step operators by name, for tests and benchmarks, and what they are tested on."""

import functools
import types

import torch
from common import GATES, PACKED_LENGTHS, SHAPES, Inputs, assert_close, make_inputs

from gla_ext import reference
from gla_ext.selftest import tolerance

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


IN_INPUT_DTYPE = ("o", "dv", "dq", "dk")  # the rest is fp32, or fp64 with fp64 inputs
STATES = ("initial_state", "final_state", "dht", "dh0")  # those that may be v-first

# shape or lengths, gate, options
CASES = {
    **{
        f"{shape}, gate {gate}": ({"shape": shape}, gate)
        for shape, gate in zip(list(SHAPES)[:8], [*GATES, 0.1, "reset"], strict=True)
    },
    **{f"over two chunks, gate {gate}": ({"shape": "over two chunks"}, gate) for gate in GATES},
    **{
        f"packed, gate {gate}": ({"lengths": PACKED_LENGTHS}, gate) for gate in (1.0, 10.0, "reset")
    },
    "no states": ({"shape": "over two chunks", "states": False}, 1.0),
    "packed, no states": ({"lengths": PACKED_LENGTHS, "states": False}, 1.0),
    "v-first": ({"shape": "over two chunks", "state_v_first": True}, 1.0),
    "packed, v-first": ({"lengths": PACKED_LENGTHS, "state_v_first": True}, 1.0),
    "scale": ({"shape": "over two chunks", "scale": 0.3}, 1.0),
    "strides": ({"shape": "over two chunks", "layout": "sliced"}, 1.0),
    "all empty": ({"lengths": (0, 0)}, 1.0),
}


@functools.lru_cache(maxsize=4)
def step_case(case: str, dtype: torch.dtype, device: str):
    """What the steps are given, and what is right, both by name."""
    options, gate = CASES[case]
    options = dict(options)
    state_v_first, scale = options.pop("state_v_first", False), options.pop("scale", None)
    lengths = options.get("lengths")
    shape = (1, 165, 3, 20, 28) if lengths else SHAPES[options.pop("shape")]
    inputs = make_inputs(*shape, dtype, gate, **options, device=device)
    accumulation = torch.promote_types(dtype, torch.float32)

    exact = inputs.double()
    tokens = [exact.q, exact.k, exact.v, exact.g]
    if dtype != torch.float64:  # gates below this one reset in fp32
        tokens[3] = exact.g.clamp(min=-150 / reference.LOG2E)
    kwargs = {"scale": scale, "initial_state": exact.initial_state, "cu_seqlens": exact.cu_seqlens}
    true_b = reference.chunked_forward(*tokens, **kwargs).b
    kwargs["b"] = true_b.to(accumulation).double()
    forward = reference.chunked_forward(*tokens, **kwargs)
    backward = reference.chunked_backward(exact.do, *tokens, dht=exact.dht, **kwargs)
    expected = forward._asdict() | backward._asdict() | {"b": true_b}

    given = {name: value.to(accumulation) for name, value in expected.items()}
    given |= vars(inputs)
    given |= {"scale": scale, "state_v_first": state_v_first}
    if state_v_first:
        for values in (given, expected):
            values |= {name: values[name].mT for name in STATES if name in values}
    return types.SimpleNamespace(**given), expected


def assert_step_close(name: str, result: torch.Tensor, given, expected):
    """A step's result within the table's bound of what `step_case` says is right."""
    dtype, atol = given.q.dtype, 0.0
    if name == "dg_intra" and result.numel():  # what cancels in it is rounded
        terms = (given.q * expected["dq_intra"], given.k * expected["dk_intra"])
        rounding = 8 * torch.finfo(result.dtype).eps
        atol = rounding * sum(x.double().square().mean().sqrt().item() for x in terms)
    assert_close(result, expected[name], tolerance(name, dtype), atol, name)
