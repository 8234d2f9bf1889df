"""One gate a head: every form against the recurrence in fp64, and the contract of chunk_gla."""

import dataclasses
import re

import pytest
import torch
from common import (
    DTYPES,
    GATES,
    PACKED_LENGTHS,
    assert_close,
    assert_results_close,
    exact,
)
from recurrence import assert_verified
from simple_inputs import make_simple, recurrent, simple, spread

import gla_ext
from gla_ext import (
    check_inputs,
    chunk_gla,
    fused_recurrent_gla,
    recurrent_gla_commit_,
    recurrent_gla_step_,
    recurrent_gla_verify,
)
from gla_ext.ops import chunk_simple_gla, fused_recurrent_simple_gla

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_gate = pytest.mark.parametrize("gate", GATES)
by_packing = pytest.mark.parametrize("lengths", [None, PACKED_LENGTHS], ids=["batch", "packed"])
by_operator = pytest.mark.parametrize("operator", [simple, recurrent], ids=["chunk", "recurrent"])


def inputs(H=3, HK=None, T=130, head=(20, 28), lengths=None, **options):
    B, T = (2, T) if lengths is None else (1, 165)
    return make_simple(B, T, H, *head, HK=HK, lengths=lengths, **options)


@by_operator
@pytest.mark.parametrize("dtype", [t for t in DTYPES if t != torch.float64], ids=str)
@by_gate
@pytest.mark.usefixtures("path")
@pytest.mark.cuda
def test_the_truth(head, operator, dtype, gate):
    x = inputs(T=70, head=head, dtype=dtype, gate=gate, device="cuda")
    results = operator(x)
    assert results["dg"].shape == x.g.shape
    assert_results_close(results, exact(x), x)


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
    none = {"initial_state": x.initial_state, "cu_seqlens": x.cu_seqlens}
    o, _ = call(x.q, x.k, x.v, **none)
    assert_close(o, call(x.q, x.k, x.v, torch.zeros_like(x.g), **none)[0], 1e-6)


@by_operator
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strength", [1.0, 6.0, 12.0, 30.0])
def test_gradient_of_gates_that_are_all_alike(operator, strength, dtype):
    """Decays of every token from e^-1 to e^-30: dg is what is left of much larger terms."""
    options = {"dtype": dtype, "states": False, "gate_dtype": torch.float32}
    x = inputs(T=260, head=(64, 64), H=1, **options)
    x = dataclasses.replace(x, g=torch.full_like(x.g, -strength))
    assert_results_close(operator(x), exact(x), x)


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


def test_check_inputs_takes_it():
    x = inputs()
    check_inputs(x.q, x.k, x.v, x.g)
    check_inputs(x.q, x.k, x.v, x.g[..., None])
    with pytest.raises(ValueError, match="at most 0"):
        check_inputs(x.q, x.k, x.v, -x.g)


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
