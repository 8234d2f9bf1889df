"""What the recurrent operators refuse: one sentence with what was expected and what came."""

import re

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from recurrence import make_recurrence

from gla_ext import (
    fused_recurrent_gla,
    recurrent_gla_commit_,
    recurrent_gla_step_,
    recurrent_gla_verify,
)

ops = torch.ops.gla_ext


@pytest.fixture
def x():
    return make_recurrence(2, 6, 4, 8, 12)


def raises(error, message):
    return pytest.raises(error, match="^" + re.escape(message) + "$")


def call(x, **changes):
    return fused_recurrent_gla(**(x.leaves() | changes))


NAME = "fused_recurrent_gla: expected "


@pytest.mark.parametrize(
    "name, last, size", [("k", "K", 8), ("v", "V", 12), ("gk", "K", 8), ("gv", "V", 12)]
)
def test_shapes(x, name, last, size):
    message = f"{name} to have shape [B, T, H, {last}] = [2, 6, 4, {size}], got [2, 5, 4, {size}]"
    with raises(ValueError, NAME + message):
        call(x, **{name: getattr(x, name)[:, 1:]})


def test_dtypes(x):
    with raises(TypeError, NAME + "k to be torch.float32 like q, got torch.float16"):
        call(x, k=x.k.half())
    three = "torch.bfloat16, torch.float16 or torch.float32"
    for name in ("gk", "gv"):
        with raises(TypeError, NAME + f"{name} to be {three}, got torch.float64"):
            call(x, **{name: getattr(x, name).double()})
        with raises(TypeError, NAME + f"{name} to be torch.float64 like q, got torch.float32"):
            call(x.map(torch.Tensor.double), **{name: getattr(x, name)})
    with raises(TypeError, NAME + "initial_state to be torch.float32, got torch.bfloat16"):
        call(x, initial_state=x.initial_state.bfloat16())


def test_state_layout(x):
    message = "initial_state to have shape [N, H, V, K] = [2, 4, 12, 8], got [2, 4, 8, 12]"
    with raises(ValueError, NAME + message):
        call(x, state_v_first=True)


def test_offsets(x):
    with raises(ValueError, NAME + "batch size 1 with cu_seqlens (sequences packed in one row), "
                "got 2"):  # fmt: skip
        call(x, cu_seqlens=torch.tensor([0, 6]), initial_state=None)
    one = x.map(lambda t: t[:1])
    with raises(ValueError, NAME + "cu_seqlens to be non-decreasing, got 5 before 3 at position 1"):
        call(one, cu_seqlens=torch.tensor([0, 5, 3]), initial_state=None)


def test_devices_and_layouts(x):
    with raises(ValueError, NAME + "gv on the device of q, cpu, got meta"):
        call(x, gv=x.gv.to("meta"))
    with pytest.raises(NotImplementedError, match=re.escape(NAME + "strided (dense) tensors, got")):
        call(x, q=x.q.to_sparse())
    with raises(TypeError, NAME + "k to be a tensor, got None"):
        call(x, k=None)


def test_what_autograd_does_not_do(x):
    message = "fused_recurrent_gla: forward-mode AD is not supported, use reverse mode (backward)"
    with fwAD.dual_level(), raises(NotImplementedError, message):
        call(x, gv=fwAD.make_dual(x.gv, x.gv))
    with pytest.raises(NotImplementedError, match=r"fused_recurrent_gla: torch\.func transforms"):
        torch.func.grad(lambda q: call(x, q=q)[0].sum())(x.q)
    q = x.q.requires_grad_()
    (dq,) = torch.autograd.grad(call(x, q=q)[0].sum(), q, create_graph=True)
    with raises(NotImplementedError, "fused_recurrent_gla: double backward is not supported"):
        dq.sum().backward()


def test_backward_operator_checks_its_inputs(x):
    arguments = (x.q, x.k, x.v, x.gk, x.gv, x.initial_state, None, None, False, False)
    with raises(ValueError, "recurrent_gla_bwd: expected do to have shape [B, T, H, V] = "
                "[2, 6, 4, 12], got [2, 6, 4, 8]"):  # fmt: skip
        ops.recurrent_gla_bwd(x.q, x.dht, *arguments)
    with raises(ValueError, "recurrent_gla_bwd: expected dht to have shape [N, H, K, V] = "
                "[2, 4, 8, 12], got [1, 4, 8, 12]"):  # fmt: skip
        ops.recurrent_gla_bwd(x.do, x.dht[:1], *arguments)


