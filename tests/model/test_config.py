"""What a model's configuration says, fills in and refuses."""

import json

import pytest
from models import TINY, make_ids, make_model

from gla_ext import batch_invariant
from gla_ext.decode import Decoder
from gla_ext.model.config import GLAConfig


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({}, 5632),
        ({"hidden_size": 192}, 512),
        ({"hidden_size": 256}, 768),
        ({"hidden_size": 384}, 1024),
        ({"hidden_size": 256, "hidden_ratio": 2}, 512),
        ({"hidden_size": 256, "hidden_ratio": None}, 768),
        ({"hidden_size": 256, "hidden_ratio": 0.01}, 256),
        ({"hidden_size": 256, "intermediate_size": 100}, 100),
        ({"hidden_ratio": 0, "intermediate_size": 100}, 100),
    ],
)
def test_mlp_size(options, size):
    assert GLAConfig(**options).mlp_size == size


def test_a_padding_token_counts_from_the_end():
    assert make_model(pad_token_id=-1).model.embeddings.padding_idx == TINY["vocab_size"] - 1


def test_config_file_of_fla_is_read(tmp_path):
    values = GLAConfig(**TINY).to_dict()
    assert (values["model_type"], values["architectures"]) == ("gla", ["GLAForCausalLM"])
    extras = {"attn": None, "use_gv": False, "fuse_swiglu": True, "transformers_version": "5.0"}
    (tmp_path / "config.json").write_text(json.dumps(values | extras))
    assert GLAConfig.load(tmp_path / "config.json") == GLAConfig(**TINY)


def attn(layers=(1,), **options):
    return {"attn": {"layers": layers if isinstance(layers, int) else list(layers)} | options}


BOTH_LOSSES = {"fuse_cross_entropy": True, "fuse_linear_cross_entropy": True}
VALUE_ERRORS = [
    ({"model_type": "llama"}, "model_type to be 'gla', got 'llama'"),
    ({"num_hidden_layers": 0}, "num_hidden_layers to be at least 1, got 0"),
    ({"intermediate_size": 0}, "intermediate_size to be at least 1, got 0"),
    ({"intermediate_size": -1}, "intermediate_size to be at least 1, got -1"),
    ({"num_heads": 0}, "num_heads to be at least 1, got 0"),
    ({"num_kv_heads": 0}, "num_kv_heads to be at least 1, got 0"),
    ({"conv_size": 0}, "conv_size to be at least 1, got 0"),
    ({"hidden_ratio": 0}, "hidden_ratio to make the MLP at least 1 wide, got 0 wi"),
    ({"hidden_ratio": -1}, "at least 1 wide, got -1 with hidden_size = 2048"),
    ({"pad_token_id": 32000}, "one of vocab_size = 32000 tokens, got 32000"),
    ({"pad_token_id": -32001}, "one of vocab_size = 32000 tokens, got -32001"),
    ({"use_l2warp": True}, "use_l2warp to be False, the only value .* got True"),
    ({"attnres_block_size": 2}, "attnres_block_size to be None, .*, got 2"),
    ({"fuse_swiglu": False}, "fuse_swiglu to be True, the only .*, got False"),
    (BOTH_LOSSES, "at most one of fuse_cross_entropy and fuse_linear_cross"),
    ({"attn": {"num_heads": 2}}, "attn to have 'layers'"),
    (attn(), "attn to have 'num_heads'"),
    (attn([3], num_heads=2), "layers of attn from 0 to 2, got 3"),
    (attn([-1], num_heads=2), "from 0 to 2, got -1"),
    (attn([1, 1], num_heads=2), "each layer once in attn, got 1 twice"),
    ({"attn": [attn(num_heads=2)["attn"]] * 2}, "got 1 twice"),
    (attn(num_heads=0), "num_heads of attn to be at least 1, got 0"),
    (attn(num_heads=2, window_size=0), "window_size of attn"),
    (attn(num_heads=2, rope_theta=-1), "rope_theta of attn"),
]
TYPE_ERRORS = [
    ({"attn": "all"}, "attn to be a dict or a list of dicts, got 'all'"),
    ({"attn": [{"layers": [0], "num_heads": 1}, 3]}, "a list of dicts"),
    (attn(0, num_heads=2), "layers of attn to be a list of integers, got 0"),
    (attn([True], num_heads=2), "a list of integers"),
    (attn(num_heads=2.0), "num_heads to be an integer, got 2.0"),
    (attn(num_heads=2, qkv_bias=0), "qkv_bias to be True or Fal"),
]
NOT_IMPLEMENTED = [
    ({"use_gv": True}, "use_gv = True is not implemented"),
    ({"use_gk": False}, "use_gk = False is not implemented"),
    ({"hidden_act": "powlu"}, "hidden_act = 'powlu' is not implemented"),
    (attn(num_heads=2, qk_norm=True), "FLA does not pass"),
    (attn(num_heads=2, window=64), "expected attn of layers, num_heads, .*, got also window"),
]
ERRORS = [(ValueError, *row) for row in VALUE_ERRORS] + [(TypeError, *row) for row in TYPE_ERRORS]
ERRORS += [(NotImplementedError, *row) for row in NOT_IMPLEMENTED]


@pytest.mark.parametrize(("error", "values", "message"), ERRORS, ids=str)
def test_errors(error, values, message):
    with pytest.raises(error, match=message):
        GLAConfig.from_dict({"num_hidden_layers": 3} | values)


def test_what_attention_cannot_do_is_refused():
    model = make_model(**attn(num_heads=2))
    with pytest.raises(NotImplementedError, match="compiled = True is not implemented for a"):
        Decoder(model, 1, compiled=True)
    with batch_invariant(), pytest.raises(NotImplementedError, match="batch_invariant is not impl"):
        model(make_ids())
