"""Adapters of peft on every kind of module, and quantized weights of torchao.

Equal bits (see common.py): tokens, and the same calls.
"""

import pytest
import torch
from common import assert_close
from models import make_ids

pytest.importorskip("transformers")

from hf_models import make_model
from transformers import AutoModelForCausalLM

from gla_ext import hf

HYBRID = {"attn": {"layers": [1], "num_heads": 2, "qkv_bias": True}, "use_short_conv": True}


@pytest.fixture
def peft():
    return pytest.importorskip("peft")


def trained(model):
    """Which parameters have a gradient, and not 0."""
    model.train()
    model(make_ids(), labels=make_ids()).loss.backward()
    model.eval()
    return {name for name, x in model.named_parameters() if x.grad is not None and x.grad.any()}


@pytest.mark.parametrize("name", ["q_conv1d", "k_conv1d", "v_conv1d"])
def test_lora_on_the_weight_of_a_convolution(peft, name):
    base = make_model(**HYBRID)
    before = base(make_ids()).logits
    config = peft.LoraConfig(
        r=2, target_modules=[], target_parameters=[f"{name}.weight"], init_lora_weights=False
    )
    tuned = peft.get_peft_model(base, config)
    assert all(f"{name}.lora_" in x for x in trained(tuned))
    assert len(trained(tuned)) == 2
    logits = tuned(make_ids()).logits
    assert not torch.allclose(logits, before, atol=1e-3)
    with tuned.disable_adapter():
        assert torch.equal(tuned(make_ids()).logits, before)
    assert_close(tuned.merge_and_unload()(make_ids()).logits, logits, 1e-5)


def test_lora_on_every_linear_map_of_a_hybrid(peft):
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    tuned = peft.get_peft_model(make_model(**HYBRID), config)
    layers = {name.split(".lora_")[0].split("layers.")[-1] for name in trained(tuned)}
    linears = [
        name
        for name, x in make_model(**HYBRID).model.layers.named_modules()
        if isinstance(x, torch.nn.Linear)
    ]
    assert layers == set(linears)
    logits = tuned(make_ids()).logits
    tokens = tuned.generate(input_ids=make_ids(), max_new_tokens=5, do_sample=False, pad_token_id=0)
    merged = tuned.merge_and_unload()
    assert_close(merged(make_ids()).logits, logits, 1e-5)
    again = merged.generate(make_ids(), max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert torch.equal(again, tokens)


KINDS = {
    "IA3Config": {"feedforward_modules": ["down_proj"]},
    "LoHaConfig": {},
    "OFTConfig": {"oft_block_size": 8},
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_adapters(peft, kind):
    """And a convolution that is trained whole."""
    options = {"target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"]} | KINDS[kind]
    options["modules_to_save"] = ["k_conv1d"]
    tuned = peft.get_peft_model(make_model(**HYBRID), getattr(peft, kind)(**options))
    names = trained(tuned)
    assert any("k_conv1d.modules_to_save" in name for name in names)
    assert any("q_proj" in name for name in names)


@pytest.mark.parametrize(
    ("kind", "bound"), [("Int8WeightOnlyConfig", 0.1), ("Float8WeightOnlyConfig", 0.35)]
)
@torch.no_grad()
def test_quantized_weights(kind, bound):
    """Each product with the weights that a quantized one stands for, so exactly the same logits as
    of a model that has these; and roughly the logits of the model before."""
    quantization = pytest.importorskip("torchao.quantization")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "initializer_range": 0.05}
    model, ids = make_model(**sizes, **HYBRID), make_ids()
    before = model(ids).logits
    quantization.quantize_(model, getattr(quantization, kind)())
    weight = model.model.layers[1].attn.q_proj.weight
    assert type(weight) is not torch.nn.Parameter
    logits = model(ids).logits
    assert_close(logits, before, bound)
    plain = make_model(**sizes, **HYBRID)
    for name, module in plain.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.copy_(model.get_submodule(name).weight.dequantize())
    assert_close(logits, plain(ids).logits, 1e-5)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))


def test_quantized_by_from_pretrained(tmp_path):
    quantization = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    model = make_model(hidden_size=64, intermediate_size=96)
    model.save_pretrained(tmp_path)
    config = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    again = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    assert type(again) is hf.GLAForCausalLM
    assert "Int8" in type(again.model.layers[0].attn.q_proj.weight).__name__
    assert_close(again(make_ids()).logits, model(make_ids()).logits, 0.1)
