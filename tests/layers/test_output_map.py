"""The layer's norm and output map: what training keeps, and what the modules may be.

Equal bits (see common.py): the same calls, made again by a checkpoint.
"""

import pytest
import torch
from common import assert_close
from models import make_layer, make_x
from norm_inputs import MadeAgain
from swiglu_inputs import kept
from torch import nn
from torch.utils.checkpoint import checkpoint


def gradients(layer, x, call=None):
    """The output and its gradients, and whether backward has made the norm again."""
    leaves = [x.requires_grad_(), *(p for p in layer.parameters() if p.requires_grad)]
    leaves = [t for t in leaves if t.layout == torch.strided]
    with MadeAgain() as made:
        y = layer(x)[0] if call is None else call(x)
        found = torch.autograd.grad(y.float().sin().sum(), leaves)
    return [y, *found], any(made.again)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_training_gives_what_evaluation_does(device, dtype):
    """In evaluation mode the norm and o_proj are called one after the other."""
    layer, x = make_layer(dtype).to(device), make_x(dtype=dtype).to(device)
    trained, again = gradients(layer, x)
    assert again == (device == "cpu" or dtype != torch.float64)
    expected, again = gradients(layer.eval(), x)
    assert not again
    for got, wanted in zip(trained, expected, strict=True):
        assert_close(got, wanted, {torch.float64: 1e-13, torch.float32: 1e-5}.get(dtype, 0.03))


def test_training_keeps_one_tensor_less():
    layer, x = make_layer(torch.float32), make_x(dtype=torch.float32)
    width = layer.value_dim

    def wide():
        _, saved = kept(lambda: layer(x)[0])
        return sum(t.numel() == x.shape[0] * x.shape[1] * width for t in saved.values())

    in_training = wide()
    layer.eval()
    assert in_training == wide() - 1


@pytest.mark.parametrize("options", [{"elementwise_affine": False}, {"gate_fn": "sigmoid"}, {}])
def test_options(options):
    layer, x = make_layer(torch.float64, **options), make_x()
    trained, again = gradients(layer, x)
    assert again
    for got, wanted in zip(trained, gradients(layer.eval(), x)[0], strict=True):
        assert_close(got, wanted, 1e-13)


@pytest.mark.parametrize("options", [{"fuse_norm": False}, {"use_output_gate": False}])
def test_options_without_a_gate_in_the_norm(options):
    assert not gradients(make_layer(torch.float64, **options), make_x())[1]


def a_bias(layer):
    layer.o_proj.bias = nn.Parameter(torch.ones(24, dtype=torch.float64))


def another_map(layer):
    layer.o_proj = nn.Sequential(layer.o_proj, nn.Identity())


def a_sparse_map(layer):
    layer.o_proj.weight = nn.Parameter(2 * layer.o_proj.weight.detach().to_sparse_csr())


def a_hook_of_the_map(layer):
    layer.o_proj.register_forward_hook(lambda module, args, y: 2 * y)


def a_hook_of_the_norm(layer):
    layer.norm.register_forward_hook(lambda module, args, y: 2 * y)


def another_norm(layer):
    layer.norm.forward = lambda o, gate: o * gate * layer.norm.weight


@pytest.mark.parametrize(
    "change",
    [a_bias, another_map, a_sparse_map, a_hook_of_the_map, a_hook_of_the_norm, another_norm],
)
def test_modules_that_are_not_as_they_were_made_are_called(change):
    layer, x = make_layer(torch.float64), make_x()
    before = layer(x)[0]
    change(layer)
    trained, again = gradients(layer, x)
    assert not again
    assert change is another_map or not torch.allclose(trained[0], before)
    for got, wanted in zip(trained, gradients(layer.eval(), x)[0], strict=True):
        assert_close(got, wanted, 1e-13)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
def test_autocast(device, weights):
    """The weight of the map is cast; the gradients come in the weights' dtype."""
    layer, x = make_layer(weights).to(device), make_x(dtype=torch.float32).to(device)

    def call(x):
        with torch.autocast(device, torch.bfloat16):
            return layer(x)[0]

    trained, again = gradients(layer, x, call)
    assert again
    expected, _ = gradients(layer.eval(), x, call)
    for got, wanted in zip(trained, expected, strict=True):
        assert got.dtype == wanted.dtype
        assert_close(got, wanted, 0.03)


def test_checkpointing():
    layer, x = make_layer(torch.float64), make_x()
    expected, _ = gradients(layer, x)
    found, again = gradients(
        layer, x, lambda x: checkpoint(lambda x: layer(x)[0], x, use_reentrant=False)
    )
    assert again
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_frozen_map():
    layer, x = make_layer(torch.float64), make_x()
    layer.o_proj.weight.requires_grad_(False)
    trained, again = gradients(layer, x)
    assert not again  # nothing asks for it
    for got, wanted in zip(trained, gradients(layer.eval(), x)[0], strict=True):
        assert_close(got, wanted, 1e-13)


class OutputAlone(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


def test_a_traced_layer():
    layer, x = OutputAlone(make_layer(torch.float32)), make_x(dtype=torch.float32)
    traced = torch.jit.trace(layer, x)  # which checks the trace without gradients
    assert "gla_ext::norm_gate_linear" in str(traced.inlined_graph)
    assert_close(traced(x), layer(x), 1e-6)


@pytest.mark.parametrize("of", ["cpu", "meta"])
@pytest.mark.parametrize("autocast", [False, True])
def test_compiled_whole(of, autocast):
    layer, x = make_layer(torch.float32).to(of), make_x(dtype=torch.float32).to(of)

    def call(x):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return layer(x)[0]

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(x)
    assert compiled.shape == x.shape
    if of == "cpu":
        assert_close(compiled, call(x), 0.02 if autocast else 1e-5)
