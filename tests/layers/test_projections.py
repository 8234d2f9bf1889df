"""The layer's projections: when they are one product, and when their modules are called."""

import pytest
import torch
import torch.nn.utils.parametrize
from common import assert_close
from models import SMALL, make_layer, make_x, products

GATE_AND_OUTPUT = [(24, 4), (24, 24)]


def test_projections_are_one_product_in_training():
    layer, x = make_layer(), make_x()
    apart = [(24, 12), (24, 12), (24, 24), (24, 24)]
    assert products(lambda: layer(x)) == [(24, 24), (24, 76)]  # with the first of the gate's two
    layer.eval()
    assert products(lambda: layer(x)) == sorted([*GATE_AND_OUTPUT, *apart])
    layer.train().batch_projections = False
    assert products(lambda: layer(x)) == sorted([*GATE_AND_OUTPUT, *apart])
    layer = make_layer(use_output_gate=False)
    assert products(lambda: layer(x)) == [(24, 24), (24, 52)]


@pytest.mark.parametrize("autocast", [False, True])
def test_no_product_of_the_gates_rank_alone(autocast):
    """Forward or backward: torch would split such a one over its long side."""
    rank, sides = SMALL["gate_low_rank_dim"], set()
    layer, x = make_layer(torch.float32), make_x(dtype=torch.float32).requires_grad_()

    def both():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = layer(x)[0]
        y.sum().backward()

    for side in (-2, -1):
        for shape in products(both, side):
            sides.update(shape)
    assert rank not in sides and {24, 76, 140} <= sides
    layer.gk_proj[0].register_forward_hook(lambda *_: None)  # whose modules are called
    assert rank in {n for shape in products(both) for n in shape}


@pytest.mark.parametrize("hook", ["register_forward_pre_hook", "register_full_backward_hook"])
def test_projections_with_hooks_are_called(hook):
    layer, x = make_layer(), make_x().requires_grad_()
    expected = layer(x)[0]
    seen = []
    getattr(layer.v_proj, hook)(lambda *args: seen.append(args[0]))
    y = layer(x)[0]
    y.sum().backward()
    assert seen == [layer.v_proj]
    assert_close(y, expected, 1e-12)


@pytest.mark.parametrize("of", ["both", "first", "second"])
@pytest.mark.parametrize("clamp_min", [None, -0.02])
def test_maps_of_the_gate_with_hooks_are_called(clamp_min, of):
    layer, x = make_layer(clamp_min=clamp_min), make_x().requires_grad_()
    leaves = [x, *layer.parameters()]
    expected = layer(x)[0]
    wanted = torch.autograd.grad(expected.sum(), leaves)
    seen, maps = [], layer.gk_proj
    module = {"both": maps, "first": maps[0], "second": maps[1]}[of]
    module.register_forward_hook(lambda *args: seen.append(args[0]))
    y = layer(x)[0]
    assert seen == [module]
    assert_close(y, expected, 1e-12)
    for got, want in zip(torch.autograd.grad(y.sum(), leaves), wanted, strict=True):
        assert_close(got, want, 1e-12)


def test_projections_of_several_dtypes_stay_apart():
    layer, x = make_layer().float(), make_x().float()
    layer.v_proj.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert len(products(lambda: layer(x))) == 6
