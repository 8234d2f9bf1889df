"""`fuse_projections`: one product in inference for weights that are neighbours in memory."""

import copy

import pytest
import torch
from common import assert_close
from models import MODEL_EVERY, make_ids, make_layer, make_model, make_x
from test_projections import products
from torch import nn

from gla_ext.model import GLAForCausalLM, fuse_projections

APART = [(24, 4), (4, 12), (24, 12), (24, 12), (24, 24), (24, 24), (24, 24)]
FUSED = [(24, 76), (4, 12), (24, 24)]  # with the first of the gate's two, and the output's

with_options = pytest.mark.parametrize("options", [{}, MODEL_EVERY], ids=["default", "all"])


def inferred(module, x):
    with torch.no_grad():
        return module(x)[0]


@pytest.mark.parametrize(
    "options, fused",
    [
        ({}, FUSED),
        ({"use_output_gate": False}, [(24, 52), (4, 12), (24, 24)]),
        ({"num_heads": 4, "num_kv_heads": 2}, [(24, 58), (4, 6), (24, 24)]),
    ],
    ids=str,
)
def test_a_layer_takes_one_product(options, fused):
    layer, x = make_layer(**options), make_x()
    expected = inferred(layer, x)
    assert fuse_projections(layer) is layer
    assert products(lambda: inferred(layer, x)) == sorted(fused)
    assert_close(inferred(layer, x), expected, 1e-12)
    assert_close(inferred(layer.eval(), x), expected, 1e-12)


def test_long_prompts_take_the_products_apart():
    layer, few, many = fuse_projections(make_layer().eval()), make_x(4, 64), make_x(1, 257)
    assert products(lambda: inferred(layer, few)) == sorted(FUSED)
    assert products(lambda: inferred(layer, many)) == sorted(APART)


@with_options
def test_a_model_generates_the_same(options):
    model = make_model(torch.float64, **options)
    ids = make_ids(T=10)
    expected, count = model.generate(ids, 12, temperature=0), len(products(lambda: model(ids)))
    fuse_projections(model)
    assert torch.equal(model.generate(ids, 12, temperature=0), expected)
    with torch.no_grad():
        fused = len(products(lambda: model(ids)))
    saved = 4 + 1  # of a layer with an output gate, and of an MLP
    assert fused == count - saved * model.config.num_hidden_layers


def test_parameters_are_the_same_ones_and_follow_changes():
    layer, x = make_layer(), make_x()
    before = dict(layer.named_parameters())
    values = copy.deepcopy(layer.state_dict())
    fuse_projections(layer)
    after = dict(layer.named_parameters())
    assert list(before) == list(after) and all(before[name] is after[name] for name in before)
    assert all(torch.equal(values[name], t) for name, t in layer.state_dict().items())
    other = make_layer(seed=3)
    layer.load_state_dict(other.state_dict())
    assert_close(inferred(layer, x), inferred(other, x), 1e-12)
    assert products(lambda: inferred(layer, x)) == sorted(FUSED)


def test_gradients_and_training_are_as_before():
    layer, x = make_layer(), make_x()
    fused = fuse_projections(copy.deepcopy(layer))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (layer, fused)]
    for _ in range(2):
        for each, optimizer in zip((layer, fused), optimizers, strict=True):
            optimizer.zero_grad()
            each(x)[0].square().sum().backward()
            optimizer.step()
    for (name, expected), parameter in zip(
        layer.named_parameters(), fused.parameters(), strict=True
    ):
        assert_close(parameter.grad, expected.grad, 1e-12, name=name)
        assert_close(parameter, expected, 1e-12, name=name)


def test_moved_weights_are_apart_again():
    layer, x = fuse_projections(make_layer().eval()), make_x()
    assert products(lambda: inferred(layer.float(), x.float())) == sorted(APART)
    assert products(lambda: inferred(fuse_projections(layer), x.float())) == sorted(FUSED)
    layer.v_proj.weight = nn.Parameter(layer.v_proj.weight.detach().clone())
    assert products(lambda: inferred(layer, x.float())) == sorted(APART)
    copied = copy.deepcopy(fuse_projections(layer))
    assert products(lambda: inferred(copied, x.float())) == sorted(APART)


def test_nothing_is_kept_twice():
    model = make_model(torch.float64)

    def storages():
        kept = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
        return sum(storage.nbytes() for storage in kept.values())

    before = storages()
    fuse_projections(model)
    assert storages() == before


def test_a_fused_model_is_saved(tmp_path):
    model, ids = fuse_projections(make_model(torch.float32)), make_ids()
    model.save_pretrained(tmp_path)
    loaded = GLAForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert_close(loaded(ids).logits, model(ids).logits, 1e-5)


@pytest.mark.parametrize("name", ["q_proj", "gk_proj", "gk_proj.0"])
def test_modules_with_hooks_are_called(name):
    layer, x = fuse_projections(make_layer()), make_x()
    seen = []
    layer.get_submodule(name).register_forward_hook(lambda *args: seen.append(name))
    inferred(layer, x)
    assert seen == [name]


def test_modules_that_took_a_place_are_called():
    class Twice(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    layer, x = make_layer(), make_x()
    twice = Twice(24, 12, bias=False).double()
    twice.weight = layer.q_proj.weight
    layer.q_proj = twice
    expected = inferred(layer, x)
    assert torch.equal(inferred(fuse_projections(layer), x), expected)
    layer = make_layer()
    layer.gk_proj = nn.Linear(24, 12).double()
    expected = inferred(layer, x)
    assert_close(inferred(fuse_projections(layer), x), expected, 1e-12)
    assert products(lambda: inferred(layer, x)) == sorted([(24, 72), (24, 12), (24, 24)])


def test_one_weight_in_two_places_stays():
    layer, x = make_layer(), make_x()
    layer.k_proj.weight = layer.q_proj.weight
    expected = inferred(layer, x)
    assert torch.equal(inferred(fuse_projections(layer), x), expected)
    assert layer.k_proj.weight is layer.q_proj.weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype):
    layer, x = make_layer().float(), make_x().float()
    with torch.autocast("cpu", dtype):
        expected = inferred(layer, x)
        actual = inferred(fuse_projections(layer), x)
    assert_close(actual.float(), expected.float(), 1e-2)


def test_compiled_whole():
    layer, x = fuse_projections(make_layer()), make_x()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert_close(inferred(compiled, x), inferred(layer, x), 1e-12)
    exported = torch.export.export(layer, (x,)).module()
    assert_close(inferred(exported, x), inferred(layer, x), 1e-12)
