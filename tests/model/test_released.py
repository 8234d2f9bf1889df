"""Released checkpoints of FLA's, by their configurations and names of parameters, with weights of
our own; and those of 2024, converted.

Equal bits (see common.py): the same calls.
"""

import json
import sys

import pytest
import torch
from models import make_ids, make_model
from safetensors.torch import load_file, save_file

from gla_ext.model import GLAConfig, GLAForCausalLM
from gla_ext.model.convert import convert, main
from gla_ext.model.tensors import model_tensors

# legacy/training/configs of FLA's repository: gla_340M.json, and gla_1B.json, which the models
# fla-hub/gla-1.3B-100B were trained with. fla-hub/gla-2.7B-100B has 5 heads of K 256 and V 512, and
# names the width of short convolutions, which it does not use.
RELEASED = {
    "attn_mode": "chunk",
    "bos_token_id": 1,
    "clamp_min": None,
    "eos_token_id": 2,
    "expand_k": 0.5,
    "expand_v": 1,
    "fuse_cross_entropy": True,
    "fuse_norm": True,
    "hidden_act": "swish",
    "hidden_ratio": 4,
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": None,
    "model_type": "gla",
    "num_heads": 4,
    "num_hidden_layers": 24,
    "norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "transformers_version": "4.45.0",
    "use_cache": True,
    "use_gk": True,
    "use_gv": False,
    "vocab_size": 32000,
}
SIZES = {
    "340M-15B": {"hidden_size": 1024, "tie_word_embeddings": True},
    "1.3B-100B": {},
    "2.7B-100B": {
        "hidden_size": 2560,
        "num_hidden_layers": 32,
        "num_heads": 5,
        "use_short_conv": False,
        "conv_size": 4,
    },
}
PARAMETERS = {"340M-15B": 341.7e6, "1.3B-100B": 1365.7e6, "2.7B-100B": 2704.2e6}
MLP = {1024: 2816, 2048: 5632, 2560: 6912}
VALUES = {1024: 256, 2048: 512, 2560: 512}  # V, of a head


