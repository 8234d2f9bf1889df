"""Small seeded models of `gla_ext.hf`. Import it after `pytest.importorskip("transformers")`."""

import torch

from gla_ext import hf

TINY = {
    "hidden_size": 16,
    "num_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 31,
    "intermediate_size": 24,
    "initializer_range": 0.3,
}
PADDED = (torch.arange(12) >= torch.tensor([[5], [0]])).long()


def make_model(seed=0, kind="GLAForCausalLM", **options):
    """In eval mode; kind is the name of its class."""
    torch.manual_seed(seed)
    return getattr(hf, kind)(hf.GLAConfig(**TINY | options)).eval()
