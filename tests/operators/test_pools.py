"""What the operators on a pool of states share: pools that are views, rows by slots, outputs that
are given, and what is refused of these.
"""

import functools
import re
from typing import Any, NamedTuple

import pytest
import torch
from common import DTYPES, raises, raises_exactly
from conv_pool import Pool
from pool_inputs import Prompts
from ragged import Ragged
from recurrence import Server
from torch import Tensor
from views import OUTPUTS, POOLS, assert_nothing_beside, pool_like, view_like

from gla_ext import recurrent_gla_step_, recurrent_gla_verify


class Call(NamedTuple):
    """A function of keywords, the tensors that it reads, its pool, and rows of the pool."""

    run: Any
    tensors: dict[str, Tensor]
    pool: Tensor
    rows: dict[str, Tensor]


def prompts(packed):
    def make(device, dtype, v_first=False, state_dtype=None, sizes=(2, 24, 40)):
        options = {"storage": state_dtype, "v_first": v_first, "sizes": sizes, "dtype": dtype}
        x = Prompts(device, packed, **options)
        asks, _ = x.checkpoints()
        tensors = x.tokens | {"state": x.pool, "checkpoints": asks["checkpoints"]}
        rows = {name: x.rows[name] for name in ("slots", "write_slots")}
        return Call(functools.partial(x.run, **asks), tensors, x.pool, rows)

    return make


def step(device, dtype, v_first=False, state_dtype=None, sizes=(3, 20, 28)):
    x = Server(device, 2, dtype, "both", v_first, state_dtype, sizes)
    writes = torch.tensor([4, 1, 2, 3, 5, -1], device=device)
    run = functools.partial(recurrent_gla_step_, **x.arguments(), write_slots=writes)
    rows = {"slots": x.slots, "write_slots": writes}
    return Call(run, x.tokens | {"state": x.pool}, x.pool, rows)


def drafts(device, dtype, v_first=False, state_dtype=None, sizes=(2, 64, 40)):
    state_dtype = state_dtype or torch.promote_types(dtype, torch.float32)
    x = Ragged(device, sizes, dtype, state_dtype, v_first)
    run = functools.partial(recurrent_gla_verify, **x.arguments())
    return Call(run, x.tokens | {"state": x.pool}, x.pool, {"slots": x.slots})


def convolution(T=1, W=4, packed=False):
    def make(device, dtype):
        x = Pool(device, dtype, T, W=W, packed=packed)
        tensors = {"x": x.x, "weight": x.weight, "bias": x.bias, "state": x.pool}
        return Call(x.run, tensors, x.pool, {"slots": x.slots, "write_slots": x.write_slots})

    return make


OF_STATES = {
    "prompts": prompts(False),
    "packed prompts": prompts(True),
    "a step": step,
    "drafts": drafts,
}
CALLS = OF_STATES | {
    **{f"a convolution, T {T}, W {W}": convolution(T, W) for T, W in ((2, 4), (30, 3), (3, 6))},
    **{f"a packed convolution, W {W}": convolution(W=W, packed=True) for W in (3, 4, 6)},
    "a convolution of no tokens": convolution(0),
}
by_call = pytest.mark.parametrize("make", CALLS.values(), ids=CALLS)


def assert_same_in_a_view(make, layout):
    """`make` is called without arguments, more than once."""
    call, plain = make(), make()
    expected = plain.run()
    pool, whole = pool_like(call.pool, layout)
    assert torch.equal(call.run(state=pool), expected)
    assert torch.equal(pool, plain.pool)
    assert_nothing_beside(pool, whole)


@pytest.mark.parametrize("layout", POOLS)
@pytest.mark.parametrize("sizes", [(3, 20, 28), (3, 24, 40), (2, 64, 40)], ids=str)
@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("name", OF_STATES)
def test_pools_that_are_views(device, name, v_first, state_dtype, sizes, layout):
    dtype = torch.bfloat16 if "prompts" in name else torch.float32
    make = functools.partial(OF_STATES[name], device, dtype, v_first, state_dtype, sizes)
    assert_same_in_a_view(make, layout)


@pytest.mark.parametrize("layout", POOLS)
@by_call
def test_pools_of_any_call_that_are_views(device, make, layout):
    assert_same_in_a_view(functools.partial(make, device, torch.bfloat16), layout)


