"""`chunk_gla` and `fused_recurrent_gla` with every gating, forward and every gradient, against the
recurrence in fp64.
"""

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
    assert_close,
    assert_same_bits,
    relayout,
)
from hypothesis import given
from hypothesis import strategies as st
from recurrence import CALLS, STATES, Call, exact, make_recurrence

from gla_ext import chunk_gla, reference
from gla_ext.selftest import tolerance

pytestmark = pytest.mark.usefixtures("nan_in_fresh_memory")
KEYS, BOTH, RECURRENT = (CALLS[name] for name in ("chunk", "chunk, both", "recurrent, both"))
FORMS = {"chunk": KEYS, "chunk, both": BOTH, "recurrent": RECURRENT}
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_two_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
by_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
by_form = pytest.mark.parametrize("call", FORMS.values(), ids=FORMS)
by_chunks = pytest.mark.parametrize("call", [KEYS, BOTH], ids=["keys", "both"])


def check(call: Call, x, **options):
    results = call.run(x, **options)
    call.assert_close(results, x, **options)
    return results


OF_CHUNKS = [
    ("one token", 1.0),
    ("under a chunk", 0.1),
    ("over a chunk", 2.0),
    ("over a chunk", "reset"),
]
OF_TOKENS = [
    ("one token", 0.0),
    ("under a sub-chunk", 10.0),
    ("under a chunk", 0.1),
    ("under a chunk", "reset"),
]
FORWARD = [("chunk", name, g) for name in SHAPES if name not in ("long", "train") for g in GATES]
FORWARD += [
    (name, *row)
    for name, call in CALLS.items()
    if call is not KEYS
    for row in (OF_CHUNKS if call.chunks else OF_TOKENS)
]


@by_dtype
@pytest.mark.parametrize("name, shape, gate", FORWARD)
def test_forward_and_gradients(device, name, shape, gate, dtype):
    call = CALLS[name]
    check(call, call.make(*SHAPES[shape], dtype=dtype, gate=gate, device=device))


@by_dtype
@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if not call.chunks])
def test_reverse_time(device, name, dtype):
    call = CALLS[name]
    check(call, call.make(*SHAPES["under a chunk"], dtype=dtype, device=device), reverse=True)


@by_dtype
@pytest.mark.parametrize("call, gate", [(KEYS, -1 / 16), (BOTH, -1 / 128)], ids=["keys", "both"])
def test_positive_gates_while_a_chunk_spans_little(device, head, call, gate, dtype):
    x = call.make(2, 130, 3, *head, dtype=dtype, gate=gate, device=device)
    assert all((g > 0).all() for g in (x.gk, x.gv) if g is not None)
    check(call, x)


@by_two_dtypes
@by_chunks
@pytest.mark.parametrize("gate", [0.1, "reset"])
def test_many_chunks(device, gate, call, dtype):
    check(call, call.make(*SHAPES["long"], dtype=dtype, gate=gate, states=False, device=device))


@by_dtype
@pytest.mark.parametrize(
    "name, gate",
    [
        (name, gate)
        for name, call in CALLS.items()
        for gate in (GATES if call is KEYS else (10.0, "reset") if call.chunks else (1.0,))
    ],
)
def test_packed_sequences(device, head, name, gate, dtype):
    call, options = CALLS[name], {"gate": gate, "lengths": PACKED_LENGTHS}
    x = call.make(1, 165, 3, *head, dtype=dtype, **options, device=device)
    end = int(x.cu_seqlens[-1])
    results = check(call, x)
    assert all(not t[:, end:].any() for n, t in results.items() if n not in STATES)
    short = dataclasses.replace(x, cu_seqlens=x.cu_seqlens.int())
    assert_same_bits(call.run(short), results)
    if call.chunks:
        assert_same_bits(call.run(x, cu_seqlens_cpu=x.cu_seqlens.cpu()), results)
    else:
        check(call, x, reverse=True)


