"""Under torch.vmap and with batched gradients: the results of a loop, and no warning."""

import itertools

import pytest
import torch
from common import make_inputs, run_python
from models import EVERY, make_layer

from gla_ext import chunk_gla, chunk_simple_gla, fused_recurrent_gla, recurrent_gla_verify
from gla_ext.layers.norms import rms_norm
from gla_ext.layers.short_convolution import ShortConvolution

N = 3


def gated_values(q, k, v, g, **options):
    return chunk_gla(q, k, v, g, gv=-v.abs(), **options)


def one_gate_a_head(q, k, v, g, **options):
    return chunk_simple_gla(q, k, v, g[..., 0], **options)


OPERATORS = [chunk_gla, fused_recurrent_gla, gated_values, one_gate_a_head]


@pytest.fixture
def stacked():
    """q, k, v, g and initial_state of N batches of 2."""
    x = make_inputs(2 * N, 70, 2, 8, 12)
    tensors = (x.q, x.k, x.v, x.g, x.initial_state)
    return [t.unflatten(0, (N, 2)).detach().clone() for t in tensors]


def call(operator, *tensors, **options):
    q, k, v, g, h = tensors
    return operator(q, k, v, g, initial_state=h, output_final_state=True, **options)


def loop(function, *tensors, in_dims=None):
    """vmap's results, slice by slice."""
    in_dims = in_dims or [0] * len(tensors)
    slices = [
        function(
            *(t if d is None else t.select(d, i) for t, d in zip(tensors, in_dims, strict=True))
        )
        for i in range(N)
    ]
    if isinstance(slices[0], torch.Tensor):
        return torch.stack(slices)
    return tuple(torch.stack(parts) for parts in zip(*slices, strict=True))


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("in_dims", [(0,) * 5, (0, None, 0, None, None), (None, 0, None, 0, 0)])
def test_forward_and_gradients(operator, in_dims, stacked):
    tensors = [t if d == 0 else t[0] for t, d in zip(stacked, in_dims, strict=True)]
    leaves = [t.requires_grad_() for t in tensors]

    def function(*tensors):
        return call(operator, *tensors)

    found = torch.vmap(function, in_dims)(*leaves)
    wanted = loop(function, *leaves, in_dims=in_dims)
    gradients = [torch.autograd.grad(sum(y.sum() for y in ys), leaves) for ys in (found, wanted)]
    for got, expected in itertools.chain(
        zip(found, wanted, strict=True), zip(*gradients, strict=True)
    ):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("operator", OPERATORS)
def test_dimensions_in_the_middle_and_maps_of_maps(operator, stacked):
    wanted = call(operator, *(t.flatten(0, 1) for t in stacked))
    moved = [t.movedim(0, 2) for t in stacked]
    found = torch.vmap(lambda *t: call(operator, *t), in_dims=2, out_dims=1)(*moved)
    for got, expected in zip(found, wanted, strict=True):
        assert torch.equal(got.movedim(1, 0).flatten(0, 1), expected)
    twice = torch.vmap(torch.vmap(lambda *t: call(operator, *(x[None] for x in t))))(*stacked)
    for got, expected in zip(twice, wanted, strict=True):
        assert torch.equal(got.flatten(0, 2), expected)


@pytest.mark.parametrize("operator", OPERATORS)
def test_offsets_of_every_slice(operator, stacked):
    rows = [t[0, :1] for t in stacked[:4]]
    offsets = torch.tensor([[0, 5, 70], [0, 64, 65], [0, 0, 9]])

    def function(cu_seqlens):
        return operator(*rows, output_final_state=True, cu_seqlens=cu_seqlens)

    for got, expected in zip(torch.vmap(function)(offsets), loop(function, offsets), strict=True):
        assert torch.equal(got, expected)


def test_verify_has_a_rule(stacked):
    q, k, v, g, h = stacked

    def function(q, k, v, g, h):
        return recurrent_gla_verify(q[:, :3], k[:, :3], v[:, :3], g[:, :3], state=h)

    assert torch.equal(torch.vmap(function)(q, k, v, g, h), loop(function, q, k, v, g, h))


