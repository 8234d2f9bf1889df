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
def test_forward_and_gradients(device, shape, gate, dtype):
    inputs = make_inputs(*SHAPES[shape], dtype, gate, device=device)
    assert_results_close(ours(inputs), exact(inputs), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gate", [0.1, 1.0, "reset"])
def test_many_chunks(device, gate, dtype):
    inputs = make_inputs(*SHAPES["long"], dtype, gate, states=False, device=device)
    assert_results_close(ours(inputs), exact(inputs), inputs)


@by_dtype
@by_gate
@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.int64], ids=str)
def test_packed_sequences(device, head, offsets_dtype, gate, dtype):
    inputs = make_inputs(1, 165, 3, *head, dtype, gate, lengths=PACKED_LENGTHS, device=device)
    end = int(inputs.cu_seqlens[-1])
    results = ours(inputs)
    assert_results_close(results, exact(inputs), inputs)
    assert all(not results[name][:, end:].any() for name in ("o", "dq", "dk", "dv", "dg"))

    inputs = dataclasses.replace(inputs, cu_seqlens=inputs.cu_seqlens.to(offsets_dtype))
    assert_same_bits(ours(inputs), results)
    assert_same_bits(ours(inputs, cu_seqlens_cpu=inputs.cu_seqlens.cpu()), results)


@pytest.mark.parametrize(
    "lengths", [(), (0,), (0, 0, 0), (165,), (1,) * 20, (64, 0, 64, 37), (130, 1)]
)
def test_packings(device, lengths):
    inputs = make_inputs(1, 165, 2, 12, 9, torch.float32, lengths=lengths, device=device)
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
def test_strong_gate_at_the_start_of_chunks(device, gate, first, dtype):
    """Documents packed to whole chunks: what follows must not share the first gate's exponent."""
    inputs = make_inputs(1, 256, 2, 32, 32, dtype, gate, device=device)
    g = inputs.g.clone()
    g[:, ::64] = first
    inputs = dataclasses.replace(inputs, g=g)
    assert_results_close(ours(inputs), exact(inputs), inputs)


def test_large_state_through_a_representable_decay(device):
    g = torch.full((1, 64, 1, 4), -1.7 * math.log(2), device=device)
    g[:, 0] = -75 * math.log(2)
    q, k, v = torch.ones_like(g), torch.zeros_like(g), torch.zeros_like(g)
    state = torch.full((1, 1, 4, 4), 1e20, device=device)
    inputs = Inputs(q, k, v, g, torch.ones_like(q), state, torch.ones_like(state), None)
    o, _ = chunk_gla(q, k, v, g, initial_state=state)
    assert_close(o, exact(inputs)["o"], 1e-5)


def test_steadily_positive_gates_overflow_where_the_truth_does(device):
    q, k, v = (torch.rand(1, 128, 1, 4).to(device) for _ in range(3))
    g = torch.ones_like(q)  # a chunk spans 92, the state at its end is beyond 2^72
    o, _ = chunk_gla(q, k, v, g)
    expected, _ = reference.recurrence(*(x.double() for x in (q, k, v, g)))
    finite = expected.abs() < 1e36  # the terms of a sum overflow a little before it
    assert finite[:, :80].all() and not finite[:, -1].any()
    assert_close(o[finite], expected[finite], 1e-5)


@by_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(device, head, layout, dtype):
    inputs = make_inputs(2, 130, 3, *head, dtype, layout=layout, device=device)
    results = ours(inputs)
    assert_same_bits(
        results, ours(inputs.map(lambda x: x.clone(memory_format=torch.contiguous_format)))
    )
    assert_results_close(results, exact(inputs), inputs)


@pytest.mark.parametrize("B, T, H, K, V", [(2, 0, 3, 5, 4), (0, 130, 3, 5, 4), (0, 0, 1, 1, 1)])
def test_no_tokens(device, B, T, H, K, V):
    inputs = make_inputs(B, T, H, K, V, device=device)
    results = ours(inputs)
    assert results["o"].shape == (B, T, H, V)
    assert torch.equal(results["final_state"], inputs.initial_state)
    assert torch.equal(results["dh0"], inputs.dht)


@by_dtype
def test_v_first_states(device, head, dtype):
    inputs = make_inputs(2, 130, 3, *head, dtype, device=device)
    v_first = make_inputs(2, 130, 3, *head, dtype, device=device)
    for name in ("initial_state", "dht"):
        v_first = dataclasses.replace(v_first, **{name: getattr(inputs, name).mT.contiguous()})
    results = ours(v_first, state_v_first=True)
    expected = ours(inputs)
    for name in ("final_state", "dh0"):
        assert results[name].shape == (2, 3, *head[::-1])
        expected[name] = expected[name].mT
    assert_same_bits(results, expected)