@by_form
@pytest.mark.parametrize(
    "lengths", [(), (0,), (0, 0, 0), (165,), (1,) * 20, (64, 0, 64, 37), (130, 1), (33, 0, 64, 68)]
)
def test_packings(device, lengths, call):
    x = call.make(1, 165, 2, 12, 9, lengths=lengths, device=device)
    if lengths:
        check(call, x)
        return
    results = call.run(x)
    assert results["final_state"].shape == results["dh0"].shape == (0, 2, 12, 9)
    assert not any(t.any() for name, t in results.items() if name not in STATES)


@by_form
def test_tokens_after_the_last_offset_are_ignored(device, call):
    x = call.make(1, 165, 3, 5, 4, lengths=PACKED_LENGTHS, device=device)
    clean, end = call.run(x), int(x.cu_seqlens[-1])
    for name in ("q", "k", "v", "gk", "gv", "do"):
        if (t := getattr(x, name)) is not None:
            t[:, end:] = torch.nan
    assert_same_bits(call.run(x), clean)


FIRST_GATES = {"reset": -torch.inf, "deep": -100.0, "at the edge of tier 1": -75.0}


@by_dtype
@pytest.mark.parametrize("first", FIRST_GATES.values(), ids=FIRST_GATES)
@pytest.mark.parametrize("gating, gate", [("gk", 0.06), ("gk", 0.25), ("gv", 0.06)])
def test_strong_gate_at_the_start_of_chunks(device, gating, gate, first, dtype):
    """Documents packed to whole chunks: what follows must not share the first gate's exponent."""
    call = KEYS if gating == "gk" else BOTH
    x = call.make(1, 256, 2, 32, 32, dtype=dtype, gate=gate, device=device)
    getattr(x, gating)[:, ::64] = first
    check(call, x)


def test_large_state_through_a_representable_decay(device):
    x = make_recurrence(1, 64, 1, 4, 4, gating="gk", device=device)
    x.gk[:], x.gk[:, 0] = -1.7 * math.log(2), -75 * math.log(2)
    x.q[:], x.k[:], x.v[:], x.initial_state[:] = 1, 0, 0, 1e20
    o, _ = chunk_gla(x.q, x.k, x.v, x.gk, initial_state=x.initial_state)
    assert_close(o, exact(x)["o"], 1e-5)


def test_steadily_positive_gates_overflow_where_the_truth_does(device):
    q, k, v = (torch.rand(1, 128, 1, 4).to(device) for _ in range(3))
    g = torch.ones_like(q)  # a chunk spans 92, the state at its end is beyond 2^72
    o, _ = chunk_gla(q, k, v, g)
    expected, _ = reference.recurrence(*(x.double() for x in (q, k, v, g)))
    finite = expected.abs() < 1e36  # the terms of a sum overflow a little before it
    assert finite[:, :80].all() and not finite[:, -1].any()
    assert_close(o[finite], expected[finite], 1e-5)


SHARES = [("chunk", 3, 3), ("chunk, both", 3, 3), ("chunk, both", 4, 2), ("chunk, a head's", 2, 2)]
SHARES += [(name.replace("chunk", "recurrent"), H, HK) for name, H, HK in SHARES[1:]]


