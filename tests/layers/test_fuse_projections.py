"""`fuse_projections`: one product in inference for weights that are neighbours in memory.

Equal bits (see common.py): tokens, and the same calls where nothing is fused.
"""

import copy
import itertools

import pytest
import torch
from common import assert_close
from models import MODEL_EVERY, make_ids, make_layer, make_model, make_x, products
from torch import Tensor, nn
from torch.autograd import forward_ad

from gla_ext import batch_invariant
from gla_ext.model import GLAMLP, GLAForCausalLM, fuse_projections

APART = [(24, 4), (24, 12), (24, 12), (24, 24), (24, 24), (24, 24)]
FUSED = [(24, 76), (24, 24)]  # with the first of the gate's two, and the output's

both = pytest.mark.parametrize("fused", [False, True])
with_options = pytest.mark.parametrize("options", [{}, MODEL_EVERY], ids=["default", "all"])


def inferred(module, x):
    with torch.no_grad():
        return module(x)[0]


@pytest.mark.parametrize(
    "options, fused",
    [
        ({}, FUSED),
        ({"use_output_gate": False}, [(24, 52), (24, 24)]),
        ({"num_heads": 4, "num_kv_heads": 2}, [(24, 58), (24, 24)]),
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


def test_long_prompts_and_invariant_batches_take_the_products_apart():
    layer, few, many = fuse_projections(make_layer().eval()), make_x(4, 64), make_x(1, 257)
    assert products(lambda: inferred(layer, few)) == sorted(FUSED)
    assert products(lambda: inferred(layer, many)) == sorted(APART)
    with batch_invariant():
        assert products(lambda: inferred(layer, few)) == sorted(APART)


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


def test_nothing_is_kept_twice_nor_moved_again():
    model = make_model(torch.float64)

    def storages():
        kept = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
        return sum(storage.nbytes() for storage in kept.values())

    before = storages()
    fuse_projections(model)
    assert storages() == before
    addresses = [p.data_ptr() for p in model.parameters()]
    fuse_projections(model)
    assert addresses == [p.data_ptr() for p in model.parameters()]


def test_a_fused_model_is_saved(tmp_path):
    model, ids = fuse_projections(make_model(torch.float32)), make_ids()
    model.save_pretrained(tmp_path)
    loaded = GLAForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert_close(loaded(ids).logits, model(ids).logits, 1e-5)


def test_save_model_of_safetensors_takes_a_copy(tmp_path):
    """It refuses, by name, weights that are parts of one storage, and takes a copy's."""
    safetensors = pytest.importorskip("safetensors.torch")
    model = fuse_projections(make_model(torch.float32))
    with pytest.raises(RuntimeError, match=r"saving amongst: \{'model\.layers\.0\."):
        safetensors.save_model(model, tmp_path / "x")
    safetensors.save_model(copy.deepcopy(model), tmp_path / "x")
    loaded = make_model(torch.float32, seed=1)
    safetensors.load_model(loaded, tmp_path / "x")
    assert all(map(torch.equal, loaded.parameters(), model.parameters()))


@pytest.mark.parametrize("name", ["q_proj", "gk_proj", "gk_proj.0"])
def test_modules_with_hooks_are_called(name):
    layer, x = fuse_projections(make_layer()), make_x()
    seen = []
    layer.get_submodule(name).register_forward_hook(lambda *args: seen.append(name))
    inferred(layer, x)
    assert seen == [name]


def test_a_gate_of_one_map():
    layer, x = make_layer(), make_x()
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
    layer, x = make_layer().float().eval(), make_x().float()
    with torch.autocast("cpu", dtype):
        expected = inferred(layer, x)
        actual = inferred(fuse_projections(layer), x)
        # What autocast has cast and kept is not cast again.
        assert products(lambda: inferred(layer, x)) == sorted(APART)
    assert_close(actual.float(), expected.float(), 1e-2)
    with torch.autocast("cpu", dtype, cache_enabled=False):
        assert products(lambda: inferred(layer, x)) == sorted(FUSED)
        assert_close(inferred(layer, x).float(), expected.float(), 1e-2)


def test_weights_of_one_memory_stay():
    layer = make_layer()
    layer.k_proj.weight.data = layer.q_proj.weight.data
    fuse_projections(layer)
    with torch.no_grad():
        layer.q_proj.weight.add_(1)
    assert torch.equal(layer.k_proj.weight, layer.q_proj.weight)


@pytest.mark.parametrize("made", [False, True])
@both
def test_inference_mode(made, fused):
    with torch.inference_mode(made):
        layer = make_layer()
    with torch.inference_mode(fused):
        fuse_projections(layer)
    x = make_x().requires_grad_()
    assert products(lambda: inferred(layer, x)) == sorted(FUSED)
    with torch.inference_mode():
        assert_close(layer(x)[0], inferred(layer, x), 1e-12)
    if not made:
        layer(x)[0].sum().backward()
        assert layer.q_proj.weight.grad is not None


def make_mlp(fused):
    torch.manual_seed(0)
    mlp = GLAMLP(8, 16).double()
    return (fuse_projections(mlp) if fused else mlp), torch.ones(2, 8, dtype=torch.float64)


@both
def test_transforms_of_functions_without_gradients(fused):
    mlp, x = make_mlp(fused)
    weights = {name: p.detach() for name, p in mlp.named_parameters()}
    tangents = {name: w.cos() for name, w in weights.items()}

    def call(weights):
        return torch.func.functional_call(mlp, weights, (x,))

    def dual():
        with forward_ad.dual_level():
            duals = {name: forward_ad.make_dual(w, tangents[name]) for name, w in weights.items()}
            return forward_ad.unpack_dual(call(duals)).tangent.clone()

    expected = torch.func.jvp(call, (weights,), (tangents,))[1]
    with torch.no_grad():
        assert_close(torch.func.jvp(call, (weights,), (tangents,))[1], expected, 1e-12)
        assert_close(dual(), expected, 1e-12)
        stacked = {name: torch.stack([w, 2 * w]) for name, w in weights.items()}
        assert_close(torch.vmap(call)(stacked)[0], mlp(x), 1e-12)


@both
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_weights_of_other_kinds(fused):
    mlp, x = make_mlp(fused)
    with torch.no_grad():
        expected = mlp(x)
        for kind, name in itertools.product(
            (Tensor.to_sparse, Tensor.to_sparse_csr), ("gate_proj", "down_proj")
        ):
            sparse = copy.deepcopy(mlp)
            linear = sparse.get_submodule(name)
            linear.weight = nn.Parameter(kind(linear.weight.detach()), requires_grad=False)
            assert_close(fuse_projections(sparse)(x), expected, 1e-12)
        lazy = copy.deepcopy(mlp)
        lazy.gate_proj = nn.LazyLinear(16, bias=False).double()
        assert fuse_projections(lazy)(x).shape == x.shape
        assert fuse_projections(mlp.to("meta"))(x.to("meta")).shape == x.shape


def test_compiled_whole():
    layer, x = fuse_projections(make_layer()), make_x()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert_close(inferred(compiled, x), inferred(layer, x), 1e-12)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            exported = torch.export.export(layer, (x,)).module()
        assert_close(inferred(exported, x), inferred(layer, x), 1e-12)
