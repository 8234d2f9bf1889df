"""`fused_recurrent_gla`, forward and every gradient, against the recurrence in fp64."""

import dataclasses
import inspect
import warnings

import pytest
import torch
from common import DTYPES, LAYOUTS, PACKED_LENGTHS, SHAPES, assert_close, assert_same_bits
from recurrence import GATINGS, assert_results_close, exact, make_recurrence, ours
from torch._dynamo.testing import CompileCounterWithBackend

from gla_ext import chunk_gla, fused_recurrent_gla
from gla_ext.selftest import tolerance

ops = torch.ops.gla_ext
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_gating = pytest.mark.parametrize("gating", GATINGS)
fresh_memory_is_nan = pytest.mark.usefixtures("nan_in_fresh_memory")


@fresh_memory_is_nan
@by_dtype
@by_gating
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("shape", ["one token", "under a chunk", "over a chunk"])
def test_forward_and_gradients(device, shape, reverse, gating, dtype):
    x = make_recurrence(*SHAPES[shape], dtype=dtype, gating=gating, device=device)
    assert_results_close(ours(x, reverse=reverse), exact(x, reverse=reverse), x)


@by_dtype
@pytest.mark.parametrize("gate", [0.0, 0.1, 10.0, "reset"])
@pytest.mark.parametrize("gating", ["gk", "gv", "both"])
def test_gate_strengths(device, gating, gate, dtype):
    x = make_recurrence(2, 50, 3, 20, 28, dtype=dtype, gating=gating, gate=gate, device=device)
    assert_results_close(ours(x), exact(x), x)


@fresh_memory_is_nan
@by_dtype
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.int64], ids=str)
def test_packed_sequences(device, offsets_dtype, reverse, dtype):
    x = make_recurrence(1, 165, 3, 20, 28, dtype=dtype, lengths=PACKED_LENGTHS, device=device)
    x = dataclasses.replace(x, cu_seqlens=x.cu_seqlens.to(offsets_dtype))
    results, end = ours(x, reverse=reverse), int(x.cu_seqlens[-1])
    assert_results_close(results, exact(x, reverse=reverse), x)
    assert all(not results[name][:, end:].any() for name in ("o", "dq", "dk", "dv", "dgk", "dgv"))


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0, 0), (1,) * 20, (33, 0, 64, 68)])
def test_packings(device, lengths):
    x = make_recurrence(1, 165, 2, 12, 9, lengths=lengths, device=device)
    results = ours(x)
    if lengths:
        assert_results_close(results, exact(x), x)
    else:
        assert results["final_state"].shape == results["dh0"].shape == (0, 2, 12, 9)
        assert not any(results[name].any() for name in ("o", "dq", "dk", "dv", "dgk", "dgv"))


@by_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(device, layout, dtype):
    x = make_recurrence(2, 37, 3, 20, 28, dtype=dtype, layout=layout, device=device)
    plain = x.map(lambda t: t.clone(memory_format=torch.contiguous_format))
    assert_same_bits(ours(x), ours(plain))


@by_dtype
@pytest.mark.parametrize("gating", ["none", "both"])
def test_state_v_first(device, gating, dtype):
    x = make_recurrence(2, 37, 3, 20, 28, dtype=dtype, gating=gating, device=device)
    results, expected = ours(x.v_first(), state_v_first=True), exact(x)
    for name in ("final_state", "dh0"):
        assert results[name].shape == (2, 3, 28, 20)
        expected[name] = expected[name].mT
    assert_results_close(results, expected, x)


@pytest.mark.parametrize("scale", [1.0, -0.03])
def test_scale(device, scale):
    x = make_recurrence(2, 37, 3, 20, 28, device=device)
    assert_results_close(ours(x, scale=scale), exact(x, scale), x)


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("B, T", [(2, 0), (0, 5), (0, 0)])
def test_no_tokens(device, B, T, states):
    x = make_recurrence(B, T, 3, 5, 4, states=states, device=device)
    results = ours(x)
    assert results["o"].shape == (B, T, 3, 4)
    if states:
        assert torch.equal(results["final_state"], x.initial_state)
        assert torch.equal(results["dh0"], x.dht)
    else:
        assert not results["final_state"].any()


@by_gating
@pytest.mark.parametrize("gate", [1 / 64, 1.0])
def test_gate_gradients_keep_their_digits_over_a_long_sequence(device, gating, gate):
    """A suffix sum of q dq - k dk would be off by the rounding of sums that cancel."""
    x = make_recurrence(1, 700, 1, 24, 40, gating=gating, gate=gate, device=device)
    results, expected = ours(x), exact(x)
    for name, value in results.items():
        assert_close(value, expected[name], tolerance("o", torch.float32), name=name)


