"""Sharded layers and models: outputs, gradients, loss, generation and caches of one process."""

import pytest
import torch
from common import assert_close
from models import EVERY, make_ids, make_layer, make_model, make_x
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from gla_ext import MultiheadGLA
from gla_ext.cache import GLACache
from gla_ext.distributed import tensor_parallel_plan


def sharded(group, module, **options):
    mesh = DeviceMesh.from_group(group, "cpu")
    return parallelize_module(module, mesh, tensor_parallel_plan(module, **options))


def gradients(module):
    return {name: p.grad.full_tensor() for name, p in module.named_parameters()}


LAYERS = {
    "plain": {"num_heads": 4, "hidden_size": 24},
    "every option": EVERY | {"hidden_size": 24},
    "unfused norm": {"num_heads": 4, "hidden_size": 24, "fuse_norm": False},
}


def run_layer(group, options):
    layer, x = make_layer(**options), make_x().requires_grad_()
    names = [name for name, _ in layer.named_parameters()]
    whole = {name: p.detach().clone() for name, p in layer.named_parameters()}
    module = sharded(group, layer)
    o = module(x)[0]
    o.square().sum().backward()
    assert [name for name, _ in module.named_parameters()] == names
    for name, p in module.named_parameters():
        assert torch.equal(p.full_tensor(), whole[name]), name
    return o.detach(), x.grad, gradients(module)


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_layer(pool, options):
    layer, x = make_layer(**options), make_x().requires_grad_()
    o = layer(x)[0]
    o.square().sum().backward()
    for found, dx, grads in pool(run_layer, options, ranks=2):
        assert_close(found, o, 1e-12)
        assert_close(dx, x.grad, 1e-12)
        for name, parameter in layer.named_parameters():
            assert_close(grads[name], parameter.grad, 1e-11, name=name)


def make_multihead():
    torch.manual_seed(0)
    module = MultiheadGLA(32, 4, batch_first=True, dtype=torch.float64)
    torch.nn.init.normal_(module.bias)
    return module


def run_multihead(group):
    module, x = sharded(group, make_multihead()), torch.cat([make_x(), make_x()], -1)[..., :32]
    out = module(x, x, x, is_causal=True)[0]
    out.square().sum().backward()
    return out.detach(), gradients(module)


def test_multihead(pool):
    module, x = make_multihead(), torch.cat([make_x(), make_x()], -1)[..., :32]
    out = module(x, x, x, is_causal=True)[0]
    out.square().sum().backward()
    for found, grads in pool(run_multihead, ranks=4):
        assert_close(found, out, 1e-12)
        for name, parameter in module.named_parameters():
            assert_close(grads[name], parameter.grad, 1e-11, name=name)


def run_model(group, options, loss_parallel, checkpointing):
    model = make_model(torch.float64, **options).train()
    model.model.gradient_checkpointing = checkpointing
    model = sharded(group, model, loss_parallel=loss_parallel)
    ids = make_ids()
    loss = model(ids, labels=ids).loss
    loss.backward()
    loss = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
    return loss.item(), gradients(model)


MODELS = {
    "plain": ({}, False, False),
    "tied": ({"tie_word_embeddings": True}, False, False),
    "loss parallel": ({"use_short_conv": True}, True, False),
    "checkpointing": ({}, True, True),
}


@pytest.mark.parametrize("case", MODELS.values(), ids=MODELS)
def test_language_model(pool, case):
    model, ids = make_model(torch.float64, **case[0]).train(), make_ids()
    expected = model(ids, labels=ids).loss
    expected.backward()
    for loss, grads in pool(run_model, *case, ranks=2):
        assert loss == pytest.approx(expected.item(), rel=1e-12)
        for name, parameter in model.named_parameters():
            assert_close(grads[name], parameter.grad, 1e-11, name=name)


def run_generation(group):
    model = sharded(group, make_model(torch.float64, num_heads=4).eval(), loss_parallel=True)
    tokens = model.generate(make_ids(), 8, temperature=0)
    cache = GLACache()
    model(make_ids(), past_key_values=cache, use_cache=True)
    return tokens, cache[0]["recurrent_state"]


@torch.no_grad()
def test_generation_and_caches_of_local_heads(pool):
    model, cache = make_model(torch.float64, num_heads=4), GLACache()
    model(make_ids(), past_key_values=cache, use_cache=True)
    expected = model.generate(make_ids(), 8, temperature=0)
    found = pool(run_generation, ranks=2)
    for tokens, _ in found:
        assert torch.equal(tokens, expected)
    states = torch.cat([state for _, state in found], 1)
    assert_close(states, cache[0]["recurrent_state"], 1e-12)


def test_what_is_refused(one_rank):
    with pytest.raises(TypeError, match="expected a layer or a language model of gla_ext, got"):
        tensor_parallel_plan(torch.nn.Linear(2, 2))
