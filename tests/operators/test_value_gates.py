"""`chunk_gla` with gates on keys, on values, on both and on neither, against the recurrence in
fp64.
"""

import dataclasses

import pytest
import torch
from common import DTYPES, GATES, LAYOUTS, PACKED_LENGTHS, SHAPES, assert_same_bits
from hypothesis import given
from hypothesis import strategies as st
from plans import cpu_plan
from recurrence import (
    GATINGS,
    Recurrence,
    assert_chunked_close,
    chunked,
    exact,
    make_recurrence,
    ours,
)

from gla_ext import batch_invariant, chunk_gla, reference

ops = torch.ops.gla_ext
pytestmark = pytest.mark.usefixtures("nan_in_fresh_memory")
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_gate = pytest.mark.parametrize("gate", GATES)
by_gating = pytest.mark.parametrize("gating", ["none", "gv", "both"])
VALUES = ("o", "dq", "dk", "dv", "dgk", "dgv")


@by_dtype
@by_gate
@by_gating
@pytest.mark.parametrize("shape", ["one token", "under a chunk", "over a chunk", "over two chunks"])
def test_forward_and_gradients(device, shape, gating, gate, dtype):
    B, *sizes = SHAPES[shape]
    x = make_recurrence(4 * B, *sizes, dtype=dtype, gating=gating, gate=gate, device=device)
    assert_chunked_close(chunked(x), exact(x), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@by_gate
def test_many_chunks(device, gate, dtype):
    x = make_recurrence(*SHAPES["long"], dtype=dtype, gate=gate, states=False, device=device)
    assert_chunked_close(chunked(x), exact(x), x)


@by_dtype
@by_gate
@by_gating
def test_packed_sequences(device, gating, gate, dtype):
    x = make_recurrence(
        1, 165, 3, 20, 28, dtype=dtype, gating=gating, gate=gate, lengths=PACKED_LENGTHS,
        device=device,
    )  # fmt: skip
    results, end = chunked(x), int(x.cu_seqlens[-1])
    assert_chunked_close(results, exact(x), x)
    assert all(not results[name][:, end:].any() for name in VALUES if name in results)
    short = dataclasses.replace(x, cu_seqlens=x.cu_seqlens.int())
    assert_same_bits(chunked(short), results)


@pytest.mark.parametrize("lengths", [(), (0, 0, 0), (1,) * 20, (64, 0, 64, 37)])
def test_packings(device, lengths):
    x = make_recurrence(1, 165, 2, 12, 9, lengths=lengths, device=device)
    results = chunked(x)
    if lengths:
        assert_chunked_close(results, exact(x), x)
    else:
        assert results["final_state"].shape == results["dh0"].shape == (0, 2, 12, 9)
        assert not any(results[name].any() for name in VALUES)


def test_tokens_after_the_last_offset_are_ignored(device):
    x = make_recurrence(1, 165, 3, 5, 4, lengths=PACKED_LENGTHS, device=device)
    clean, end = chunked(x), int(x.cu_seqlens[-1])
    for name in ("q", "k", "v", "gk", "gv", "do"):
        getattr(x, name)[:, end:] = torch.nan
    assert_same_bits(chunked(x), clean)


@by_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(device, layout, dtype):
    x = make_recurrence(2, 130, 3, 24, 40, dtype=dtype, layout=layout, device=device)
    plain = x.map(lambda t: t.clone(memory_format=torch.contiguous_format))
    results = chunked(x)
    assert_same_bits(results, chunked(plain))
    assert_chunked_close(results, exact(x), x)


@pytest.mark.parametrize("B, T, H, K, V", [(2, 0, 3, 5, 4), (0, 130, 3, 5, 4)])
@by_gating
def test_no_tokens(device, gating, B, T, H, K, V):
    x = make_recurrence(B, T, H, K, V, gating=gating, device=device)
    results = chunked(x)
    assert results["o"].shape == (B, T, H, V)
    assert torch.equal(results["final_state"], x.initial_state)
    assert torch.equal(results["dh0"], x.dht)


@by_dtype
@by_gating
def test_state_v_first(device, gating, dtype):
    x = make_recurrence(2, 130, 3, 24, 40, dtype=dtype, gating=gating, device=device)
    expected = chunked(x)
    for name in ("final_state", "dh0"):
        expected[name] = expected[name].mT
    assert_same_bits(chunked(x.v_first(), state_v_first=True), expected)


@pytest.mark.parametrize("gate_dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_gates_have_a_dtype_of_their_own(device, dtype, gate_dtype):
    x = make_recurrence(2, 130, 3, 24, 40, dtype=dtype, gate_dtype=gate_dtype, device=device)
    assert_chunked_close(chunked(x), exact(x), x)
    for own in DTYPES[1:]:
        y = dataclasses.replace(x, gv=x.gv.to(own))
        assert_chunked_close(chunked(y), exact(y), y)


@by_gate
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1e-3, 30.0, 1e3])
def test_magnitudes(device, size, dtype, gate):
    x = make_recurrence(4, 130, 3, 24, 40, dtype=dtype, gate=gate, size=size, device=device)
    assert_chunked_close(chunked(x), exact(x), x)


