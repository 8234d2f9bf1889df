"""What SwiGLU and its linear map refuse, or compute by plain operations.

Equal bits (see common.py): the same calls.
"""

import re

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from common import assert_close
from swiglu_inputs import (
    make_linear,
    plain,
    results,
)

from gla_ext.layers.swiglu import swiglu, swiglu_linear

ops = torch.ops.gla_ext


def raises(error, message):
    return pytest.raises(error, match="^" + re.escape(message))


def test_errors(device):
    x = torch.zeros(2, 3, 8, device=device)
    call, name = ops.swiglu_fwd, "swiglu: expected "
    with raises(TypeError, name + "up to be torch.float32 like gate, got torch.float16"):
        call(x, x.half())
    with raises(TypeError, name + "gate to be torch.bfloat16, torch.float16, torch.float32 or tor"):
        call(x.int(), x.int())
    with raises(ValueError, name + "gate to have at least 1 dimension [..., D], got 0"):
        call(x[0, 0, 0], x[0, 0, 0])
    with raises(ValueError, name + "up to have shape [..., D] = [2, 3, 8], got [2, 3, 7]"):
        call(x, x[..., 1:])
    with raises(ValueError, name + "up on the device of gate, "):
        call(x, x.to("meta"))
    with raises(NotImplementedError, name + "strided (dense) tensors, got layout Sparse"):
        call(x.to_sparse(), x)
    with raises(ValueError, "swiglu_bwd: expected dy to have shape [..., D] = [2, 3, 8], got [1, "):
        ops.swiglu_bwd(x[:1], x, x, True)
    with raises(TypeError, "swiglu_bwd: expected dy to be torch.float32 like gate, got torch.flo"):
        ops.swiglu_bwd(x.half(), x, x, False)
    name = "swiglu: expected "
    for other in (torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64):
        for f in (swiglu, torch.vmap(swiglu)):
            with raises(TypeError, name + "gate to be torch.bfloat16, torch.float16, torch.fl"):
                f(x.to(other), x)
            with raises(TypeError, name + "up to be torch.float32 like gate, got torch."):
                f(x, x.to(other))
    weight, name = x.new_zeros(5, 8), "swiglu_linear: expected "
    with raises(TypeError, name + "up to be torch.float32 like gate, got torch.int64"):
        swiglu_linear(x, x.long(), weight)
    with raises(ValueError, name + "weight to have 2 dimensions [N, D], got 1 with shape [8]"):
        swiglu_linear(x, x, weight[0])
    with raises(ValueError, name + "weight to have shape [N, D] = [5, 8], got [5, 7]"):
        swiglu_linear(x, x, weight[:, 1:])
    with raises(ValueError, name + "bias to have shape [N] = [5], got [4]"):
        swiglu_linear(x, x, weight, weight[1:, 0])
    with raises(TypeError, name + "weight to be torch.float32 like gate, got torch.bfloat16"):
        swiglu_linear(x, x, weight.bfloat16())
    with raises(ValueError, name + "up to have shape [..., D] = [2, 3, 8], got [1, 3, 8]"):
        swiglu_linear(x, x[:1], weight)


@pytest.mark.cuda
def test_fp64_on_cuda_is_refused_by_the_operators_and_plain_in_the_functions():
    inputs, dy = make_linear((3, 40), 24, "cuda", torch.float64)
    with raises(NotImplementedError, "swiglu: expected torch.bfloat16, torch.float16 or torch.fl"):
        ops.swiglu_fwd(*inputs[:2])
    with raises(NotImplementedError, "swiglu_bwd: expected torch.bfloat16, torch.float16 or torc"):
        ops.swiglu_bwd(*inputs[:2], inputs[0], True)
    found, expected = (results(f, inputs, dy) for f in (swiglu_linear, plain))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(swiglu(*inputs[:2]), plain(*inputs[:2]))


