"""`chunk_gla`, forward and every gradient, against the recurrence in fp64."""

import dataclasses
import math

import pytest
import torch
from common import (
    DTYPES,
    GATES,
    LAYOUTS,
    PACKED_LENGTHS,
    SHAPES,
    Inputs,
    assert_close,
    assert_results_close,
    assert_same_bits,
    exact,
    magnitudes,
    make_inputs,
    ours,
    relayout,
)
from hypothesis import given
from hypothesis import strategies as st

from gla_ext import chunk_gla, reference
from gla_ext.selftest import tolerance

pytestmark = pytest.mark.usefixtures("nan_in_fresh_memory")
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_gate = pytest.mark.parametrize("gate", GATES)


@by_dtype
@by_gate
@pytest.mark.parametrize("shape", [name for name in SHAPES if name not in ("long", "train")])
def test_forward_and_gradients(shape, gate, dtype):
    inputs = make_inputs(*SHAPES[shape], dtype, gate)
    assert_results_close(ours(inputs), exact(inputs), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gate", [0.1, 1.0, "reset"])
def test_many_chunks(gate, dtype):
    inputs = make_inputs(*SHAPES["long"], dtype, gate, states=False)
    assert_results_close(ours(inputs), exact(inputs), inputs)


@by_dtype
@by_gate
@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.int64], ids=str)
def test_packed_sequences(offsets_dtype, gate, dtype):
    inputs = make_inputs(1, 165, 3, 20, 28, dtype, gate, lengths=PACKED_LENGTHS)
    end = int(inputs.cu_seqlens[-1])
    results = ours(inputs)
    assert_results_close(results, exact(inputs), inputs)
    assert all(not results[name][:, end:].any() for name in ("o", "dq", "dk", "dv", "dg"))

    inputs = dataclasses.replace(inputs, cu_seqlens=inputs.cu_seqlens.to(offsets_dtype))
    assert_same_bits(ours(inputs), results)
    assert_same_bits(ours(inputs, cu_seqlens_cpu=inputs.cu_seqlens), results)


@pytest.mark.parametrize(
    "lengths", [(), (0,), (0, 0, 0), (165,), (1,) * 20, (64, 0, 64, 37), (130, 1)]
)
def test_packings(lengths):
    inputs = make_inputs(1, 165, 2, 12, 9, torch.float32, lengths=lengths)
    results = ours(inputs)
    if lengths:
        assert_results_close(results, exact(inputs), inputs)
    else:
        assert results["final_state"].shape == results["dh0"].shape == (0, 2, 12, 9)
        assert not any(results[name].any() for name in ("o", "dq", "dk", "dv", "dg"))


FIRST_GATES = {"reset": -torch.inf, "deep": -100.0, "at the edge of tier 1": -75.0}


@by_dtype
@pytest.mark.parametrize("first", FIRST_GATES.values(), ids=FIRST_GATES)
@pytest.mark.parametrize("gate", [0.06, 0.25])
def test_strong_gate_at_the_start_of_chunks(gate, first, dtype):
    """Documents packed to whole chunks: what follows must not share the first gate's exponent."""
    inputs = make_inputs(1, 256, 2, 32, 32, dtype, gate)
    g = inputs.g.clone()
    g[:, ::64] = first
    inputs = dataclasses.replace(inputs, g=g)
    assert_results_close(ours(inputs), exact(inputs), inputs)


def test_large_state_through_a_representable_decay():
    g = torch.full((1, 64, 1, 4), -1.7 * math.log(2))
    g[:, 0] = -75 * math.log(2)
    q, k, v = torch.ones(1, 64, 1, 4), torch.zeros(1, 64, 1, 4), torch.zeros(1, 64, 1, 4)
    state = torch.full((1, 1, 4, 4), 1e20)
    inputs = Inputs(q, k, v, g, torch.ones_like(q), state, torch.ones_like(state), None)
    o, _ = chunk_gla(q, k, v, g, initial_state=state)
    assert_close(o, exact(inputs)["o"], 1e-5)


def test_steadily_positive_gates_overflow_where_the_truth_does():
    q, k, v = (torch.rand(1, 128, 1, 4) for _ in range(3))
    g = torch.ones(1, 128, 1, 4)  # a chunk spans 92, the state at its end is beyond 2^72
    o, _ = chunk_gla(q, k, v, g)
    expected, _ = reference.recurrence(*(x.double() for x in (q, k, v, g)))
    finite = expected.abs() < 1e36  # the terms of a sum overflow a little before it
    assert finite[:, :80].all() and not finite[:, -1].any()
    assert_close(o[finite], expected[finite], 1e-5)


@by_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, dtype):
    inputs = make_inputs(2, 130, 3, 20, 28, dtype, layout=layout)
    results = ours(inputs)
    assert_same_bits(
        results, ours(inputs.map(lambda x: x.clone(memory_format=torch.contiguous_format)))
    )
    assert_results_close(results, exact(inputs), inputs)