def table(D, intermediate, layers, tied):
    """Names and shapes of the parameters of a released model."""
    shapes = {"model.embeddings.weight": (32000, D), "model.norm.weight": (D,)}
    if not tied:
        shapes["lm_head.weight"] = (32000, D)
    for n in range(layers):
        own = {
            "attn_norm.weight": (D,),
            "attn.q_proj.weight": (D // 2, D),
            "attn.k_proj.weight": (D // 2, D),
            "attn.v_proj.weight": (D, D),
            "attn.g_proj.weight": (D, D),
            "attn.gk_proj.0.weight": (16, D),
            "attn.gk_proj.1.weight": (D // 2, 16),
            "attn.gk_proj.1.bias": (D // 2,),
            "attn.g_norm_swish_gate.weight": (VALUES[D],),
            "attn.o_proj.weight": (D, D),
            "mlp_norm.weight": (D,),
            "mlp.gate_proj.weight": (intermediate, D),
            "mlp.up_proj.weight": (intermediate, D),
            "mlp.down_proj.weight": (D, intermediate),
        }
        shapes |= {f"model.layers.{n}.{name}": shape for name, shape in own.items()}
    return shapes


@pytest.mark.parametrize("name", SIZES)
def test_names_and_shapes(name):
    config = GLAConfig.from_dict(RELEASED | SIZES[name])
    with torch.device("meta"):
        model = GLAForCausalLM(config)
    found = {name: tuple(x.shape) for name, x in model_tensors(model).items()}
    D, tied = config.hidden_size, config.tie_word_embeddings
    assert found == table(D, MLP[D], config.num_hidden_layers, tied)
    count = sum(torch.Size(shape).numel() for shape in found.values())
    assert count == pytest.approx(PARAMETERS[name], rel=1e-3)


SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_heads": 2, "vocab_size": 31}
SMALL |= {"intermediate_size": 24}


def old_names(tensors, of_2023):
    """A model's tensors as FLA saved them before February 2025, and before March 2024."""
    found = {}
    for name, x in tensors.items():
        if name.endswith("mlp.gate_proj.weight"):
            x = torch.cat([x, tensors[name.replace("gate_proj", "up_proj")]])
        if name.endswith("mlp.up_proj.weight"):
            continue
        if of_2023:
            name = name.replace("embeddings", "embed_tokens")
            name = name.replace(".attn_norm.", ".gla_norm.").replace(".attn.", ".gla.")
        found[name] = x.clone()
    return found


def write_old(folder, options, tensors, pickled=False):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(options))
    (folder / "tokenizer_config.json").write_text("{}")
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")


OLD = {
    "2024": ({}, False),
    "2023": ({"rms_norm_eps": 1e-3, "num_attention_heads": 2, "torch_dtype": "bfloat16"}, True),
}


@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "pickle"])
@pytest.mark.parametrize("year", OLD)
def test_old_checkpoints(tmp_path, year, pickled):
    names, of_2023 = OLD[year]
    model = make_model(norm_eps=1e-3 if of_2023 else 1e-6)
    options = RELEASED | SMALL
    if of_2023:
        options = {k: v for k, v in options.items() if k not in ("norm_eps", "num_heads")} | names
        model.bfloat16()
    write_old(tmp_path / "old", options, old_names(model_tensors(model), of_2023), pickled)
    convert(tmp_path / "old", tmp_path / "new")
    expected = model.float()(make_ids()).logits
    again = GLAForCausalLM.from_pretrained(tmp_path / "new")
    assert torch.equal(again(make_ids()).logits, expected)
    assert {x.dtype for x in load_file(tmp_path / "new" / "model.safetensors").values()} == {
        torch.bfloat16 if of_2023 else torch.float32
    }
    assert (tmp_path / "new" / "tokenizer_config.json").exists()
    if not pickled:  # read as it is, too
        read = GLAForCausalLM.from_pretrained(tmp_path / "old")
        assert torch.equal(read(make_ids()).logits, expected)
    transformers = pytest.importorskip("transformers")
    import gla_ext.hf  # noqa: F401, registers

    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new").float()
    assert torch.equal(ours(make_ids()).logits, expected)


def test_what_cannot_be_converted(tmp_path):
    tensors = old_names(model_tensors(make_model()), False)
    shared = {"use_short_conv": True, "share_conv_kernel": True}
    write_old(tmp_path / "shared", RELEASED | SMALL | shared, tensors)
    with pytest.raises(NotImplementedError, match="share_conv_kernel = True with use_short_conv"):
        convert(tmp_path / "shared", tmp_path / "new")
    assert GLAConfig.from_dict({"share_conv_kernel": True}) == GLAConfig()
    write_old(tmp_path / "narrow", RELEASED | SMALL | {"hidden_size": 8}, tensors)
    with pytest.raises(ValueError, match="to have shape"):
        convert(tmp_path / "narrow", tmp_path / "new")
    write_old(tmp_path / "old", RELEASED | SMALL, tensors)
    convert(tmp_path / "old", tmp_path / "new")
    with pytest.raises(FileExistsError, match="to be empty or not to be there"):
        convert(tmp_path / "old", tmp_path / "new")


def test_the_command(tmp_path, monkeypatch):
    tensors = old_names(model_tensors(make_model()), False)
    write_old(tmp_path / "old", RELEASED | SMALL, tensors)
    folders = [str(tmp_path / name) for name in ("old", "new")]
    monkeypatch.setattr(sys, "argv", ["convert", *folders])
    main()
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert config["intermediate_size"] == 24


@pytest.mark.parametrize("weights", [None, b"no pickle", b'{"num_heads": "two"}', b"[1]"])
def test_what_the_command_cannot_convert_it_says_in_a_line(tmp_path, monkeypatch, capsys, weights):
    if weights is not None:
        GLAConfig(hidden_size=16, num_heads=2).save(tmp_path / "config.json")
        is_config = weights[:1] in (b"{", b"[")
        (tmp_path / ("config.json" if is_config else "pytorch_model.bin")).write_bytes(weights)
    monkeypatch.setattr(sys, "argv", ["convert", str(tmp_path), str(tmp_path / "new")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("python -m gla_ext.model.convert: ")
    assert not (tmp_path / "new").exists()