def test_a_reset_has_no_gradient_even_beside_nan(device):
    x = make_recurrence(1, 20, 1, 5, 4, device=device)
    x.gk[:, 9], x.gv[:, 13] = -torch.inf, -1e30
    x.do[:, 16] = torch.nan
    results = ours(x)
    assert not results["dgk"][:, 9].any() and not results["dgv"][:, 13].any()
    assert results["dgk"][:, 10].isnan().all()


@by_dtype
@pytest.mark.parametrize("name", ["q", "k", "v", "gk", "gv"])
def test_nan_reaches_every_later_token_and_no_earlier_one(device, name, dtype):
    x = make_recurrence(1, 40, 2, 5, 4, dtype=dtype, gate=0.1, device=device)
    getattr(x, name)[0, 17, 0] = torch.nan
    o = ours(x)["o"]
    last = 18 if name == "q" else 40
    assert o[0, 17:last, 0].isnan().all()
    assert not o[0, :17].isnan().any() and not o[0, last:].isnan().any()
    assert not o[0, :, 1].isnan().any()


@by_dtype
def test_a_sequence_has_the_same_bits_anywhere(device, dtype):
    x = make_recurrence(5, 37, 3, 20, 28, dtype=dtype, device=device)
    packed = dataclasses.replace(
        x.map(lambda t: t.flatten(0, 1)[None] if t.shape[1] == 37 else t),
        cu_seqlens=torch.arange(6, device=x.q.device) * 37,
    )
    batch, row = ours(x), ours(packed)
    assert_same_bits({n: t.view(batch[n].shape) for n, t in row.items()}, batch)
    alone = ours(x.map(lambda t: t[3:4]))
    assert_same_bits(alone, {n: t[3:4] for n, t in batch.items()})


def test_runs_alike(device):
    x = make_recurrence(3, 70, 4, 100, 60, device=device)
    first = ours(x)
    for _ in range(3):
        assert_same_bits(ours(x), first)


@by_dtype
def test_equals_the_chunkwise_form(device, dtype):
    x = make_recurrence(2, 130, 3, 20, 28, dtype=dtype, gating="gk", device=device)
    chunked, _ = chunk_gla(x.q, x.k, x.v, x.gk, initial_state=x.initial_state)
    assert_close(ours(x)["o"], chunked, 2 * tolerance("o", dtype))


@pytest.mark.parametrize("gate_dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_gates_have_a_dtype_of_their_own(device, dtype, gate_dtype):
    x = make_recurrence(2, 37, 3, 20, 28, dtype=dtype, gate_dtype=gate_dtype, device=device)
    assert_results_close(ours(x), exact(x), x)


@by_gating
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("lengths", [None, (3, 0, 14, 1)], ids=["batch", "packed"])
def test_gradcheck(lengths, states, reverse, gating):
    B, T = (2, 19) if lengths is None else (1, 20)
    x = make_recurrence(
        B, T, 2, 3, 2, dtype=torch.float64, gating=gating, states=states, lengths=lengths
    )
    x = x.v_first() if reverse else x

    def function(*leaves):
        values = iter(leaves)
        operands = {n: None if t is None else next(values) for n, t in x.leaves().items()}
        return fused_recurrent_gla(
            **operands, scale=0.7, output_final_state=True, reverse=reverse,
            state_v_first=reverse, cu_seqlens=x.cu_seqlens,
        )  # fmt: skip

    leaves = [t.requires_grad_() for t in x.leaves().values() if t is not None]
    assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "gk", "gv", "initial_state"])
def test_gradient_of_one_input_alone(device, wanted):
    x = make_recurrence(2, 37, 3, 20, 28, device=device)
    operands = {name: t.clone() for name, t in x.leaves().items()}
    operands[wanted].requires_grad_()
    outputs = fused_recurrent_gla(**operands, output_final_state=True)
    torch.autograd.backward(outputs, [x.do, x.dht])
    name = {"initial_state": "dh0"}.get(wanted, f"d{wanted}")
    assert torch.equal(operands[wanted].grad, ours(x)[name])
    assert all(t.grad is None for n, t in operands.items() if n != wanted)


def test_output_unused(device):
    x = make_recurrence(2, 37, 3, 20, 28, device=device)
    leaves = {n: t.clone().requires_grad_() for n, t in x.leaves().items()}
    _, final_state = fused_recurrent_gla(**leaves, output_final_state=True)
    final_state.backward(x.dht)
    expected = exact(dataclasses.replace(x, do=torch.zeros_like(x.do)))
    assert leaves["q"].grad is None or not leaves["q"].grad.any()
    for name in ("k", "v", "gk", "gv"):
        assert_close(leaves[name].grad, expected[f"d{name}"], 3e-6, name=name)