@pytest.mark.parametrize("B, T, H, K, V", [(2, 0, 3, 5, 4), (0, 130, 3, 5, 4), (0, 0, 1, 1, 1)])
def test_no_tokens(B, T, H, K, V):
    inputs = make_inputs(B, T, H, K, V)
    results = ours(inputs)
    assert results["o"].shape == (B, T, H, V)
    assert torch.equal(results["final_state"], inputs.initial_state)
    assert torch.equal(results["dh0"], inputs.dht)


@by_dtype
def test_v_first_states(dtype):
    inputs = make_inputs(2, 130, 3, 20, 28, dtype)
    v_first = make_inputs(2, 130, 3, 20, 28, dtype)
    for name in ("initial_state", "dht"):
        v_first = dataclasses.replace(v_first, **{name: getattr(inputs, name).mT.contiguous()})
    results = ours(v_first, state_v_first=True)
    expected = ours(inputs)
    for name in ("final_state", "dh0"):
        assert results[name].shape == (2, 3, 28, 20)
        expected[name] = expected[name].mT
    assert_same_bits(results, expected)


@by_dtype
@pytest.mark.parametrize("scale", [1.0, 0.03, -2.0])
def test_scale(scale, dtype):
    inputs = make_inputs(2, 130, 3, 20, 28, dtype)
    assert_results_close(ours(inputs, scale=scale), exact(inputs, scale), inputs)


@by_gate
@pytest.mark.parametrize("gate_dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_gates_have_a_dtype_of_their_own(dtype, gate_dtype, gate):
    inputs = make_inputs(2, 130, 3, 20, 28, dtype, gate, gate_dtype)
    assert_results_close(ours(inputs), exact(inputs), inputs)


@by_gate
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1e-3, 30.0, 1e3])
def test_magnitudes(size, dtype, gate):
    inputs = make_inputs(2, 130, 3, 20, 28, dtype, gate, size=size)
    assert_results_close(ours(inputs), exact(inputs), inputs)


@pytest.mark.parametrize("size", [1e-12, 6e4])
@by_gate
def test_gradient_magnitudes(gate, size):
    inputs = make_inputs(2, 130, 3, 20, 28, torch.bfloat16, gate)
    for name in ("do", "dht"):
        inputs = dataclasses.replace(inputs, **{name: getattr(inputs, name) * size})
    assert_results_close(ours(inputs), exact(inputs), inputs)


@by_dtype
def test_positive_gates_while_a_chunk_spans_little(dtype):
    inputs = make_inputs(2, 130, 3, 20, 28, dtype, gate=-1 / 16)
    assert (inputs.g > 0).all()
    assert_results_close(ours(inputs), exact(inputs), inputs)


def chunk_range(g: torch.Tensor, tokens: int) -> torch.Tensor:
    """max b - min b over each `tokens` tokens, the largest over channels, log2 units."""
    b = reference.chunked_forward(g, g, g, g).b
    blocks = b.split(tokens, 1)
    return torch.stack([(x.amax(1) - x.amin(1)).amax() for x in blocks])


@by_dtype
@pytest.mark.parametrize(
    "log2_gate, chunk, sub_chunk",
    [
        (-1.0, 63, 15),
        (-1.75, 110.25, 26.25),
        (-1.8125, 114.1875, 27.1875),
        (-7.0, 441, 105),
        (-7.5, 472.5, 112.5),
        (-20.0, 1260, 300),
        (-140.0, 8820, 2100),
    ],
)
def test_tiers(log2_gate, chunk, sub_chunk, dtype):
    """One gate for all tokens, so that the ranges, which choose the tier at 112, are known."""
    inputs = make_inputs(
        1, 192, 2, 20, 28, dtype, gate_dtype=torch.promote_types(dtype, torch.float32)
    )
    inputs.g.fill_(log2_gate / reference.LOG2E)
    inputs.g[:, 64:128] /= 8  # a chunk of a lower tier among them
    g = inputs.g.double()
    assert_close(chunk_range(g, 64)[::2], torch.full((2,), float(chunk)), 1e-6)
    assert_close(chunk_range(g, 16)[:4], torch.full((4,), float(sub_chunk)), 1e-6)
    assert_results_close(ours(inputs), exact(inputs), inputs)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "g", "initial_state"])
def test_gradient_of_one_input_alone(wanted):
    inputs = make_inputs(2, 130, 3, 20, 28)
    operands = {
        name: getattr(inputs, name).clone() for name in ("q", "k", "v", "g", "initial_state")
    }
    operands[wanted].requires_grad_()
    o, final_state = chunk_gla(**operands, output_final_state=True)
    torch.autograd.backward([o, final_state], [inputs.do, inputs.dht])
    everything = ours(inputs)
    names = {"q": "dq", "k": "dk", "v": "dv", "g": "dg", "initial_state": "dh0"}
    assert torch.equal(operands[wanted].grad, everything[names[wanted]])
    assert all(x.grad is None for name, x in operands.items() if name != wanted)


