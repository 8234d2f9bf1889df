"""What the recurrent operators refuse: one sentence with what was expected and what came."""

import re

import pytest
import torch
from common import raises_exactly as raises
from recurrence import make_recurrence
from torch.distributed.tensor import distribute_tensor

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


def call(x, **changes):
    return fused_recurrent_gla(**(x.leaves() | changes))


NAME = "fused_recurrent_gla: expected "


@pytest.mark.parametrize(
    "name, last, size", [("k", "K", 8), ("v", "V", 12), ("gk", "K", 8), ("gv", "V", 12)]
)
def test_shapes(x, name, last, size):
    message = f"{name} to have shape [B, T, HK, {last}] = [2, 6, 4, {size}], got [2, 5, 4, {size}]"
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
    with raises(TypeError, NAME + "initial_state to be torch.float32, got torch.float64"):
        call(x, initial_state=x.initial_state.double())


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


def verify(x, **changes):
    arguments = {n: t for n, t in x.leaves().items() if n != "initial_state"}
    return recurrent_gla_verify(**(arguments | {"state": x.initial_state} | changes))


def commit(x, **changes):
    arguments = {n: t for n, t in x.leaves().items() if n not in ("initial_state", "q")}
    arguments |= {"state": x.initial_state, "accepted": torch.tensor([1, 2])}
    return recurrent_gla_commit_(**(arguments | changes))


@pytest.mark.parametrize("function", [call, step, verify])
def test_scale_is_a_number(x, function):
    with pytest.raises(TypeError, match="expected scale to be a number, got a tensor; multiply q"):
        function(x, scale=torch.tensor(0.5))


def test_pool_shapes_and_dtypes(x):
    with raises(ValueError, STEP + "state to have shape [P, H, K, V] = [2, 4, 8, 12], got "
                "[1, 4, 8, 12]"):  # fmt: skip
        step(x, state=x.initial_state[:1])
    with raises(ValueError, STEP + "state to have shape [P, H, V, K] = [2, 4, 12, 8], got "
                "[2, 4, 8, 12]"):  # fmt: skip
        step(x, state_v_first=True)
    three = "torch.bfloat16, torch.float16 or torch.float32"
    with raises(TypeError, STEP + f"state to be {three}, got torch.float64"):
        step(x, state=x.initial_state.double())
    with raises(TypeError, STEP + "state to be torch.float64 like q, got torch.bfloat16"):
        step(x.map(torch.Tensor.double), state=x.initial_state.bfloat16())


def test_offsets_of_drafts(x):
    one = x.map(lambda t: t[:1])
    slots = torch.zeros(2, dtype=torch.int64)
    for function in (verify, commit):
        name = f"recurrent_gla_{function.__name__}{'_' if function is commit else ''}: expected "
        with raises(ValueError, name + "batch size 1 with cu_seqlens (sequences packed in one row)"
                    ", got 2"):  # fmt: skip
            function(x, cu_seqlens=torch.tensor([0, 6]))
        with raises(ValueError, name + "slots to have shape [N] = [3], got [2]"):
            function(one, cu_seqlens=torch.tensor([0, 1, 2, 6]), slots=slots)
        with raises(ValueError, name + "cu_seqlens to be non-decreasing, got 5 before 3 at "
                    "position 1"):  # fmt: skip
            function(one, cu_seqlens=torch.tensor([0, 5, 3]), slots=slots)
        with raises(ValueError, name + "state to have shape [P, H, K, V] = [3, 4, 8, 12], got "
                    "[1, 4, 8, 12]"):  # fmt: skip
            function(one, cu_seqlens=torch.tensor([0, 1, 2, 6]))


def test_pool_strides(x):
    message = "the last two dimensions of state to be contiguous, got strides [384, 96, 1, 8]"
    with raises(ValueError, STEP + message):
        step(x, state=x.initial_state.mT.contiguous().mT)
    message = "the matrices of state to lie apart, got sizes [2, 4, 8, 12] with strides "
    with raises(ValueError, STEP + message + "[0, 96, 12, 1]"):
        step(x, state=x.initial_state[:1].expand(2, 4, 8, 12))


@pytest.mark.parametrize("strides", [(96, 96), (383, 96), (96, 191), (0, 96), (96, 0)])
def test_overlapping_pool(x, strides):
    state = torch.randn(2000).as_strided((2, 4, 8, 12), (*strides, 12, 1))
    message = "expected the matrices of state to lie apart, got sizes [2, 4, 8, 12] with strides "
    message += str([*strides, 12, 1])
    with raises(ValueError, f"recurrent_gla_step_: {message}"):
        step(x, state=state)
    with raises(ValueError, f"recurrent_gla_commit_: {message}"):
        commit(x, state=state)
    assert torch.equal(verify(x, state=state), verify(x, state=state.contiguous()))


@pytest.mark.parametrize("strides", [(384, 96), (96, 192), (400, 99), (96, 200)])
def test_pool_of_matrices_that_lie_apart(x, strides):
    state = torch.randn(2000).as_strided((2, 4, 8, 12), (*strides, 12, 1))
    expected = state.clone()
    assert torch.equal(step(x, state=state), step(x, state=expected))
    assert torch.equal(state, expected)


@pytest.mark.parametrize("stride", [0, 1, 96])
def test_stride_of_a_single_matrix_is_free(x, stride):
    one = x.map(lambda t: t[:1])
    state = one.initial_state.clone().as_strided((1, 4, 8, 12), (stride, 96, 12, 1))
    expected = one.initial_state.clone()
    assert torch.equal(step(one, state=state), step(one, state=expected))
    assert torch.equal(state, expected)


def test_accepted(x):
    arguments = {"k": x.k, "v": x.v, "state": x.initial_state}
    message = "recurrent_gla_commit_: expected accepted to "
    with raises(ValueError, message + "have shape [B] = [2], got [1]"):
        recurrent_gla_commit_(**arguments, accepted=torch.ones(1, dtype=torch.int64))
    with raises(TypeError, message + "be torch.int32 or torch.int64, got torch.float32"):
        recurrent_gla_commit_(**arguments, accepted=torch.ones(2))
    message = "recurrent_gla_commit_: expected write_slots to have shape [B] = [2], got [3]"
    with raises(ValueError, message):
        commit(x, write_slots=torch.zeros(3, dtype=torch.int64))
    with raises(TypeError, "recurrent_gla_commit_: expected v to be torch.float32 like k, got "
                "torch.float16"):  # fmt: skip
        recurrent_gla_commit_(
            **(arguments | {"v": x.v.half()}), accepted=torch.ones(2, dtype=torch.int64)
        )


def test_pool_made_in_inference_mode(x):
    with torch.inference_mode():
        state = x.initial_state.clone()
        step(x, state=state)
    step(x)
    assert torch.equal(state, x.initial_state)


def test_dtensor(x, one_rank):
    given = {"k": x.k, "state": x.initial_state, "slots": torch.zeros(2, dtype=torch.int64)}
    for name, t in (given | {"accepted": given["slots"]}).items():
        change = {name: distribute_tensor(t, one_rank)}
        for function in (commit,) if name == "accepted" else (step, verify, commit):
            with pytest.raises(NotImplementedError, match="expected plain tensors, got a DTensor"):
                function(x, **change)