@by_dtype
@pytest.mark.parametrize("name, H, HK", SHARES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(device, head, layout, name, H, HK, dtype):
    """The bits of contiguous inputs, and where heads share k, v and gates, of their repeats."""
    call, gate = CALLS[name], {"contiguous": 0.1, "sliced": 10.0, "expanded": "reset"}
    options = {"layout": layout, "gate": gate.get(layout, 1.0), "device": device}
    x = call.make(2, 70, H, *head, dtype=dtype, **options).sharing(HK)
    results = check(call, x)
    plain = x.map(lambda t: t.clone(memory_format=torch.contiguous_format))
    assert_same_bits(results, call.run(plain))
    if HK < H:
        assert_same_bits(results, call.run(x, repeat=True))


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("B, T", [(2, 0), (0, 130), (0, 0)])
@by_call
def test_no_tokens(device, call, B, T, states):
    x = call.make(B, T, 3, 5, 4, states=states, device=device)
    results = call.run(x)
    assert results["o"].shape == (B, T, 3, 4)
    if states:
        assert torch.equal(results["final_state"], x.initial_state)
        assert torch.equal(results["dh0"], x.dht)
    else:
        assert not results["final_state"].any()


@by_dtype
@by_call
def test_state_v_first(device, head, call, dtype):
    x = call.make(2, 70, 3, *head, dtype=dtype, device=device)
    results = call.run(x.v_first(), state_v_first=True)
    expected = call.run(x) if call.chunks else exact(x)
    for name in STATES:
        assert results[name].shape == (2, 3, *head[::-1])
        results[name] = results[name].mT
    if call.chunks:
        assert_same_bits(results, expected)
    call.assert_close(results, x)


@by_dtype
@pytest.mark.parametrize("scale", [1.0, 0.03, -2.0])
@by_form
def test_scale(device, head, call, scale, dtype):
    check(call, call.make(2, 70, 3, *head, dtype=dtype, device=device), scale=scale)


@pytest.mark.parametrize("gate_dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize(
    "name, gate",
    [
        *(("chunk", gate) for gate in GATES),
        *((name, 1.0) for name in ("chunk, both", "recurrent, both")),
        *((name, 1.0) for name in ("chunk, a head's", "recurrent, a head's")),
    ],
)
def test_gates_have_a_dtype_of_their_own(device, head, name, gate, dtype, gate_dtype):
    """Those of a head: their gradient is summed over the key channels before it is rounded."""
    call, options = CALLS[name], {"dtype": dtype, "gate_dtype": gate_dtype, "gate": gate}
    x = call.make(2, 70, 3, *head, **options, device=device)
    for own in DTYPES[1:] if call is BOTH else (gate_dtype,):
        check(call, x if x.gv is None else dataclasses.replace(x, gv=x.gv.to(own)))


TIMES = [(size, 1.0, dtype) for size in (1e-3, 30.0, 1e3) for dtype in DTYPES[:3]]
TIMES += [(1.0, size, torch.bfloat16) for size in (1e-12, 6e4)]


@pytest.mark.parametrize("gate", [0.1, 2.0, "reset"])
@pytest.mark.parametrize("size, gradient, dtype", TIMES, ids=str)
@by_chunks
def test_magnitudes(device, head, call, size, gradient, dtype, gate):
    x = call.make(2, 130, 3, *head, dtype=dtype, gate=gate, size=size, device=device)
    check(call, dataclasses.replace(x, do=x.do * gradient, dht=x.dht * gradient))


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
    x = KEYS.make(1, 192, 2, *head, dtype=dtype, gate_dtype=gate_dtype, device=device)
    x.gk.fill_(log2_gate / reference.LOG2E)
    x.gk[:, 64:128] /= 8  # a chunk of a lower tier among them
    g = x.gk.double()
    assert_close(chunk_range(g, 64)[::2], g.new_full((2,), chunk), 1e-6)
    assert_close(chunk_range(g, 16)[:4], g.new_full((4,), sub_chunk), 1e-6)
    check(KEYS, x)


@by_two_dtypes
@pytest.mark.parametrize("log2_keys", [-0.125, -0.875, -1.8125, -20.0])
@pytest.mark.parametrize("log2_values", [-0.125, -0.875, -0.9375, -1.75, -1.8125, -7.5, -140.0])
def test_tiers_of_keys_and_values(device, log2_values, log2_keys, dtype):
    """A range is 64 times the gate. A chunk of weaker gates is between two of these."""
    x = BOTH.make(1, 192, 2, 24, 40, dtype=dtype, gate_dtype=torch.float32, device=device)
    for gates, log2 in ((x.gk, log2_keys), (x.gv, log2_values)):
        gates.fill_(log2 / reference.LOG2E)
        gates[:, 64:128] /= 64
    check(BOTH, x)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "gk", "gv", "initial_state"])
