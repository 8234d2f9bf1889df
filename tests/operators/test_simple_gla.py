"""One gate a head: every form against the recurrence in fp64, and the contract of chunk_gla."""

import dataclasses
import re

import pytest
import torch
from common import (
    DTYPES,
    GATES,
    LAYOUTS,
    PACKED_LENGTHS,
    assert_close,
    assert_results_close,
    assert_same_bits,
    exact,
    relayout,
)
from recurrence import assert_verified
from simple_inputs import make_simple, recurrent, simple, spread

import gla_ext
from gla_ext import (
    batch_invariant,
    check_inputs,
    chunk_gla,
    fused_recurrent_gla,
    recurrent_gla_commit_,
    recurrent_gla_step_,
    recurrent_gla_verify,
)
from gla_ext.ops import chunk_simple_gla, fused_chunk_simple_gla, fused_recurrent_simple_gla

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_gate = pytest.mark.parametrize("gate", GATES)
by_packing = pytest.mark.parametrize("lengths", [None, PACKED_LENGTHS], ids=["batch", "packed"])
by_operator = pytest.mark.parametrize("operator", [simple, recurrent], ids=["chunk", "recurrent"])


def inputs(H=3, HK=None, T=130, head=(20, 28), lengths=None, **options):
    B, T = (2, T) if lengths is None else (1, 165)
    return make_simple(B, T, H, *head, HK=HK, lengths=lengths, **options)


@by_operator
@by_dtype
@by_gate
@pytest.mark.usefixtures("path")
def test_the_truth(device, head, operator, dtype, gate):
    x = inputs(T=70, head=head, dtype=dtype, gate=gate, device=device)
    results = operator(x)
    assert results["dg"].shape == x.g.shape
    assert_results_close(results, exact(x), x)


@by_operator
@by_dtype
@pytest.mark.parametrize("gate", [1.0, "reset"])
@pytest.mark.usefixtures("path")
def test_packed(device, head, operator, dtype, gate):
    options = {"dtype": dtype, "lengths": PACKED_LENGTHS, "device": device}
    x = inputs(head=head, gate=gate, **options)
    assert_results_close(operator(x), exact(x), x)


@by_operator
@pytest.mark.parametrize("T", [0, 1, 15, 16, 63, 64, 65])
def test_lengths(operator, T):
    x = inputs(T=T)
    assert_results_close(operator(x), exact(x), x)


@by_operator
@pytest.mark.parametrize("H, HK", [(4, 2), (3, 1)])
@by_packing
def test_shared_heads(device, operator, H, HK, lengths):
    x = inputs(H, HK, lengths=lengths, device=device)
    assert_results_close(operator(x), exact(x), x)


@by_operator
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(operator, layout):
    x = inputs(H=2, T=70)
    y = x.map(lambda t: relayout(t, layout))
    assert_results_close(operator(y), exact(y), y)