@by_gate
@pytest.mark.parametrize("size", [1e-12, 6e4])
def test_gradient_magnitudes(device, size, gate):
    x = make_recurrence(2, 130, 3, 24, 40, dtype=torch.bfloat16, gate=gate, device=device)
    x = dataclasses.replace(x, do=x.do * size, dht=x.dht * size)
    assert_chunked_close(chunked(x), exact(x), x)


@by_dtype
@pytest.mark.parametrize("log2_keys", [-0.125, -0.875, -1.8125, -20.0])
@pytest.mark.parametrize("log2_values", [-0.125, -0.875, -0.9375, -1.75, -1.8125, -7.5, -140.0])
def test_tiers(device, log2_values, log2_keys, dtype):
    """One gate for all tokens of a chunk, so that the ranges, of which tier 1 takes 112, are known:
    64 times the gate. A chunk of weaker gates is between two of these.
    """
    gate_dtype = torch.promote_types(dtype, torch.float32)
    x = make_recurrence(1, 192, 2, 24, 40, dtype=dtype, gate_dtype=gate_dtype, device=device)
    for gates, log2 in ((x.gk, log2_keys), (x.gv, log2_values)):
        gates.fill_(log2 / reference.LOG2E)
        gates[:, 64:128] /= 64
    assert_chunked_close(chunked(x), exact(x), x)


@by_dtype
@pytest.mark.parametrize("first", [-torch.inf, -100.0, -75.0])
def test_strong_gate_at_the_start_of_chunks(device, first, dtype):
    x = make_recurrence(1, 256, 2, 24, 40, dtype=dtype, gate=0.06, device=device)
    x.gv[:, ::64] = first
    assert_chunked_close(chunked(x), exact(x), x)


@by_dtype
def test_positive_gates_while_a_chunk_spans_little(device, dtype):
    x = make_recurrence(2, 130, 3, 24, 40, dtype=dtype, gate=-1 / 128, device=device)
    assert (x.gv > 0).all()
    assert_chunked_close(chunked(x), exact(x), x)


@by_dtype
@by_gating
def test_resets_get_no_gradient(device, gating, dtype):
    x = make_recurrence(2, 130, 3, 24, 40, dtype=dtype, gating=gating, gate="reset", device=device)
    results = chunked(x)
    assert all(t.isfinite().all() for t in results.values())
    for name in ("gk", "gv"):
        if (gates := getattr(x, name)) is not None:
            assert gates.isinf().any()
            assert not results[f"d{name}"][gates.isinf()].any()


@pytest.mark.parametrize("value", [-torch.inf, -1e30, -200.0])
def test_only_resets(device, value):
    """With nothing carried over a token sees itself alone."""
    x = make_recurrence(2, 130, 3, 24, 40, gate=0.1, device=device)
    x.gv.fill_(value)
    results = chunked(x)
    assert_chunked_close(results, exact(x), x)
    assert not results["dgv"].any() and not results["dh0"].any()


@by_dtype
def test_a_reset_forgets(device, dtype):
    x = make_recurrence(1, 130, 2, 24, 40, dtype=dtype, device=device)
    x.gv[:, 70, :, ::2] = -torch.inf
    before = chunked(x)
    x.v[:, :70, :, ::2] = 4.0
    after = chunked(x)
    assert torch.equal(before["o"][:, 70:], after["o"][:, 70:])
    assert torch.equal(before["final_state"], after["final_state"])


@pytest.mark.parametrize("gate", [0.1, 10.0, "reset"])
@pytest.mark.parametrize("operand", ["q", "k", "v", "gk", "gv"])
@pytest.mark.parametrize("token", [80, 100, 149])
def test_nan_is_never_silent_and_stays_in_its_sequence(device, token, operand, gate):
    lengths, (start, end) = (70, 80, 3), (70, 150)
    x = make_recurrence(1, 153, 2, 5, 4, gate=gate, lengths=lengths, device=device)
    clean = chunked(x)
    getattr(x, operand)[0, token, 0] = torch.nan
    results = chunked(x)
    seen = slice(token, token + 1) if operand == "q" else slice(token, end)
    assert results["o"][0, seen, 0].isnan().all()
    assert results["final_state"][1, 0].isnan().all() or operand == "q"
    chunk_start = start + (token - start) // 64 * 64
    assert torch.equal(results["o"][0, start:chunk_start], clean["o"][0, start:chunk_start])
    for name, value in results.items():
        if name in ("final_state", "dh0"):
            assert torch.equal(value[::2], clean[name][::2]), name
            assert torch.equal(value[:, 1], clean[name][:, 1]), name
        else:
            assert torch.equal(value[0, :start], clean[name][0, :start]), name
            assert torch.equal(value[0, end:], clean[name][0, end:]), name
            assert torch.equal(value[0, :, 1], clean[name][0, :, 1]), name