@pytest.mark.parametrize("in_dims", [(0, None, 0), (0, None, None), (None, None, 0), (1, 0, 1)])
def test_norm(in_dims):
    x, weight, gate = torch.randn(N, N, 5, 8), torch.randn(N, 8), torch.randn(N, N, 5, 8)
    tensors = [t[0] if d is None else t for t, d in zip((x, weight, gate), in_dims, strict=True)]

    def function(x, weight, gate):
        return rms_norm(x, weight, 1e-5, gate)

    found = torch.vmap(function, in_dims)(*tensors)
    assert torch.equal(found, loop(function, *tensors, in_dims=in_dims))


def test_norm_of_scalars():
    x = torch.randn(N)
    with pytest.raises(
        ValueError, match=r"expected x to have at least 1 dimension \[\.\.\., V\], g"
    ):
        torch.vmap(rms_norm)(x)


def test_convolution_with_states_and_weights_of_every_slice():
    x, state, weights = torch.randn(N, 2, 5, 8), torch.randn(N, 2, 8, 4), torch.randn(N, 8, 1, 4)
    conv = ShortConvolution(8, 4, bias=True)

    def function(x, state, weight):
        parameters = {"weight": weight, "bias": conv.bias}
        return torch.func.functional_call(conv, parameters, (x, state, True))

    for weight, in_dims in ((weights, (0, 0, 0)), (conv.weight, (0, 0, None))):
        found = torch.vmap(function, in_dims)(x, state, weight)
        wanted = loop(function, x, state, weight, in_dims=in_dims)
        assert all(map(torch.equal, found, wanted))


def test_no_slices():
    """One call of a larger batch has no rows; a call for each slice has no shape."""
    q, cu_seqlens = torch.zeros(0, 1, 4, 2, 8), torch.zeros(0, 2, dtype=torch.int64)
    assert torch.vmap(lambda q: chunk_gla(q, q, q, None)[0])(q).shape == q.shape
    row = torch.zeros(1, 4, 2, 8)
    with pytest.raises(ValueError, match=r"torch\.vmap over at least 1 slice, got 0"):
        torch.vmap(lambda cu: chunk_gla(row, row, row, None, cu_seqlens=cu)[0])(cu_seqlens)


@pytest.mark.parametrize("options", [{}, EVERY], ids=["default", "all"])
@pytest.mark.parametrize("mode", ["chunk", "fused_recurrent"])
@pytest.mark.parametrize("training", [True, False])
def test_batched_gradients_of_a_layer(training, mode, options):
    layer = make_layer(mode=mode, **options).train(training)
    x = torch.randn(2, 9, 24, dtype=torch.float64).requires_grad_()
    leaves = [x, *layer.parameters()]
    y = layer(x)[0]
    upstream = torch.randn(N, *y.shape, dtype=y.dtype)
    at_once = torch.autograd.grad(y, leaves, upstream, is_grads_batched=True, retain_graph=True)
    one_by_one = loop(lambda dy: torch.autograd.grad(y, leaves, dy, retain_graph=True), upstream)
    for got, expected in zip(at_once, one_by_one, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_no_warning():
    """torch prints its warning of a missing rule past Python's, once a process and operator."""
    code = """
import os
import torch
from gla_ext import GatedLinearAttention
from gla_ext.model import GLAMLP
from gla_ext.layers.swiglu import swiglu_linear

os.dup2(1, 2)
x = torch.randn(2, 1, 5, 24)
options = {"hidden_size": 24, "num_heads": 2, "use_short_conv": True, "conv_bias": True}
for mode in ("chunk", "fused_recurrent"):
    layer = GatedLinearAttention(mode, **options)
    mapped = torch.vmap(lambda x: layer(x)[0])(x)
    mapped.sum().backward()
    y = GLAMLP(24, 8)(layer(x[0])[0])
    ones = torch.ones(3, *y.shape)
    torch.autograd.grad(y, list(layer.parameters()), ones, is_grads_batched=True)
print("done")
"""
    printed = run_python(code)
    assert printed.endswith("done\n") and "batching rule" not in printed