@by_operator
@pytest.mark.parametrize("gate_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gate_dtypes(device, head, operator, dtype, gate_dtype):
    """dg is summed over the key channels before it is rounded."""
    x = inputs(head=head, dtype=dtype, gate_dtype=gate_dtype, device=device)
    results = operator(x)
    assert results["dg"].dtype == gate_dtype
    assert_results_close(results, exact(x), x)


@by_operator
def test_state_layout(operator):
    x = inputs()
    y = x.map(lambda t: t)
    states = {n: getattr(x, n).mT.contiguous() for n in ("initial_state", "dht")}
    y = type(x)(**(vars(x) | states))
    expected = operator(x)
    for name in ("final_state", "dh0"):
        expected[name] = expected[name].mT
    assert_same_bits(operator(y, state_v_first=True), expected)


def test_reverse_time():
    x = inputs()
    results = recurrent(x, reverse=True)
    turned = {n: getattr(x, n).flip(1) for n in ("q", "k", "v", "g", "do")}
    expected = exact(type(x)(**(vars(x) | turned)))
    for name in ("o", "dq", "dk", "dv", "dg"):
        expected[name] = expected[name].flip(1)
    assert_results_close(results, expected, x)


@pytest.mark.parametrize("operator", [chunk_gla, fused_recurrent_gla])
def test_a_last_dimension_of_one(operator):
    """g [B, T, HK, 1], as broadcasting has it, is the same call; its gradient has its shape."""
    x = inputs()
    g = x.g[..., None].detach().requires_grad_()
    o, _ = operator(x.q, x.k, x.v, g)
    o.backward(x.do)
    flat = x.g.detach().requires_grad_()
    expected, _ = operator(x.q, x.k, x.v, flat)
    expected.backward(x.do)
    assert torch.equal(o, expected) and torch.equal(g.grad, flat.grad[..., None])


def test_one_channel():
    """Of one key channel [B, T, HK, 1] is the gate of a channel, and of a head, alike."""
    x = inputs(head=(1, 28))
    o, _ = chunk_gla(x.q, x.k, x.v, x.g[..., None])
    assert_close(o, chunk_gla(x.q, x.k, x.v, x.g)[0], 1e-6)


@by_operator
@by_dtype
@pytest.mark.parametrize("gate", [1.0, 10.0, "reset"])
def test_as_spread_over_channels(device, operator, dtype, gate):
    x = inputs(gate=gate, dtype=dtype, device=device)
    results, wide = operator(x), operator_of_channels(operator, spread(x))
    wide["dg"] = wide["dg"].double().sum(-1)
    assert_results_close(results, {n: t.double() for n, t in wide.items()}, x)


def operator_of_channels(operator, x):
    function = {simple: chunk_gla, recurrent: fused_recurrent_gla}[operator]
    return simple(x, function)


@by_operator
@by_packing
def test_constant_decay(operator, lengths):
    """g_gamma is g of every token, and gets the gradient of all."""
    x = inputs(lengths=lengths, gate=0.1)
    gamma = x.g[0, 0].detach().requires_grad_()
    x = type(x)(**(vars(x) | {"g": gamma.expand(x.g.shape)}))
    expected = exact(x)
    call = {simple: chunk_simple_gla, recurrent: fused_recurrent_simple_gla}[operator]
    o, state = call(
        x.q, x.k, x.v, g_gamma=gamma, initial_state=x.initial_state, output_final_state=True,
        cu_seqlens=x.cu_seqlens,
    )  # fmt: skip
    torch.autograd.backward([o, state], [x.do, x.dht])
    assert_close(o, expected["o"], 1e-6)
    assert_close(state, expected["final_state"], 1e-6)
    assert_close(gamma.grad, expected["dg"].sum((0, 1)), 1e-5)


@by_operator
def test_no_decay(operator):
    x = inputs(gate=0.0)
    call = {simple: chunk_simple_gla, recurrent: fused_recurrent_simple_gla}[operator]
    o, _ = call(x.q, x.k, x.v, initial_state=x.initial_state)
    assert_close(o, exact(x)["o"], 1e-6)


def test_resets_are_exact(device, head):
    """Nothing before a reset is seen, and its own gradient is 0."""
    x = inputs(gate="reset", head=head, dtype=torch.bfloat16, device=device)
    results = simple(x)
    assert (results["dg"][x.g == -torch.inf] == 0).all()
    g = x.g.clone()
    g[:, 70] = -torch.inf
    o, _ = chunk_simple_gla(x.q, x.k, x.v, g, initial_state=x.initial_state)
    k, v = x.k.clone(), x.v.clone()
    k[:, :70], v[:, :70] = 7, -3
    other, _ = chunk_simple_gla(x.q, k, v, g, initial_state=-x.initial_state)
    assert torch.equal(o[:, 70:], other[:, 70:])


@by_operator
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strength", [1.0, 6.0, 12.0, 30.0])
def test_gradient_of_gates_that_are_all_alike(operator, strength, dtype):
    """Decays of every token from e^-1 to e^-30: dg is what is left of much larger terms."""
    options = {"dtype": dtype, "states": False, "gate_dtype": torch.float32}
    x = inputs(T=260, head=(64, 64), H=1, **options)
    x = dataclasses.replace(x, g=torch.full_like(x.g, -strength))
    assert_results_close(operator(x), exact(x), x)


def test_same_bits_in_a_batch_and_packed():
    x = inputs(lengths=PACKED_LENGTHS)
    together = simple(x)
    with batch_invariant():
        assert_same_bits(simple(x), together)
    for n, (start, end) in enumerate(zip(x.cu_seqlens[:-1], x.cu_seqlens[1:], strict=True)):
        alone = simple(x.select(n))
        own = {
            name: t[n : n + 1] if name in ("final_state", "dh0") else t[:, start:end]
            for name, t in together.items()
        }
        assert_same_bits(alone, own)


def test_gradcheck():
    x = inputs(H=2, T=66, head=(3, 2), dtype=torch.float64, states=True)
    for operator in (chunk_simple_gla, fused_recurrent_simple_gla):

        def function(q, k, v, g, h0, operator=operator):
            return operator(q, k, v, g, initial_state=h0, output_final_state=True)

        leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v, x.g, x.initial_state)]
        assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