def test_final_state_only_when_asked_for(device):
    x = make_recurrence(2, 5, 3, 20, 28, device=device)
    assert fused_recurrent_gla(x.q, x.k, x.v)[1] is None


def test_nothing_but_inputs_is_saved(device):
    x = make_recurrence(2, 37, 3, 20, 28, device=device).map(lambda t: t.requires_grad_())
    saved = []

    def pack(t):
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        fused_recurrent_gla(**x.leaves(), output_final_state=True)
    inputs = {t.data_ptr() for t in x.leaves().values()}
    assert saved and all(t.data_ptr() in inputs for t in saved)


def test_signature_is_flas():
    parameters = inspect.signature(fused_recurrent_gla).parameters
    assert [*parameters] == [
        *("q", "k", "v", "gk", "gv", "scale", "initial_state", "output_final_state", "reverse"),
        *("state_v_first", "cu_seqlens", "kwargs"),
    ]
    assert [p.default for p in parameters.values()][3:11] == [
        *(None, None, None, None, False, False, False, None)
    ]


def test_old_name_of_the_layout():
    x = make_recurrence(2, 5, 3, 20, 28)
    with pytest.warns(DeprecationWarning, match="transpose_state_layout is the old name of state"):
        _, state = fused_recurrent_gla(
            x.q, x.k, x.v, output_final_state=True, transpose_state_layout=True
        )
    assert state.shape == (2, 3, 28, 20)
    compiled = torch.compile(
        lambda q: fused_recurrent_gla(
            q, x.k, x.v, output_final_state=True, transpose_state_layout=True
        )[1],
        backend="eager",
        fullgraph=True,
    )
    assert torch.equal(compiled(x.q), state)
    with pytest.raises(ValueError, match="expected state_v_first or transpose_state_layout, its o"):
        fused_recurrent_gla(x.q, x.k, x.v, state_v_first=True, transpose_state_layout=True)
    with (
        warnings.catch_warnings(),
        pytest.raises(TypeError, match=r"keywords than its signature's, got \['head_first'\]"),
    ):
        warnings.simplefilter("error")
        fused_recurrent_gla(x.q, x.k, x.v, head_first=False)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_for_many_lengths(device, backend):
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(fused_recurrent_gla, fullgraph=True, dynamic=True, backend=counter)
    for T in (17, 2, 64, 33):
        x = make_recurrence(2, T, 2, 8, 12, device=device)
        results = []
        for call in (fused_recurrent_gla, compiled):
            leaves = {n: t.clone().requires_grad_() for n, t in x.leaves().items()}
            outputs = call(**leaves, output_final_state=True)
            torch.autograd.backward(outputs, [x.do, x.dht])
            results.append([*outputs, *(t.grad for t in leaves.values())])
        for eager, graph in zip(*results, strict=True):
            assert torch.equal(graph, eager)
    assert counter.frame_count == 1


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_casts_q_k_v_alone(device, compiled):
    x = make_recurrence(2, 17, 2, 8, 12, device=device).map(lambda t: t.requires_grad_())
    call = fused_recurrent_gla
    call = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    with torch.autocast(device, dtype=torch.bfloat16):
        o, final_state = call(**x.leaves(), output_final_state=True)
    short = x.leaves() | {n: getattr(x, n).bfloat16() for n in "qkv"}
    assert o.dtype == torch.bfloat16 and final_state.dtype == torch.float32
    assert torch.equal(o, fused_recurrent_gla(**short)[0])
    o.float().sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in x.leaves().values())


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("gating", ["none", "both"])
def test_opcheck(device, gating, packed, requires_grad):
    lengths = (10, 0, 6) if packed else None
    x = make_recurrence(
        1 if packed else 2, 17, 2, 8, 12, gating=gating, states=packed, lengths=lengths,
        device=device,
    )  # fmt: skip
    operands = x.leaves()
    if requires_grad:
        operands = {n: t if t is None else t.requires_grad_() for n, t in operands.items()}
    arguments = (*operands.values(), x.cu_seqlens)
    torch.library.opcheck(ops.recurrent_gla_fwd.default, (*arguments, None, packed, True, False))
    if not requires_grad:
        torch.library.opcheck(
            ops.recurrent_gla_bwd.default, (x.do, x.dht, *arguments, 0.3, packed, False)
        )


def test_vmap_equals_a_loop():
    x = make_recurrence(3, 9, 2, 8, 12)

    def one(q, k, v, gk):
        return fused_recurrent_gla(q[None], k[None], v[None], gk[None])[0][0]

    assert torch.equal(
        torch.vmap(one)(x.q, x.k, x.v, x.gk), fused_recurrent_gla(x.q, x.k, x.v, x.gk)[0]
    )