@by_form
def test_gradient_of_one_input_alone(device, call, wanted):
    x = call.make(2, 70, 3, 20, 28, device=device)
    if getattr(x, wanted) is None:
        wanted = "gk"
    leaves = {n: t if t is None else t.clone() for n, t in x.leaves().items()}
    leaves[wanted].requires_grad_()
    torch.autograd.backward(call.outputs(**leaves), [x.do, x.dht])
    name = {"initial_state": "dh0"}.get(wanted, f"d{wanted}")
    assert torch.equal(leaves[wanted].grad, call.run(x)[name])
    assert all(t is None or t.grad is None for n, t in leaves.items() if n != wanted)


@by_form
def test_final_state_only_when_asked_for(device, call):
    leaves = call.make(2, 70, 3, 20, 28, dtype=torch.bfloat16, device=device).leaves()
    o, nothing = call.outputs(**leaves, output_final_state=False)
    o_too, final_state = call.outputs(**leaves)
    assert nothing is None and final_state.dtype == torch.float32
    assert torch.equal(o, o_too)


@by_dtype
@by_form
def test_output_unused(device, head, call, dtype):
    """do is undefined when only the final state is used."""
    x = call.make(2, 70, 3, *head, dtype=dtype, gate=0.1, device=device)
    leaves = {n: t if t is None else t.clone().requires_grad_() for n, t in x.leaves().items()}
    call.outputs(**leaves)[1].backward(x.dht)
    expected = exact(dataclasses.replace(x, do=torch.zeros_like(x.do)))
    assert leaves["q"].grad is None or not leaves["q"].grad.any()
    for name in ("k", "v", "gk", "gv"):
        if (t := leaves[name]) is not None:
            bound = tolerance(f"d{name}", dtype)
            assert_close(t.grad, expected[f"d{name}"], bound, name=name)
    assert_close(leaves["initial_state"].grad, expected["dh0"], tolerance("dh0", dtype))


@by_dtype
def test_expanded_upstream_gradient(device, head, dtype):
    """do of `o.sum()` has stride 0 everywhere; a misaligned or strided one comes out of slicing."""
    x = KEYS.make(2, 130, 3, *head, dtype=dtype, states=False, device=device)
    ones = x.do.new_ones(()).expand(x.do.shape)
    for do in (ones, *(relayout(x.do, layout) for layout in LAYOUTS)):
        check(KEYS, dataclasses.replace(x, do=do))


@given(
    B=st.integers(1, 2),
    T=st.integers(0, 150),
    heads=st.sampled_from([(1, 1), (2, 2), (3, 3), (2, 1), (4, 2)]),
    K=st.integers(1, 24) | st.sampled_from([32, 72]),
    V=st.integers(1, 24) | st.sampled_from([32, 136]),
    dtype=st.sampled_from(DTYPES),
    call=st.sampled_from([KEYS, KEYS, *(call for call in CALLS.values() if call.chunks)]),
    gate=st.sampled_from(GATES),
    states=st.booleans(),
    layout=st.sampled_from(["contiguous", "transposed", "sliced", "misaligned"]),
    lengths=st.none() | st.lists(st.integers(0, 70), min_size=1, max_size=6),
    seed=st.integers(0, 2**31),
)
def test_any_shape_gate_and_packing(device, B, T, heads, K, V, call, lengths, **options):
    H, HK = heads
    if lengths is not None:
        B, T = 1, T + sum(lengths)
        options["lengths"] = tuple(lengths)
    if device == "cuda" and options["dtype"] == torch.float64:
        options["dtype"] = torch.float32
    x = call.make(B, T, H, K, V, **options, device=device).sharing(HK)
    sizes = exact(dataclasses.replace(x.map(torch.abs), gk=x.gk, gv=x.gv))
    call.assert_close(call.run(x), x, sizes=sizes)
