"""What the short convolution refuses, or leaves to plain operations.

Equal bits (see common.py): own sums.
"""

import re

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from conv_inputs import make, module
from torch.distributed.tensor import Replicate, distribute_tensor

from gla_ext.layers.short_convolution import ShortConvolution

ops = torch.ops.gla_ext


def raises(error, message):
    return pytest.raises(error, match="^" + re.escape(message))


NAME = "ShortConvolution: "


def call(x, weight, bias=None, cache=None, cu_seqlens=None):
    return ops.short_convolution_fwd(x, weight, bias, cache, cu_seqlens, True)


def test_errors(device):
    x, w = torch.zeros(2, 9, 5, device=device), torch.zeros(5, 1, 4, device=device)
    offsets = torch.tensor([0, 9], device=device)
    with raises(TypeError, NAME + "expected x to be torch.bfloat16, torch.float16, torch.float32"):
        call(x.int(), w)
    with raises(TypeError, NAME + "expected weight to be torch.bfloat16, torch.float16, torch.fl"):
        call(x, w.long())
    with raises(TypeError, NAME + "expected cache to be torch.float32 like x, got torch.float16"):
        call(x, w, cache=x.new_zeros(2, 5, 4).half())
    with raises(TypeError, NAME + "expected cu_seqlens to be torch.int32 or torch.int64, got tor"):
        call(x[:1], w, cu_seqlens=offsets.float())
    with raises(ValueError, NAME + "expected x to have 3 dimensions [B, T, D], got 2 with shape"):
        call(x[0], w)
    with raises(ValueError, NAME + "expected weight to have 3 dimensions [D, 1, W], got 2 with"):
        call(x, w[:, 0])
    with raises(ValueError, NAME + "expected weight to have shape [D, 1, W] = [5, 1, 4], got [4"):
        call(x, w[:4])
    with raises(ValueError, NAME + "expected the last dimension of weight to be at least 1"):
        call(x, w[..., :0])
    with raises(ValueError, NAME + "expected bias to have shape [D] = [5], got [4]"):
        call(x, w, x[0, 0, :4])
    with raises(ValueError, NAME + "expected weight on the device of x, "):
        call(x, w.to("meta"))
    with raises(NotImplementedError, NAME + "expected strided (dense) tensors, got layout Sparse"):
        call(x.to_sparse(), w)
    backward = ops.short_convolution_bwd
    name = "short_convolution_bwd: expected "
    with raises(ValueError, name + "dy to have shape [B, T, D] = [2, 9, 5], got [1, 9, 5]"):
        backward(x[:1], None, x, w, None, None, None)
    with raises(ValueError, name + "dstate to have shape [N, D, W] = [2, 5, 4], got [2, 5, 3]"):
        backward(x, x.new_zeros(2, 5, 3), x, w, None, None, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"cache": torch.zeros(2, 5, 3)},
            "cache to have shape [N, D, W] = [2, 5, 4], got [2, 5, 3]",
        ),
        (
            {"cache": torch.zeros(3, 5, 4)},
            "cache to have shape [N, D, W] = [2, 5, 4], got [3, 5, 4]",
        ),
        ({"cu_seqlens": torch.tensor([0, 9])}, "B to be 1 with cu_seqlens, got 2"),
        ({"cu_seqlens": torch.tensor(9)}, "cu_seqlens to have shape [N + 1], got []"),
        ({"cu_seqlens": torch.tensor([[0, 9]])}, "cu_seqlens to have shape [N + 1], got [1, 2]"),
    ],
    ids=["W", "N", "B", "scalar", "matrix"],
)
def test_wrong_inputs(arguments, message):
    with raises(ValueError, NAME + "expected " + message):
        ShortConvolution(5, 4)(torch.zeros(2, 9, 5), **arguments)


@pytest.mark.cuda
def test_fp64_on_cuda_is_refused():
    x, weight, *_ = make(1, 4, 8, 4, "cuda", torch.float64)
    with raises(NotImplementedError, NAME + "expected torch.bfloat16, torch.float16 or torch.fl"):
        call(x, weight)


def test_what_is_not_differentiated():
    x, weight, bias, *_ = make(2, 5, 8, 4, "cpu", torch.float32)
    conv, leaf = module(weight, bias), x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(conv(leaf)[0].square().sum(), leaf, create_graph=True)
    with raises(NotImplementedError, NAME + "double backward is not supported"):
        dx.sum().backward()
    with raises(NotImplementedError, NAME + "torch.func transforms"):
        torch.func.grad(lambda x: conv(x)[0].sum())(x)
    with fwAD.dual_level(), raises(NotImplementedError, NAME + "forward-mode AD"):
        conv(fwAD.make_dual(x, x))


def test_vmap():
    x, weight, bias, *_ = make(6, 5, 8, 4, "cpu", torch.float32)
    conv = module(weight, bias)
    found = torch.vmap(lambda x: conv(x)[0])(x.view(2, 3, 5, 8))
    assert torch.equal(found.view_as(x), conv(x)[0])


def test_plain_tensors_beside_sharded_ones(one_rank):
    x, weight, *_ = make(1, 4, 8, 4, "cpu", torch.float32)
    x = distribute_tensor(x, one_rank, [Replicate()])
    message = "short_convolution_fwd: expected weight to be a DTensor like the others, got a plain"
    with raises(NotImplementedError, message):
        module(weight, None)(x)
