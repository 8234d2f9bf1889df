"""Sharded layers and models: outputs, gradients, loss, generation and caches of one process.

Equal bits (see common.py): tokens; weights are moved.
"""

import pytest
import torch
from common import assert_close
from models import EVERY, make_ids, make_layer, make_model, make_x
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from gla_ext import MultiheadGLA
from gla_ext.cache import GLACache
from gla_ext.cache._key_values import tensors_in
from gla_ext.distributed import tensor_parallel_plan
from gla_ext.distributed.tensor_parallel import HeadsParallel
from gla_ext.layers.attention import Attention
from gla_ext.model.blocks import GLAMLP


def sharded(group, module, **options):
    mesh = DeviceMesh.from_group(group, "cpu")
    return parallelize_module(module, mesh, tensor_parallel_plan(module, **options))


def gradients(module):
    """Of parameters that the model reads: the first block has nothing to mix residuals of."""
    parameters = module.named_parameters()
    return {name: p.grad.full_tensor() for name, p in parameters if p.grad is not None}


LAYERS = {
    "plain": {"num_heads": 4, "hidden_size": 24},
    "every option": EVERY | {"hidden_size": 24},
    "unfused norm": {"num_heads": 4, "hidden_size": 24, "fuse_norm": False},
    "no output gate": {"num_heads": 4, "hidden_size": 24, "use_output_gate": False},
    "recurrent": {"num_heads": 4, "hidden_size": 24, "mode": "fused_recurrent"},
}


def masked_and_packed(module, x):
    mask = torch.ones(x.shape[:2], dtype=torch.long)
    mask[1, 40:] = 0
    with torch.no_grad():
        packed = module.eval()(x[:1], cu_seqlens=torch.tensor([0, 5, 70]))[0]
        return module(x, mask)[0], packed


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
    return o.detach(), x.grad, gradients(module), masked_and_packed(module, x)


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_layer(pool, options):
    layer, x = make_layer(**options), make_x().requires_grad_()
    o = layer(x)[0]
    o.square().sum().backward()
    others = masked_and_packed(layer, x)
    for found, dx, grads, of_others in pool(run_layer, options, ranks=2):
        for one, expected in zip((found, *of_others), (o, *others), strict=True):
            assert_close(one, expected, 1e-12)
        assert_close(dx, x.grad, 1e-12)
        for name, parameter in layer.named_parameters():
            assert_close(grads[name], parameter.grad, 1e-11, name=name)


ATTENTION = {"heads": {}, "shared": {"num_kv_heads": 2, "qkv_bias": True, "window_size": 9}}


def attention_results(module, offsets):
    """Of rows, of packed sequences, and what is kept of them and read by further tokens."""
    x, cache = make_x().requires_grad_(), GLACache()
    o = module(x)[0]
    packed = module(x[:1], cu_seqlens=offsets)[0]
    (o.square().sum() + packed.square().sum()).backward()
    with torch.no_grad():
        module(x, past_key_values=cache, use_cache=True)
        more = [module(x[:, :n], past_key_values=cache, use_cache=True)[0] for n in (3, 1)]
    return [t.detach() for t in (o, packed, x.grad, *more)], cache[0]["attn_state"].keys


def make_attention(options):
    torch.manual_seed(0)
    return Attention(24, 4, layer_idx=0, **options).double()


def run_attention(group, options, offsets):
    module = sharded(group, make_attention(options))
    return *attention_results(module, offsets), gradients(module)


@pytest.mark.parametrize("options", ATTENTION.values(), ids=ATTENTION)
def test_attention(pool, options):
    offsets = torch.tensor([0, 30, 70], dtype=torch.int32)
    module = make_attention(options)
    expected, keys = attention_results(module, offsets)
    answers = pool(run_attention, options, offsets, ranks=2)
    for found, _, grads in answers:
        for mine, theirs in zip(found, expected, strict=True):
            assert_close(mine, theirs, 1e-12)
        for name, parameter in module.named_parameters():
            assert_close(grads[name], parameter.grad, 1e-11, name=name)
    assert_close(torch.cat([kept for _, kept, _ in answers], 2), keys, 1e-12)


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


