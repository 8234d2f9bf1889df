"""Sharded layers and models: outputs, gradients, loss, generation and caches of one process.

Equal bits (see common.py): tokens; weights are moved.
"""

import pytest
import torch
from common import assert_close
from models import EVERY, make_ids, make_layer, make_model, make_x
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.nn.functional import all_gather
from torch.distributed.tensor import DTensor
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
    parameters = module.named_parameters()
    return {name: p.grad.full_tensor() for name, p in parameters if p.grad is not None}


def layer(options, group):
    """Of rows, of rows of which one ends early, and of packed sequences."""
    module = made(group, make_layer(**{"num_heads": 4, "hidden_size": 24} | options))
    x, mask = make_x().requires_grad_(), torch.ones(2, 70, dtype=torch.long)
    o = module(x)[0]
    o.square().sum().backward()
    mask[1, 40:] = 0
    with torch.no_grad():
        packed = module.eval()(x[:1], cu_seqlens=torch.tensor([0, 5, 70]))[0]
        masked = module(x, mask)[0]
    return {"o": o.detach(), "dx": x.grad, "masked": masked, "packed": packed}, module


def attention(options, group):
    """Of rows, of packed sequences, and what is kept of them and read by further tokens."""
    torch.manual_seed(0)
    module = made(group, Attention(24, 4, layer_idx=0, **options).double())
    x, cache = make_x().requires_grad_(), GLACache()
    o = module(x)[0]
    packed = module(x[:1], cu_seqlens=torch.tensor([0, 30, 70], dtype=torch.int32))[0]
    (o.square().sum() + packed.square().sum()).backward()
    with torch.no_grad():
        module(x, past_key_values=cache, use_cache=True)
        more = [module(x[:, :n], past_key_values=cache, use_cache=True)[0] for n in (3, 1)]
    keys = cache[0]["attn_state"].keys
    if group is not None:  # those of a rank's own heads
        keys = torch.cat(all_gather(keys.contiguous(), group=group), 2)
    named = {"o": o, "packed": packed, "dx": x.grad, "three": more[0], "one": more[1]}
    return {name: t.detach() for name, t in named.items()} | {"keys": keys}, module


def multihead(options, group):
    torch.manual_seed(0)
    module = MultiheadGLA(32, 4, batch_first=True, dtype=torch.float64)
    torch.nn.init.normal_(module.bias)
    module = made(group, module)
    x = torch.cat([make_x(), make_x()], -1)[..., :32]
    out = module(x, x, x, is_causal=True)[0]
    out.square().sum().backward()
    return {"o": out.detach()}, module


def model(options, group, loss_parallel=False, checkpointing=False):
    module = make_model(torch.float64, **options).train()
    module.model.gradient_checkpointing = checkpointing
    return losses_of(made(group, module, loss_parallel=loss_parallel), make_ids())


def model_of_transformers(options, group):
    import gla_ext.hf

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_heads": 4, "vocab_size": 31, "intermediate_size": 24}
    config = gla_ext.hf.GLAConfig(**sizes, eos_token_id=None, initializer_range=0.3, **options)
    module = gla_ext.hf.GLAForCausalLM(config).double().eval()
    module = made(group, module, loss_parallel=True)
    tokens = module.generate(make_ids(T=12), max_new_tokens=6, do_sample=False)
    results, module = losses_of(module.train(), make_ids(T=12))
    return results | {"tokens": tokens}, module


def losses_of(module, ids):
    loss = module(ids, labels=ids).loss
    loss.backward()
    loss = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
    return {"loss": loss.detach()}, module


def made(group, module, **options):
    """The module, on ranks sharded, with its parameters' names and weights."""
    if group is None:
        return module
    weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    module = sharded(group, module, **options)
    assert [name for name, _ in module.named_parameters()] == list(weights)
    for name, p in module.named_parameters():
        whole = p.full_tensor() if isinstance(p, DTensor) else p
        assert torch.equal(whole, weights[name]), name
    return module


HYBRID = {"num_hidden_layers": 3, "attn": {"layers": [1], "num_heads": 4, "num_kv_heads": 2}}
LINEAR = {"fuse_linear_cross_entropy": True, "fuse_cross_entropy": False}
CASES = {
    "a layer": (layer, {}),
    "every option": (layer, EVERY),
    "unfused norm": (layer, {"fuse_norm": False}),
    "no output gate": (layer, {"use_output_gate": False}),
    "recurrent": (layer, {"mode": "fused_recurrent"}),
    "attention": (attention, {}),
    "attention of shared heads": (
        attention, {"num_kv_heads": 2, "qkv_bias": True, "window_size": 9}
    ),
    "MultiheadGLA": (multihead, {}),
    "a model": (model, {}),
    "tied": (model, {"tie_word_embeddings": True}),
    "loss parallel": (model, {"use_short_conv": True}, True),
    "checkpointing": (model, {}, True, True),
    "hybrid": (model, HYBRID, False, True),
    "linear loss": (model, LINEAR),
    "a hybrid of transformers": (model_of_transformers, HYBRID),
}  # fmt: skip


def run_case(group, name):
    function, options, *args = CASES[name]
    results, module = function(options, group, *args)
    return results, gradients(module)


@pytest.mark.parametrize("name", CASES)
def test_one_process_s_results(pool, name):
    function, options, *args = CASES[name]
    expected, module = function(options, None, *args)
    trained = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    for found, grads in pool(run_case, name, ranks=4 if function is multihead else 2):
        assert grads.keys() == trained.keys()
        for results, theirs, bound in ((found, expected, 1e-12), (grads, trained, 1e-11)):
            for n, value in theirs.items():
                assert_close(results[n], value, bound, name=n)


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
@pytest.mark.parametrize("options", [{}, HYBRID], ids=["GLA", "hybrid"])
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
    "a norm of torch": (
        in_its_place("model.norm", lambda norm: torch.nn.RMSNorm(24)),
        r"model\.norm to be RMSNorm, .*got .*torch\.nn",
    ),
    "another MLP": (
        in_its_place("model.layers.1.mlp", lambda mlp: Wider(24, 32)),
        r"layers\.1\.mlp to be GLAMLP, .*got .*Wider",
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


def test_what_cannot_be_planned(one_rank):
    with pytest.raises(TypeError, match="expected a layer or a language model of gla_ext, got"):
        tensor_parallel_plan(torch.nn.Linear(2, 2))
    model = make_model()
    model = parallelize_module(model, one_rank, tensor_parallel_plan(model))
    with pytest.raises(TypeError, match=r"model\.embeddings to be Embedding or Linear"):
        tensor_parallel_plan(model)  # sharded twice