@by_dtype
@pytest.mark.parametrize("T", [1, 5])
def test_decoding_on_a_pool(device, dtype, T):
    """Steps, verification and commits with one gate a head are those with it spread."""
    x = inputs(T=T, HK=1, dtype=dtype, device=device)
    wide = spread(x)
    pool = torch.ones(4, 3, 20, 28, dtype=x.initial_state.dtype, device=device)
    pools, slots = [pool.clone() for _ in range(3)], torch.tensor([2, 0], device=device)
    o = recurrent_gla_step_(x.q, x.k, x.v, x.g, state=pools[0], slots=slots)
    expected = recurrent_gla_step_(wide.q, wide.k, wide.v, wide.g, state=pools[1], slots=slots)
    assert torch.equal(o, expected) and torch.equal(pools[0], pools[1])
    last = x.g[..., None]
    assert_verified(recurrent_gla_verify(x.q, x.k, x.v, last, state=pool, slots=slots), o)
    accepted = torch.full((2,), T, device=device)
    recurrent_gla_commit_(x.k, x.v, last, state=pools[2], slots=slots, accepted=accepted)
    assert torch.equal(pools[2], pools[1])


def test_compiles_whole_and_exports():
    x = inputs(T=70)

    def function(q, k, v, g):
        return chunk_simple_gla(q, k, v, g)[0] + fused_recurrent_simple_gla(q, k, v, g)[0]

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v, x.g)]
    compiled(*leaves).backward(x.do)
    grads = [t.grad.clone() for t in leaves]
    for t in leaves:
        t.grad = None
    function(*leaves).backward(x.do)
    for grad, t in zip(grads, leaves, strict=True):
        assert torch.equal(grad, t.grad)

    class Module(torch.nn.Module):
        def forward(self, q, k, v, g):
            return function(q, k, v, g)

    T = torch.export.Dim("T", min=2, max=4096)
    shapes = {name: {1: T} for name in ("q", "k", "v", "g")}
    program = torch.export.export(Module(), (x.q, x.k, x.v, x.g), dynamic_shapes=shapes)
    y = inputs(T=33)
    assert torch.equal(program.module()(y.q, y.k, y.v, y.g), function(y.q, y.k, y.v, y.g))


def test_opcheck():
    x = inputs(T=20)
    op = torch.ops.gla_ext.chunk_gla_fwd.default
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v, x.g)]
    torch.library.opcheck(op, (*leaves, None, None, None, None, True, False, False))
    op = torch.ops.gla_ext.recurrent_gla_fwd.default
    torch.library.opcheck(op, (*leaves, None, None, None, None, True, False, False))


