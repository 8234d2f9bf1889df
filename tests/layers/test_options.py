"""What options of layers, models and their configuration must be, and the sentences of others.

Equal bits (see common.py): the same calls.
"""

import re

import numpy as np
import pytest
import torch
from common import raises_exactly as raises
from models import make_model

from gla_ext import GatedLinearAttention, MultiheadGLA
from gla_ext.layers.norms import GatedRMSNorm, RMSNorm
from gla_ext.layers.short_convolution import ShortConvolution
from gla_ext.model import GLAMLP
from gla_ext.model.config import GLAConfig

NAMES = {"int": "an integer", "bool": "True or False", "float": "a number", "str": "a string"}
SIZES = {"hidden_size": 24, "num_heads": 2}


@pytest.mark.parametrize(
    ("owner", "build"),
    [
        ("GatedLinearAttention", lambda **options: GatedLinearAttention(**SIZES | options)),
        ("GLAConfig", lambda **options: GLAConfig(**SIZES | options)),
    ],
)
@pytest.mark.parametrize(
    ("option", "kind", "values"),
    [
        ("hidden_size", "int", (24.0, "24", True, None, torch.tensor(24))),
        ("num_heads", "int", (2.0, np.float32(2), True)),
        ("num_kv_heads", "int or None", (1.0, "1", False)),
        ("expand_k", "float", ("1", True, None, float("nan"), [1.0])),
        ("norm_eps", "float", ("1e-5", None)),
        ("clamp_min", "float or None", ("-1", True)),
        ("fuse_norm", "bool", ("no", 0, 1, None, 1.0)),
        ("use_short_conv", "bool", ("yes", 1, np.int64(1))),
        ("elementwise_affine", "bool or None", ("True", 1)),
        ("feature_map", "str or None", (1, torch.relu, True)),
    ],
)
def test_options_of_another_type(owner, build, option, kind, values):
    expected = " or ".join(NAMES.get(part, part) for part in kind.split(" or "))
    for value in values:
        with raises(TypeError, f"{owner}: expected {option} to be {expected}, got {value!r}"):
            build(**{option: value})


def test_options_of_other_modules():
    for build, message in (
        (lambda: GLAMLP(8.0, 4), "GLAMLP: expected hidden_size to be an integer, got 8.0"),
        (lambda: RMSNorm("8"), "RMSNorm: expected hidden_size to be an integer, got '8'"),
        (lambda: GatedRMSNorm(8, activation=None), "activation to be a string, got None"),
        (lambda: ShortConvolution(8, 4, 1), "bias to be True or False, got 1"),
        (lambda: MultiheadGLA(8, 2, batch_first="no"), "batch_first to be True or False, got 'no'"),
        (lambda: MultiheadGLA(8, 2, self_attention=1), "self_attention to be True or False, got 1"),
        (lambda: GLAConfig(eos_token_id=[1, "2"]), "a list of integers or None, got [1, '2']"),
    ):
        with pytest.raises(TypeError, match=re.escape(message) + "$"):
            build()


def test_numbers_of_numpy_are_options():
    options = {
        "hidden_size": np.int64(24),
        "num_heads": np.int32(2),
        "expand_k": np.float32(0.5),
        "fuse_norm": np.bool_(False),
        "clamp_min": np.float64(-1),
    }
    layer, config = GatedLinearAttention(**options), GLAConfig(**options)
    for owner in (layer, config):
        for name in options.keys() & vars(owner).keys():
            assert type(getattr(owner, name)) in (int, float, bool), name
            assert getattr(owner, name) == options[name]
    assert not layer.fuse_norm_and_gate
    assert GLAConfig.from_dict(config.to_dict()) == config


def test_silu_is_swish():
    """But for the norm's name, which FLA gives by the word 'swish'."""
    swish, silu = make_model(), make_model(hidden_act="silu")
    renamed = {
        name.replace("g_norm_swish_gate", "g_norm"): t for name, t in swish.state_dict().items()
    }
    silu.load_state_dict(renamed)
    ids = torch.ones(1, 3, dtype=torch.int64)
    assert torch.equal(silu(ids).logits, swish(ids).logits)
    assert "model.layers.0.attn.g_norm_swish_gate.weight" in swish.state_dict()