HYBRID = {"num_hidden_layers": 3, "attn": {"layers": [1], "num_heads": 4, "num_kv_heads": 2}}
RESIDUALS = {"attnres_block_size": 2, "num_hidden_layers": 3}
LINEAR = {"fuse_linear_cross_entropy": True, "fuse_cross_entropy": False}
MODELS = {
    "plain": ({}, False, False),
    "tied": ({"tie_word_embeddings": True}, False, False),
    "loss parallel": ({"use_short_conv": True}, True, False),
    "checkpointing": ({}, True, True),
    "hybrid": (HYBRID, False, True),
    "attention residuals": (RESIDUALS, True, False),
    "l2 warp": ({"use_l2warp": True}, True, False),
    "linear loss": (LINEAR, False, False),
}


@pytest.mark.parametrize("case", MODELS.values(), ids=MODELS)
def test_language_model(pool, case):
    model, ids = make_model(torch.float64, **case[0]).train(), make_ids()
    expected = model(ids, labels=ids).loss
    expected.backward()
    for loss, grads in pool(run_model, *case, ranks=2):
        assert loss == pytest.approx(expected.item(), rel=1e-12)
        trained = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert grads.keys() == trained.keys()
        for name, gradient in trained.items():
            assert_close(grads[name], gradient, 1e-11, name=name)


def generated(model):
    """Tokens after whole prompts and after padded ones, in one static cache, and a cache."""
    ids, cache = make_ids(), GLACache()
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    tokens = model.generate(ids, 8, temperature=0)
    after_padding = model.generate(ids, 8, temperature=0, attention_mask=mask)
    model(ids, past_key_values=cache, use_cache=True)
    kept = [state for entry in cache.states for state in tensors_in(entry)]
    return tokens, after_padding, [t for t in kept if t.ndim == 4]


def run_generation(group, options):
    model = make_model(torch.float64, num_heads=4, **options).eval()
    return generated(sharded(group, model, loss_parallel=True))


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, HYBRID, RESIDUALS], ids=["GLA", "hybrid", "residuals"])
def test_generation_and_caches_of_local_heads(pool, options):
    model = make_model(torch.float64, num_heads=4, **options)
    *expected, kept = generated(model)
    found = pool(run_generation, options, ranks=2)
    for *tokens, _ in found:
        assert all(map(torch.equal, tokens, expected))
    for states in zip(kept, *(states for *_, states in found), strict=True):
        whole, *parts = states
        heads = next(i for i in (1, 2) if parts[0].shape[i] * 2 == whole.shape[i])
        assert_close(torch.cat(parts, heads), whole, 1e-12)


def make_hf_model():
    import gla_ext.hf

    torch.manual_seed(0)
    options = {"hidden_size": 16, "num_heads": 4, "vocab_size": 31, "intermediate_size": 24}
    options |= {"eos_token_id": None, "initializer_range": 0.3} | HYBRID
    return gla_ext.hf.GLAForCausalLM(gla_ext.hf.GLAConfig(**options)).double().eval()


def hf_results(model):
    ids = make_ids(T=12)
    tokens = model.generate(ids, max_new_tokens=6, do_sample=False)
    loss = model.train()(ids, labels=ids).loss
    loss.backward()
    return tokens, loss.item()


def run_hf_model(group):
    model = sharded(group, make_hf_model(), loss_parallel=True)
    return *hf_results(model), gradients(model)


def test_a_hybrid_model_of_transformers(pool):
    model = make_hf_model()
    tokens, loss = hf_results(model)
    for found, its_loss, grads in pool(run_hf_model, ranks=2):
        assert torch.equal(found, tokens)
        assert its_loss == pytest.approx(loss, rel=1e-12)
        for name, parameter in model.named_parameters():
            assert_close(grads[name], parameter.grad, 1e-11, name=name)


UNEVEN = {
    "num_heads to be a multiple of the mesh's size 4, got 3": lambda: make_layer(num_heads=3),
    "num_kv_heads to be a multiple of the mesh's size 4, got 2": lambda: Attention(24, 4, 2),
    "intermediate_size to be a multiple of the mesh's size 4, got 30": lambda: GLAMLP(24, 30),
}


def run_uneven(group):
    for sentence, make in UNEVEN.items():
        with pytest.raises(ValueError, match=sentence):
            sharded(group, make())


def test_sizes_that_the_ranks_do_not_divide(pool):
    pool(run_uneven)


def test_what_is_refused(one_rank):
    with pytest.raises(TypeError, match="expected a layer or a language model of gla_ext, got"):
        tensor_parallel_plan(torch.nn.Linear(2, 2))


