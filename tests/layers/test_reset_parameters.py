"""Modules built on `meta`, which get memory by `to_empty()` and weights by reset_parameters()."""

import pytest
import torch
from models import EVERY, TINY
from torch import nn

from gla_ext import GatedLinearAttention, MultiheadGLA
from gla_ext.layers.norms import GatedRMSNorm, RMSNorm
from gla_ext.layers.short_convolution import ShortConvolution
from gla_ext.model import GLAMLP, GLABlock, GLAForCausalLM, GLAModel
from gla_ext.model.config import GLAConfig

CONFIG = GLAConfig(**TINY, use_short_conv=True, intermediate_size=24)
MODULES = {
    "norm": lambda: RMSNorm(8),
    "gated norm": lambda: GatedRMSNorm(8),
    "norm without weight": lambda: RMSNorm(8, elementwise_affine=False),
    "convolution": lambda: ShortConvolution(8, 4, bias=True),
    "layer": lambda: GatedLinearAttention(hidden_size=24, **EVERY),
    "layer, unfused norm": lambda: GatedLinearAttention(hidden_size=24, fuse_norm=False),
    "multihead": lambda: MultiheadGLA(24, 2, use_short_conv=True),
    "multihead without bias": lambda: MultiheadGLA(24, 2, bias=False),
    "mlp": lambda: GLAMLP(16, 24),
    "block": lambda: GLABlock(CONFIG, 0),
}


def on_meta(build):
    """Built on meta, in memory, and full of NaN."""
    with torch.device("meta"):
        module = build()
    module.to_empty(device="cpu")
    for tensor in (*module.parameters(), *module.buffers()):
        nn.init.constant_(tensor, torch.nan)
    return module


def reset_all(module):
    for child in module.modules():
        owned = (*child.parameters(recurse=False), *child.buffers(recurse=False))
        if owned or hasattr(child, "reset_parameters"):
            child.reset_parameters()


@pytest.mark.parametrize("build", MODULES.values(), ids=MODULES)
def test_every_module_resets_what_it_owns(build):
    """To the bits of a build with the same seed: both draw in the order of modules()."""
    module = on_meta(build)
    torch.manual_seed(3)
    reset_all(module)
    torch.manual_seed(3)
    built = build()
    assert module.state_dict().keys() == built.state_dict().keys()
    for name, wanted in built.state_dict().items():
        assert torch.equal(module.state_dict()[name], wanted), name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", [GLAModel, GLAForCausalLM])
def test_a_language_model_resets_all_of_it(kind, tied):
    config = GLAConfig(
        hidden_size=64, num_hidden_layers=1, num_heads=2, vocab_size=500, use_short_conv=True,
        initializer_range=0.05, tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(0)
    model = on_meta(lambda: kind(config))
    reset_all(model)
    assert not any(parameter.isnan().any() for parameter in model.parameters())
    model.reset_parameters()
    for name, parameter in [*model.named_parameters(), *kind(config).named_parameters()]:
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif parameter.ndim == 1:
            assert (parameter == 1).all(), name
        else:  # within four standard deviations of what so many numbers have
            n = parameter.numel()
            assert parameter.std().item() == pytest.approx(0.05, rel=4 / (2 * n) ** 0.5), name
            assert abs(parameter.mean().item()) < 4 * 0.05 / n**0.5, name
    if kind is GLAForCausalLM:
        assert (model.lm_head.weight is model.model.embeddings.weight) == tied
