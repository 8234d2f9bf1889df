"""`gla_ext.hf` beside FLA's own model class: same weights and logits, either saved by the other.

Equal bits (see common.py): tokens, and the same calls on weights that were saved.
"""

import json

import pytest
import torch
from common import assert_close, run_python
from fla_kernels import BOUND, import_fla, require_kernels

pytest.importorskip("transformers")

from transformers import AutoConfig, AutoModelForCausalLM

import gla_ext.fla

TINY = {
    "hidden_size": 32,
    "num_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 31,
    "intermediate_size": 48,
    "initializer_range": 0.3,
    "fuse_cross_entropy": False,  # FLA's does not run on a CPU
}


def make_ids(T, device, seed=1):
    """Random tokens. The first one may have q and k nearly at right angles: the norm of its small
    output then multiplies rounding by ten, in FLA's model as in ours. Seed 1 has such tokens, and
    padded rows of seed 5. Whole rows of seed 5 and padded rows of seed 8 have none: no gradient is
    further than 3e-6 from that in fp64.
    """
    return torch.randint(31, (2, T), generator=torch.Generator().manual_seed(seed)).to(device)


@pytest.fixture
def hf(device):
    require_kernels(device)
    from gla_ext import hf

    return hf


def make_fla_model(device, **options):
    models = import_fla().models
    torch.manual_seed(0)
    return models.GLAForCausalLM(models.GLAConfig(**TINY | options)).to(device).eval()


def results(model, ids, **arguments):
    """Logits, loss, and the gradients of the parameters."""
    model.zero_grad()
    out = model(ids, labels=ids, use_cache=False, **arguments)
    out.loss.backward()
    gradients = {name: x.grad.clone() for name, x in model.named_parameters()}
    return {"logits": out.logits, "loss": out.loss.float()} | gradients


def assert_same_results(ours, theirs, bound):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert_close(ours[name], value, bound, name=name)


@pytest.mark.parametrize(  # FLA changes over at 64
    ("T", "layers", "padding", "seed"),
    [(9, 1, 0, 5), (66, 1, 0, 5), (12, 2, 5, 8)],
    ids=["recurrent", "chunked", "padded"],
)
def test_model_saved_by_fla(hf, device, tmp_path, T, layers, padding, seed):
    theirs = make_fla_model(device, num_hidden_layers=layers)
    theirs.save_pretrained(tmp_path)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path).to(device)
    assert type(ours) is hf.GLAForCausalLM
    ids, given = make_ids(T, device, seed), {}
    if padding:
        given["attention_mask"] = (torch.arange(T) >= torch.tensor([[padding], [0]])).long()
        given["attention_mask"] = given["attention_mask"].to(device)
    assert_same_results(results(ours, ids, **given), results(theirs, ids, **given), BOUND[device])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tie_word_embeddings": True},
        {"fuse_norm": False},
        {"use_output_gate": False, "clamp_min": -0.02, "elementwise_affine": False},
        {"expand_k": 1.0, "expand_v": 2.0, "norm_eps": 0.01, "intermediate_size": None},
        {"use_short_conv": True, "conv_size": 3, "num_kv_heads": 1, "feature_map": "relu"},
    ],
    ids=str,
)
def test_model_saved_by_gla_ext(hf, device, tmp_path, options):
    torch.manual_seed(0)
    ours = hf.GLAForCausalLM(hf.GLAConfig(**TINY | options)).to(device).eval()
    ours.save_pretrained(tmp_path)
    models = import_fla().models
    theirs = models.GLAForCausalLM.from_pretrained(tmp_path).to(device).eval()
    again = hf.GLAForCausalLM.from_pretrained(tmp_path).to(device).eval()
    ids = make_ids(9, device)
    with torch.no_grad():
        assert_close(ours(ids).logits, theirs(ids).logits, BOUND[device])
        assert torch.equal(ours(ids).logits, again(ids).logits)
    theirs.save_pretrained(tmp_path / "theirs")
    back = hf.GLAForCausalLM.from_pretrained(tmp_path / "theirs").to(device).eval()
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, back(ids).logits)
    both = (json.loads((x / "config.json").read_text()) for x in (tmp_path, tmp_path / "theirs"))
    assert next(both) == next(both)