def lora(model, **options):
    peft = pytest.importorskip("peft")
    config = {"r": 2, "target_modules": ["up_proj"], "init_lora_weights": False} | options
    return peft.get_peft_model(model, peft.LoraConfig(**config)).get_base_model()


def with_bias(name):
    def change(model):
        part = model.get_submodule(name)
        part.register_parameter("bias", torch.nn.Parameter(torch.ones(part.out_features)))
        return model

    return change


def in_its_place(name, make):
    def change(model):
        model.set_submodule(name, make(model.get_submodule(name)))
        return model

    return change


def quantized(model):
    torchao = pytest.importorskip("torchao.quantization")
    only = lambda module, name: name.endswith("1.attn.o_proj")  # noqa: E731
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig(), filter_fn=only)
    return model


def normed(name):
    def change(model):
        torch.nn.utils.parametrizations.weight_norm(model.get_submodule(name))
        return model

    return change


def patched(model):
    model.model.layers[0].mlp.up_proj.forward = lambda x: x
    return model


class Wider(GLAMLP):
    """One with a forward of its own."""


CHANGED = {
    "LoRA of an MLP": (lora, r"model\.layers\.0\.mlp\.up_proj to be Linear.*got .*peft"),
    "LoRA everywhere": (
        lambda model: lora(model, target_modules="all-linear"),
        r"model\.layers\.0\.attn\.q_proj to be Linear.*got .*peft",
    ),
    "LoRA on a parameter": (
        lambda model: lora(model, target_modules=[], target_parameters=["q_conv1d.weight"]),
        r"layers\.0\.attn\.q_conv1d to be ShortConvolution.*got .*ParamWrapper",
    ),
    "a head trained whole": (
        lambda model: lora(model, modules_to_save=["lm_head"], target_modules=["gk_proj.0"]),
        r"(gk_proj\.0 to be Linear|lm_head to be Embedding or Linear), .*got .*peft",
    ),
    "a quantized weight": (quantized, r"1\.attn\.o_proj to have plain weights.*got weight of"),
    "a parametrization": (normed("model.layers.1.mlp.down_proj"), r"mlp\.down_proj to be Linear"),
    "a bias of the head": (with_bias("lm_head"), "lm_head to have plain weights.*got bias"),
    "a bias of o_proj": (with_bias("model.layers.0.attn.o_proj"), r"0\.attn\.o_proj .*got bias"),
    "a norm of torch": (
        in_its_place("model.norm", lambda norm: torch.nn.RMSNorm(24)),
        r"model\.norm to be RMSNorm or ResidualQuery, .*got .*torch\.nn",
    ),
    "another MLP": (
        in_its_place("model.layers.1.mlp", lambda mlp: Wider(24, 32)),
        r"layers\.1\.mlp to be GLAMLP, .*got .*Wider",
    ),
    "two maps in one's place": (
        in_its_place("model.layers.0.attn.v_proj", lambda v: torch.nn.Sequential(v)),
        r"attn\.v_proj to be Linear, .*got .*Sequential",
    ),
    "a forward of an instance": (patched, r"0\.mlp\.up_proj to be Linear"),
}


@pytest.mark.parametrize("case", CHANGED.values(), ids=CHANGED)
def test_what_is_not_as_it_was_built_is_refused_by_name(case):
    change, sentence = case
    model = change(make_model(use_short_conv=True, num_hidden_layers=2))
    parameters = dict(model.named_parameters())
    with pytest.raises(TypeError, match=sentence):
        tensor_parallel_plan(model)
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name]


def test_a_style_alone_refuses_too(one_rank):
    mesh = one_rank
    plan = tensor_parallel_plan(make_model())
    model = lora(make_model(), target_modules=["lm_head"])
    with pytest.raises(TypeError, match="VocabularyParallel: expected the module to be Embedding"):
        parallelize_module(model, mesh, {"lm_head": plan["lm_head"]})
    assert type(model.model.embeddings.weight) is torch.nn.Parameter
    layer = make_layer()
    layer.q_proj = torch.nn.Identity()
    with pytest.raises(TypeError, match="HeadsParallel: expected q_proj to be Linear"):
        parallelize_module(layer, mesh, HeadsParallel())


def test_sharded_twice_is_refused(one_rank):
    mesh = one_rank
    model = make_model()
    model = parallelize_module(model, mesh, tensor_parallel_plan(model))
    with pytest.raises(TypeError, match=r"model\.embeddings to be Embedding or Linear"):
        tensor_parallel_plan(model)