def test_autocast_casts_all_but_the_gate():
    x = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        o, _ = chunk_simple_gla(x.q, x.k, x.v, x.g)
    short = [t.bfloat16() for t in (x.q, x.k, x.v)]
    assert torch.equal(o, chunk_simple_gla(*short, x.g)[0])


def test_vmap():
    x = inputs(T=20)
    batched = torch.vmap(lambda q, k, v, g: chunk_simple_gla(q, k, v, g)[0])
    tensors = [torch.stack([t, t.flip(0)]) for t in (x.q, x.k, x.v, x.g)]
    for n in range(2):
        expected = chunk_simple_gla(*(t[n] for t in tensors))[0]
        assert torch.equal(batched(*tensors)[n], expected)


def test_check_inputs_takes_it():
    x = inputs()
    check_inputs(x.q, x.k, x.v, x.g)
    check_inputs(x.q, x.k, x.v, x.g[..., None])
    with pytest.raises(ValueError, match="at most 0"):
        check_inputs(x.q, x.k, x.v, -x.g)


def test_other_names():
    assert fused_chunk_simple_gla is chunk_simple_gla
    x = inputs(T=9)
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        _, state = fused_recurrent_simple_gla(
            x.q, x.k, x.v, x.g, output_final_state=True, transpose_state_layout=True
        )
    expected = fused_recurrent_simple_gla(x.q, x.k, x.v, x.g, output_final_state=True)[1]
    assert torch.equal(state, expected.mT)


def sentence(text):
    return f"^{re.escape(text)}"


def test_bad_inputs():
    x = inputs(T=9)
    gamma = x.g[0, 0]
    for name, call in (
        ("chunk_simple_gla", chunk_simple_gla),
        ("fused_recurrent_simple_gla", fused_recurrent_simple_gla),
    ):
        with pytest.raises(ValueError, match=f"^{name}: expected only one of g and g_gamma, got"):
            call(x.q, x.k, x.v, x.g, gamma)
        text = f"{name}: expected g to have 3 dimensions [B, T, HK], got 4 with shape [2, 9, 3, 1]"
        with pytest.raises(ValueError, match=sentence(text)):
            call(x.q, x.k, x.v, x.g[..., None])
        text = f"{name}: expected g_gamma to have shape [HK] = [3], got [2]"
        with pytest.raises(ValueError, match=sentence(text)):
            call(x.q, x.k, x.v, g_gamma=gamma[:2])
        with pytest.raises(TypeError, match=f"^{name}: expected g to be a tensor, got"):
            call(x.q, x.k, x.v, 0.9)
    text = "chunk_gla: expected g to have shape [B, T, HK] = [2, 9, 3], got [2, 8, 3]"
    with pytest.raises(ValueError, match=sentence(text)):
        chunk_gla(x.q, x.k, x.v, x.g[:, :8])
    text = (
        "chunk_gla: expected g to have 4 dimensions [B, T, HK, K], or 3 dimensions [B, T, HK], "
        "got 2 with shape [2, 9]"
    )
    with pytest.raises(ValueError, match=sentence(text)):
        chunk_gla(x.q, x.k, x.v, x.g[..., 0])
    with pytest.raises(TypeError, match=r"expected g to be torch.float64 like q"):
        chunk_simple_gla(*(t.double() for t in (x.q, x.k, x.v)), x.g)


@pytest.mark.parametrize("name", ["chunk", "fused_recurrent"])
def test_heads_that_are_not_there(name):
    """A decay of each of no heads, or of an input that has no heads, stops nothing before."""
    lightning = getattr(gla_ext, f"{name}_lightning_attn")
    x = torch.randn(3, 4)
    with pytest.raises(ValueError, match=r"expected q to have 4 dimensions \[B, T, H, K\], got 2"):
        lightning(x, x, x, 0, 2)
    x = torch.randn(1, 3, 0, 4)
    assert lightning(x, x, x, 0, 2)[0].shape == x.shape