def test_both_are_registered(hf, tmp_path):
    models = import_fla().models
    hf.GLAForCausalLM(hf.GLAConfig(**TINY)).save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is hf.GLAConfig
    assert type(AutoModelForCausalLM.from_config(hf.GLAConfig(**TINY))) is hf.GLAForCausalLM
    theirs = AutoModelForCausalLM.from_config(models.GLAConfig(**TINY))
    assert type(theirs) is models.GLAForCausalLM


@pytest.mark.parametrize("first", ["gla_ext.hf", "fla"])
def test_the_order_of_imports_does_not_matter(first):
    """Some models of transformers import FLA."""
    import_fla()
    second = {"gla_ext.hf": "fla", "fla": "gla_ext.hf"}[first]
    code = f"import {first}, {second}\nfrom transformers import AutoConfig, AutoModelForCausalLM\n"
    code += "model = AutoModelForCausalLM.from_config(AutoConfig.for_model('gla', **SIZES))\n"
    code += "import fla.models, gla_ext.hf\nprint(type(model) is gla_ext.hf.GLAForCausalLM)"
    assert run_python(code.replace("SIZES", repr(TINY))).split()[-1] == "True"


def test_config_has_the_names_and_defaults_of_fla(hf):
    import_fla()
    from fla.models import GLAConfig

    def own(config):
        return {x: y for x, y in config.to_dict().items() if x != "transformers_version"}

    assert own(hf.GLAConfig()) == own(GLAConfig())


def test_an_accelerated_model_of_fla_is_the_same_model(device):
    require_kernels(device)
    theirs = make_fla_model(device, num_hidden_layers=2)
    ids = make_ids(10, device)
    mask = (torch.arange(10) >= torch.tensor([[4], [0]])).long().to(device)
    expected = results(theirs, ids, attention_mask=mask)
    gla_ext.fla.accelerate_fla()
    try:
        actual = results(theirs, ids, attention_mask=mask)
    finally:
        gla_ext.fla.restore_fla()
    assert_same_results(actual, expected, BOUND[device])


@pytest.mark.cuda
@pytest.mark.parametrize("window", [None, 20], ids=["full", "window"])
def test_hybrid_models_saved_by_either(tmp_path, fla, window):
    """On a GPU, in fp32 and bf16; flash_attn is our functions where it is absent."""
    from gla_ext import hf

    gla_ext.fla.accelerate_fla()
    attn = {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "qkv_bias": True}
    sizes = {"hidden_size": 256, "num_heads": 2, "num_hidden_layers": 2}
    theirs = make_fla_model("cuda", **sizes, attn=attn | {"window_size": window})
    theirs.save_pretrained(tmp_path / "theirs")
    ours = hf.GLAForCausalLM.from_pretrained(tmp_path / "theirs").to("cuda")
    ours.save_pretrained(tmp_path / "ours")
    back = type(theirs).from_pretrained(tmp_path / "ours").to("cuda").eval()
    assert ours.config.attn == theirs.config.attn == back.config.attn
    ids = make_ids(66, "cuda")
    mask = (torch.arange(66) >= torch.tensor([[5], [0]])).long().to("cuda")
    expected = results(theirs, ids, attention_mask=mask)
    assert_same_results(results(ours, ids, attention_mask=mask), expected, BOUND["cuda"])
    assert_same_results(results(back, ids, attention_mask=mask), expected, BOUND["cuda"])
    for model in (ours, back):
        model.bfloat16()
    logits = [model(ids).logits.float() for model in (ours, back)]
    assert_close(*logits, 0.04)