# The pool.

STEP = "recurrent_gla_step_: expected "


def step(x, **changes):
    arguments = {n: t for n, t in x.leaves().items() if n != "initial_state"}
    return recurrent_gla_step_(**(arguments | {"state": x.initial_state} | changes))


def test_pool_shapes_and_dtypes(x):
    with raises(ValueError, STEP + "state to have shape [P, H, K, V] = [2, 4, 8, 12], got "
                "[1, 4, 8, 12]"):  # fmt: skip
        step(x, state=x.initial_state[:1])
    with raises(ValueError, STEP + "state to have shape [P, H, V, K] = [2, 4, 12, 8], got "
                "[2, 4, 8, 12]"):  # fmt: skip
        step(x, state_v_first=True)
    with raises(TypeError, STEP + "state to be torch.float32, got torch.bfloat16"):
        step(x, state=x.initial_state.bfloat16())
    with raises(TypeError, STEP + "state to be a tensor, got None"):
        step(x, state=None)


def test_slots(x):
    with raises(TypeError, STEP + "slots to be torch.int32 or torch.int64, got torch.float32"):
        step(x, slots=torch.zeros(2))
    with raises(ValueError, STEP + "slots to have shape [B] = [2], got [3]"):
        step(x, slots=torch.zeros(3, dtype=torch.int64))
    with raises(ValueError, STEP + "slots to have 1 dimension [B], got 2 with shape [2, 1]"):
        step(x, slots=torch.zeros(2, 1, dtype=torch.int64))


def test_pool_strides(x):
    message = "the last two dimensions of state to be contiguous, got strides [384, 96, 1, 8]"
    with raises(ValueError, STEP + message):
        step(x, state=x.initial_state.mT.contiguous().mT)
    message = "the matrices of state to lie apart, got sizes [2, 4, 8, 12] with strides "
    with raises(ValueError, STEP + message + "[0, 96, 12, 1]"):
        step(x, state=x.initial_state[:1].expand(2, 4, 8, 12))


def test_accepted(x):
    arguments = {"k": x.k, "v": x.v, "state": x.initial_state}
    message = "recurrent_gla_commit_: expected accepted to "
    with raises(ValueError, message + "have shape [B] = [2], got [1]"):
        recurrent_gla_commit_(**arguments, accepted=torch.ones(1, dtype=torch.int64))
    with raises(TypeError, message + "be torch.int32 or torch.int64, got torch.float32"):
        recurrent_gla_commit_(**arguments, accepted=torch.ones(2))
    with raises(TypeError, "recurrent_gla_commit_: expected v to be torch.float32 like k, got "
                "torch.float16"):  # fmt: skip
        recurrent_gla_commit_(
            **(arguments | {"v": x.v.half()}), accepted=torch.ones(2, dtype=torch.int64)
        )


@pytest.mark.parametrize("name", ["q", "k", "v", "gk", "gv", "initial_state"])
def test_no_gradient_is_lost(x, name):
    getattr(x, name).requires_grad_()
    advice = ": decoding on a pool has no gradient, call gla_ext.fused_recurrent_gla, or run it "
    with raises(NotImplementedError, f"recurrent_gla_step_{advice}under torch.no_grad()"):
        step(x)
    arguments = x.leaves()
    state = arguments.pop("initial_state")
    with raises(NotImplementedError, f"recurrent_gla_verify{advice}under torch.no_grad()"):
        recurrent_gla_verify(**arguments, state=state)
    if name != "q":
        del arguments["q"]
        accepted = torch.ones(2, dtype=torch.int64)
        with raises(NotImplementedError, f"recurrent_gla_commit_{advice}under torch.no_grad()"):
            recurrent_gla_commit_(**arguments, state=state, accepted=accepted)
    with torch.no_grad():
        step(x)


def test_autograd_knows_of_the_write(x):
    weight = torch.ones(2, 4, 8, 12, requires_grad=True)
    loss = (weight * x.initial_state).sum()
    step(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_same_sentence_under_compile(x):
    message = STEP + "slots to have shape [B] = [2], got [3]"
    compiled = torch.compile(step, fullgraph=True)
    with pytest.raises(Exception, match=re.escape(message)):
        compiled(x, slots=torch.zeros(3, dtype=torch.int64))