@by_call
def test_rows_of_either_type(device, make):
    expected, pool = None, None
    for dtype in (torch.int32, torch.int64):
        call = make(device, torch.float32)
        o = call.run(**{name: rows.to(dtype) for name, rows in call.rows.items()})
        assert expected is None or (torch.equal(o, expected) and torch.equal(call.pool, pool))
        expected, pool = o, call.pool


@by_call
def test_rows_far_outside(device, make):
    call = make(device, torch.float32)
    before, N, P = call.pool.clone(), len(call.rows["slots"]), len(call.pool)
    for slots in ([P], [-1], [2**62, -(2**62), 2**31, -(2**31), 2**31 - 1, 100, P + 1]):
        rows = torch.tensor((slots * N)[:N], device=device)
        o = call.run(**dict.fromkeys(call.rows, rows))
        assert not o.any() and torch.equal(call.pool, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", OUTPUTS)
@by_call
def test_out(device, make, layout, dtype):
    """Has the bits of a fresh output, zeros where there is no sequence, and nothing beside it."""
    call, plain = make(device, dtype), make(device, dtype)
    expected = plain.run()
    out, whole = view_like(expected, layout)
    assert call.run(out=out) is out
    assert torch.equal(out, expected) and torch.equal(call.pool, plain.pool)
    assert_nothing_beside(out, whole)


@pytest.mark.parametrize("make", [prompts(True), convolution(2)], ids=["prompts", "convolution"])
def test_out_beside_an_empty_pool(device, make):
    call = make(device, torch.float32)
    out = torch.full_like(call.run(), torch.nan)
    call.run(state=call.pool[:0], out=out)
    assert not out.any()


WORDS = {  # the operator, its first argument, the dimensions of outputs and of rows
    "prompts": ("chunk_gla_", "q", "[B, T, H, V]", "[N]"),
    "a step": ("recurrent_gla_step_", "q", "[B, T, H, V]", "[B]"),
    "drafts": ("recurrent_gla_verify", "q", "[B, T, H, V]", "[N]"),
    "a convolution, T 2, W 4": ("short_convolution_", "x", "[B, T, D]", "[B]"),
}


@pytest.mark.parametrize("name", WORDS)
def test_wrong_rows(name):
    op, first, _, dimension = WORDS[name]
    call = CALLS[name]("cpu", torch.float32)
    before, N = call.pool.clone(), len(call.rows["slots"])
    for rows in call.rows:
        text, given = f"{op}: expected {rows} ", torch.zeros(N + 1, dtype=torch.int64)
        with raises_exactly(
            TypeError, text + "to be torch.int32 or torch.int64, got torch.float32"
        ):
            call.run(**{rows: given[:N].float()})
        with raises_exactly(ValueError, text + f"to have shape {dimension} = [{N}], got [{N + 1}]"):
            call.run(**{rows: given})
        with raises(ValueError, text + f"to have 1 dimension {dimension}, got 2 with shape"):
            call.run(**{rows: given[:N, None]})
        with raises_exactly(ValueError, text + f"on the device of {first}, cpu, got meta"):
            call.run(**{rows: given[:N].to("meta")})
    with raises_exactly(TypeError, f"{op}: expected state to be a tensor, got None"):
        call.run(state=None)
    assert torch.equal(call.pool, before)


@pytest.mark.parametrize("name", WORDS)
def test_same_sentence_under_compile(name):
    op, _, _, dimension = WORDS[name]
    call = CALLS[name]("cpu", torch.float32)
    N = len(call.rows["slots"])
    sentence = f"{op}: expected slots to have shape {dimension} = [{N}], got [{N + 1}]"
    compiled = torch.compile(call.run, fullgraph=True)
    with pytest.raises(Exception, match=re.escape(sentence)):
        compiled(slots=torch.zeros(N + 1, dtype=torch.int64))


@pytest.mark.parametrize("name", WORDS)
def test_wrong_outputs(name):
    """Checked as a fresh output is made, and apart from every input."""
    op, first, dimensions, _ = WORDS[name]
    call = CALLS[name]("cpu", torch.float32)
    run, tensors, pool, _ = call
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