@pytest.mark.parametrize("function", [swiglu, swiglu_linear])
def test_what_is_not_differentiated_twice(function):
    inputs, _ = make_linear((3, 8), 4, "cpu", torch.float32)
    leaves = [t.requires_grad_() for t in inputs[: 2 + (function is swiglu_linear)]]
    gradients = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
    with raises(NotImplementedError, "swiglu: double backward is not supported"):
        gradients[0].sum().backward()


@pytest.mark.parametrize(
    ("function", "operator"), [(swiglu, "swiglu_fwd"), (swiglu_linear, "swiglu_linear")]
)
def test_transforms_take_plain_operations_and_the_operators_refuse_them(function, operator):
    inputs, _ = make_linear((3, 8), 4, "cpu", torch.float64)
    inputs = inputs[: 2 + (function is swiglu_linear)]
    call = getattr(ops, operator)
    name = call.default.name().split("::")[1].removesuffix("_fwd")
    rest = [*inputs[1:], *[None] * (function is swiglu_linear)]

    def total(f):
        return lambda gate: f(gate, *inputs[1:]).sum()

    expected = torch.func.grad(total(plain))(inputs[0])
    assert torch.equal(torch.func.grad(total(function))(inputs[0]), expected)
    with raises(NotImplementedError, name + ": torch.func transforms"):
        torch.func.grad(lambda gate: call(gate, *rest).sum())(inputs[0])
    compiled = torch.compile(torch.func.grad(total(function)), fullgraph=True, backend="aot_eager")
    assert_close(compiled(inputs[0]), expected, 1e-14)
    with fwAD.dual_level():
        dual = fwAD.make_dual(inputs[0], inputs[0].cos())
        tangents = [fwAD.unpack_dual(f(dual, *inputs[1:])).tangent for f in (function, plain)]
        assert torch.equal(*tangents)
        with raises(NotImplementedError, name + ": forward-mode AD"):
            call(dual, *rest)
    stacked = torch.stack([inputs[0], inputs[1]])
    found = torch.vmap(lambda gate: function(gate, *inputs[1:]))(stacked)
    assert_close(found[1], plain(inputs[1], *inputs[1:]), 1e-14)


def test_errors_of_plain_operations():
    """Of a call under vmap with the shapes that one of its rows has."""
    x, weight = torch.zeros(2, 3, 8), torch.zeros(5, 8)
    call, name = torch.vmap(swiglu), "swiglu: expected "
    with raises(TypeError, name + "gate to be torch.bfloat16, torch.float16, torch.float32 or tor"):
        call(x.int(), x.int())
    with raises(ValueError, name + "gate to have at least 1 dimension [..., D], got 0"):
        call(x[0, 0], x[0, 0])
    with raises(ValueError, name + "up to have 2 dimensions [..., D], got 1 with shape [8]"):
        call(x, x[:, 0])
    with raises(ValueError, name + "up to have shape [..., D] = [3, 8], got [1, 8]"):
        call(x, x[:, :1])
    with raises(ValueError, name + "up on the device of gate, cpu, got meta"):
        call(x, x.to("meta"))
    call, name = torch.vmap(swiglu_linear, (0, 0, None, None)), "swiglu_linear: expected "
    with raises(ValueError, name + "up to have shape [..., D] = [3, 8], got [1, 8]"):
        call(x, x[:, :1], weight, None)
    with raises(ValueError, name + "weight to have 2 dimensions [N, D], got 1 with shape [8]"):
        call(x, x, weight[0], None)
    with raises(ValueError, name + "weight to have shape [N, D] = [5, 8], got [5, 7]"):
        call(x, x, weight[:, 1:], None)
    with raises(ValueError, name + "bias to have shape [N] = [5], got [1]"):
        call(x, x, weight, weight[:1, 0])
    with raises(TypeError, name + "weight to be torch.float32 like gate, got torch.bfloat16"):
        call(x, x, weight.bfloat16(), None)
    with torch.autocast("cpu", torch.bfloat16):
        assert call(x, x, weight.half(), None).dtype == torch.bfloat16
    on_meta = [t.to("meta") for t in (x, x, weight)]
    assert call(*on_meta, None).shape == (2, 3, 5)
