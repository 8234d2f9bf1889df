"""Operators that write into an output that is given."""

import functools

import pytest
import torch
from common import DTYPES, raises, raises_exactly
from conv_pool import Pool
from pool_inputs import Prompts
from ragged import Ragged
from recurrence import Server
from views import OUTPUTS, assert_nothing_beside, view_like

from gla_ext import recurrent_gla_step_, recurrent_gla_verify

# Each makes a function of keywords, the tensors that it reads, and the pool.


def prompts(packed):
    def make(device, dtype):
        x = Prompts(device, packed, dtype=dtype, sizes=(2, 24, 40))
        asks, _ = x.checkpoints()
        tensors = x.tokens | {"state": x.pool, "checkpoints": asks["checkpoints"]}
        return functools.partial(x.run, **asks), tensors, x.pool

    return make


def step(device, dtype):
    x = Server(device, 2, dtype)
    run = functools.partial(recurrent_gla_step_, **x.arguments())
    return run, x.tokens | {"state": x.pool}, x.pool


def drafts(device, dtype):
    x = Ragged(device, dtype=dtype, state_dtype=torch.promote_types(dtype, torch.float32))
    run = functools.partial(recurrent_gla_verify, **x.arguments())
    return run, x.tokens | {"state": x.pool}, x.pool


def convolution(T=1, W=4, packed=False):
    def make(device, dtype):
        x = Pool(device, dtype, T, W=W, packed=packed)
        tensors = {"x": x.x, "weight": x.weight, "bias": x.bias, "state": x.pool}
        return x.run, tensors, x.pool

    return make


CALLS = {
    "prompts": prompts(False),
    "packed prompts": prompts(True),
    "a step": step,
    "drafts": drafts,
    **{f"a convolution, T {T}, W {W}": convolution(T, W) for T, W in ((2, 4), (30, 3), (3, 6))},
    **{f"a packed convolution, W {W}": convolution(W=W, packed=True) for W in (3, 4, 6)},
    "a convolution of no tokens": convolution(0),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", OUTPUTS)
@pytest.mark.parametrize("make", CALLS.values(), ids=CALLS)
def test_out(device, make, layout, dtype):
    """Has the bits of a fresh output, zeros where there is no sequence, and nothing beside it."""
    run, _, pool = make(device, dtype)
    plain, _, expected_pool = make(device, dtype)
    expected = plain()
    out, whole = view_like(expected, layout)
    assert run(out=out) is out
    assert torch.equal(out, expected) and torch.equal(pool, expected_pool)
    assert_nothing_beside(out, whole)


@pytest.mark.parametrize("make", [prompts(True), convolution(2)], ids=["prompts", "convolution"])
def test_out_beside_an_empty_pool(device, make):
    run, _, pool = make(device, torch.float32)
    out = torch.full_like(run(), torch.nan)
    run(state=pool[:0], out=out)
    assert not out.any()


WORDS = {  # the operator, its first argument, the dimensions
    "prompts": ("chunk_gla_", "q", "[B, T, H, V]"),
    "a step": ("recurrent_gla_step_", "q", "[B, T, H, V]"),
    "drafts": ("recurrent_gla_verify", "q", "[B, T, H, V]"),
    "a convolution, T 2, W 4": ("short_convolution_", "x", "[B, T, D]"),
}


@pytest.mark.parametrize("name", WORDS)
def test_wrong_outputs(name):
    """Checked as a fresh output is made, and apart from every input."""
    op, first, dimensions = WORDS[name]
    run, tensors, pool = CALLS[name]("cpu", torch.float32)
    o, before = run(), pool.clone()
    wide = o.new_zeros(*o.shape[:-1], o.shape[-1] + 1)
    text = f"{op}: expected out "
    got = f"{list(o.shape)}, got {list(wide.shape)}"
    with raises_exactly(ValueError, text + f"to have shape {dimensions} = {got}"):
        run(out=wide)
    with raises(ValueError, text + f"to have {o.dim()} dimensions {dimensions}, got {o.dim() - 1}"):
        run(out=o[0])
    with raises_exactly(TypeError, text + f"to be torch.float32 like {first}, got torch.bfloat16"):
        run(out=o.bfloat16())
    with raises_exactly(ValueError, text + f"on the device of {first}, cpu, got meta"):
        run(out=o.to("meta"))
    layout = f"{op}: expected the last dimension of out to be contiguous and no two elements of it "
    for out in (o.mT.contiguous().mT, o[:, :1].expand(o.shape)):
        with raises_exactly(ValueError, layout + f"to be the same, got strides {[*out.stride()]}"):
            run(out=out)
    for other, t in tensors.items():
        memory = t.new_zeros(t.numel() + o.numel())
        own, out = memory[: t.numel()].view(t.shape).copy_(t), memory[t.numel() - 1 : -1]
        with raises_exactly(ValueError, text + f"to share no memory with {other}"):
            run(**{other: own}, out=out.view(o.shape))
    assert torch.equal(pool, before)