@by_dtype
@by_gate
@by_gating
def test_both_modes_on_cpu(gating, gate, dtype, monkeypatch):
    """States for every chunk, or kept in one sweep: the same bits."""
    options = {"dtype": dtype, "gate": gate, "gating": gating}
    cases = [
        make_recurrence(2, 200, 3, 20, 28, **options),
        make_recurrence(1, 165, 3, 20, 28, **options, lengths=PACKED_LENGTHS),
        make_recurrence(1, 300, 1, 33, 7, **options, states=False),
    ]
    for x in cases:
        results = {}
        for mode in ("materialised", "sweep"):
            monkeypatch.setenv("GLA_EXT_CPU_MODE", mode)
            assert cpu_plan(*x.q.shape, x.v.shape[-1])["mode"] == mode
            results[mode] = chunked(x)
        assert_same_bits(results["sweep"], results["materialised"])


def select(x: Recurrence, n: int) -> Recurrence:
    """Sequence n of a packed row alone."""
    start, end = x.cu_seqlens[n : n + 2].tolist()
    return Recurrence(
        **{name: getattr(x, name)[:, start:end] for name in ("q", "k", "v", "gk", "gv", "do")},
        **{name: getattr(x, name)[n : n + 1] for name in ("initial_state", "dht")},
        cu_seqlens=None,
    )


@by_dtype
@pytest.mark.parametrize("gate", [0.1, "reset"])
def test_batch_invariance(device, gate, dtype):
    with batch_invariant():
        x = make_recurrence(
            1, 165, 3, 24, 40, dtype=dtype, gate=gate, lengths=PACKED_LENGTHS, device=device
        )
        packed = chunked(x)
        for n, (start, end) in enumerate(zip(x.cu_seqlens, x.cu_seqlens[1:], strict=False)):
            own = {name: packed[name][:, start:end] for name in VALUES}
            own |= {name: packed[name][n : n + 1] for name in ("final_state", "dh0")}
            assert_same_bits(chunked(select(x, n)), own)


@by_dtype
def test_agrees_with_the_recurrent_operator(device, dtype):
    x = make_recurrence(2, 130, 3, 24, 40, dtype=dtype, device=device)
    assert_chunked_close(chunked(x), {n: t.double() for n, t in ours(x).items()}, x)


@by_dtype
def test_state_carries_over(device, dtype):
    x = make_recurrence(2, 200, 3, 24, 40, dtype=dtype, device=device)
    state, o = x.initial_state, []
    for part in (slice(0, 1), slice(1, 70), slice(70, 200)):
        q, k, v, gk, gv = (t[:, part] for t in (x.q, x.k, x.v, x.gk, x.gv))
        o_part, state = chunk_gla(q, k, v, gk, initial_state=state, output_final_state=True, gv=gv)
        o.append(o_part)
    expected = exact(x)
    parts = {"o": torch.cat(o, 1), "final_state": state}
    assert_chunked_close(parts, {name: expected[name] for name in parts}, x)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "gk", "gv", "initial_state"])
def test_gradient_of_one_input_alone(device, wanted):
    x = make_recurrence(2, 130, 3, 24, 40, device=device)
    leaves = {n: t.clone() for n, t in x.leaves().items()}
    leaves[wanted].requires_grad_()
    g = leaves.pop("gk")
    o, final_state = chunk_gla(**leaves, g=g, output_final_state=True)
    torch.autograd.backward([o, final_state], [x.do, x.dht])
    names = {"initial_state": "dh0"}
    leaves["gk"] = g
    assert torch.equal(leaves[wanted].grad, chunked(x)[names.get(wanted, f"d{wanted}")])
    assert all(t.grad is None for n, t in leaves.items() if n != wanted)


def test_nothing_but_inputs_is_saved(device):
    x = make_recurrence(2, 37, 3, 20, 28, device=device).map(lambda t: t.requires_grad_())
    saved = []

    def pack(t):
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        chunk_gla(x.q, x.k, x.v, x.gk, initial_state=x.initial_state, gv=x.gv)
    inputs = {t.data_ptr() for t in x.leaves().values()}
    assert saved and all(t.data_ptr() in inputs for t in saved if t.numel())


def test_value_gates_take_workspace():
    plain, gated = (cpu_plan(4, 2048, 4, 64, 128, threads=2, value_gated=g) for g in (False, True))
    assert gated["workspace_bytes"] > plain["workspace_bytes"]


@given(
    B=st.integers(1, 2),
    T=st.integers(0, 150),
    H=st.integers(1, 3),
    K=st.integers(1, 24) | st.sampled_from([32, 72]),
    V=st.integers(1, 24) | st.sampled_from([32, 136]),
    dtype=st.sampled_from(DTYPES),
    gating=st.sampled_from(GATINGS),
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
    x = make_recurrence(B, T, **options, device=device)
    sizes = exact(dataclasses.replace(x.map(torch.abs), gk=x.gk, gv=x.gv))
    assert_chunked_close(chunked(x), exact(x), x, sizes)