@by_dtype
@pytest.mark.parametrize("scale", [1.0, 0.03, -2.0])
def test_scale(device, head, scale, dtype):
    inputs = make_inputs(2, 130, 3, *head, dtype, device=device)
    assert_results_close(ours(inputs, scale=scale), exact(inputs, scale), inputs)


@by_gate
@pytest.mark.parametrize("gate_dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_gates_have_a_dtype_of_their_own(device, head, dtype, gate_dtype, gate):
    inputs = make_inputs(2, 130, 3, *head, dtype, gate, gate_dtype, device=device)
    assert_results_close(ours(inputs), exact(inputs), inputs)


@by_gate
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1e-3, 30.0, 1e3])
def test_magnitudes(device, head, size, dtype, gate):
    inputs = make_inputs(8, 130, 3, *head, dtype, gate, size=size, device=device)
    assert_results_close(ours(inputs), exact(inputs), inputs)


@pytest.mark.parametrize("size", [1e-12, 6e4])
@by_gate
def test_gradient_magnitudes(device, head, gate, size):
    inputs = make_inputs(2, 130, 3, *head, torch.bfloat16, gate, device=device)
    for name in ("do", "dht"):
        inputs = dataclasses.replace(inputs, **{name: getattr(inputs, name) * size})
    assert_results_close(ours(inputs), exact(inputs), inputs)


@by_dtype
def test_positive_gates_while_a_chunk_spans_little(device, head, dtype):
    inputs = make_inputs(2, 130, 3, *head, dtype, gate=-1 / 16, device=device)
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
def test_tiers(device, head, log2_gate, chunk, sub_chunk, dtype):
    """One gate for all tokens, so that the ranges, which choose the tier at 112, are known."""
    gate_dtype = torch.promote_types(dtype, torch.float32)
    inputs = make_inputs(1, 192, 2, *head, dtype, gate_dtype=gate_dtype, device=device)
    inputs.g.fill_(log2_gate / reference.LOG2E)
    inputs.g[:, 64:128] /= 8  # a chunk of a lower tier among them
    g = inputs.g.double()
    assert_close(chunk_range(g, 64)[::2], g.new_full((2,), chunk), 1e-6)
    assert_close(chunk_range(g, 16)[:4], g.new_full((4,), sub_chunk), 1e-6)
    assert_results_close(ours(inputs), exact(inputs), inputs)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "g", "initial_state"])
def test_gradient_of_one_input_alone(device, wanted):
    inputs = make_inputs(2, 130, 3, 20, 28, device=device)
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


def test_final_state_only_when_asked_for(device):
    x = make_inputs(2, 130, 3, 20, 28, device=device)
    o, final_state = chunk_gla(x.q, x.k, x.v, x.g, initial_state=x.initial_state)
    assert final_state is None
    o_too, final_state = chunk_gla(
        x.q, x.k, x.v, x.g, initial_state=x.initial_state, output_final_state=True
    )
    assert final_state.dtype == torch.float32
    assert torch.equal(o, o_too)


@by_dtype
def test_output_unused(device, head, dtype):
    """do is undefined when only the final state is used."""
    x = make_inputs(2, 130, 3, *head, dtype, gate=0.1, device=device)
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
def test_expanded_upstream_gradient(device, head, dtype):
    """do of `o.sum()` has stride 0 everywhere; a misaligned or strided one comes out of slicing."""
    x = make_inputs(2, 130, 3, *head, dtype, states=False, device=device)
    ones = x.do.new_ones(()).expand(x.do.shape)
    for do in (ones, *(relayout(x.do, layout) for layout in LAYOUTS)):
        x = dataclasses.replace(x, do=do)
        assert_results_close(ours(x), exact(x), x)


@given(
    B=st.integers(1, 2),
    T=st.integers(0, 150),
    H=st.integers(1, 3),
    K=st.integers(1, 24) | st.sampled_from([32, 72]),
    V=st.integers(1, 24) | st.sampled_from([32, 136]),
    dtype=st.sampled_from(DTYPES),
    gate=st.sampled_from(GATES),
    states=st.booleans(),
    layout=st.sampled_from(["contiguous", "transposed", "sliced", "misaligned"]),
    lengths=st.none() | st.lists(st.integers(0, 70), min_size=1, max_size=6),
    seed=st.integers(0, 2**31),
)
def test_any_shape_gate_and_packing(device, B, T, lengths, **options):
    if lengths is not None:
        B, T = 1, T + sum(lengths)
        options["lengths"] = tuple(lengths)
    if device == "cuda" and options["dtype"] == torch.float64:
        options["dtype"] = torch.float32
    inputs = make_inputs(B, T, **options, device=device)
    assert_results_close(ours(inputs), exact(inputs), inputs, magnitudes(inputs))