def test_final_state_only_when_asked_for():
    x = make_inputs(2, 130, 3, 20, 28)
    o, final_state = chunk_gla(x.q, x.k, x.v, x.g, initial_state=x.initial_state)
    assert final_state is None
    o_too, final_state = chunk_gla(
        x.q, x.k, x.v, x.g, initial_state=x.initial_state, output_final_state=True
    )
    assert final_state.dtype == torch.float32
    assert torch.equal(o, o_too)


@by_dtype
def test_output_unused(dtype):
    """do is undefined when only the final state is used."""
    x = make_inputs(2, 130, 3, 20, 28, dtype, gate=0.1)
    x = dataclasses.replace(x, do=torch.zeros_like(x.do))
    leaves = [y.clone().requires_grad_() for y in (x.q, x.k, x.v, x.g, x.initial_state)]
    q, k, v, g, initial_state = leaves
    _, final_state = chunk_gla(q, k, v, g, initial_state=initial_state, output_final_state=True)
    final_state.backward(x.dht)
    expected = exact(x)
    zero_if_none = torch.zeros_like(q) if q.grad is None else q.grad
    assert not zero_if_none.any()
    for name, leaf in zip(("dk", "dv", "dg", "dh0"), leaves[1:], strict=True):
        assert_close(leaf.grad, expected[name], tolerance(name, dtype), name=name)


@by_dtype
def test_expanded_upstream_gradient(dtype):
    """do of `o.sum()` has stride 0 everywhere; a misaligned or strided one comes out of slicing."""
    x = make_inputs(2, 130, 3, 20, 28, dtype, states=False)
    ones = torch.ones((), dtype=dtype).expand(x.do.shape)
    for do in (ones, *(relayout(x.do, layout) for layout in LAYOUTS)):
        x = dataclasses.replace(x, do=do)
        assert_results_close(ours(x), exact(x), x)


def gradcheck(fast=False, state_v_first=False, **shape):
    x = make_inputs(**shape, dtype=torch.float64)
    if state_v_first and x.initial_state is not None:
        x = dataclasses.replace(x, initial_state=x.initial_state.mT.contiguous())
    leaves = [x.q, x.k, x.v, x.g] + ([] if x.initial_state is None else [x.initial_state])

    def function(q, k, v, g, initial_state=None):
        o, final_state = chunk_gla(
            *(q, k, v, g, 0.7, initial_state, True, state_v_first, x.cu_seqlens)
        )
        return o, final_state

    leaves = [y.requires_grad_() for y in leaves]
    assert torch.autograd.gradcheck(function, leaves, fast_mode=fast)


@pytest.mark.parametrize("gate", [0.0, 1.0, 10.0])
@pytest.mark.parametrize("states", [True, False])
def test_gradcheck(states, gate):
    gradcheck(B=1, T=20, H=2, K=3, V=2, gate=gate, states=states)


@pytest.mark.parametrize("gate", [0.1, 1.0, 2.0, 10.0])
@pytest.mark.parametrize("state_v_first", [True, False])
def test_gradcheck_over_chunks(state_v_first, gate):
    gradcheck(B=1, T=70, H=1, K=2, V=1, gate=gate, state_v_first=state_v_first)
    gradcheck(B=2, T=130, H=2, K=5, V=3, gate=gate, state_v_first=state_v_first, fast=True)


@pytest.mark.parametrize("gate", [0.1, 1.0, 10.0])
def test_gradcheck_packed(gate):
    gradcheck(B=1, T=80, H=1, K=2, V=1, gate=gate, lengths=(3, 0, 66, 5))


@given(
    B=st.integers(1, 2),
    T=st.integers(0, 150),
    H=st.integers(1, 3),
    K=st.integers(1, 24),
    V=st.integers(1, 24),
    dtype=st.sampled_from(DTYPES),
    gate=st.sampled_from(GATES),
    states=st.booleans(),
    layout=st.sampled_from(["contiguous", "transposed", "sliced", "misaligned"]),
    lengths=st.none() | st.lists(st.integers(0, 70), min_size=1, max_size=6),
    seed=st.integers(0, 2**31),
)
def test_any_shape_gate_and_packing(B, T, lengths, **options):
    if lengths is not None:
        B, T = 1, T + sum(lengths)
        options["lengths"] = tuple(lengths)
    inputs = make_inputs(B, T, **options)
    assert_results_close(ours(inputs), exact(inputs), inputs, magnitudes(inputs))
