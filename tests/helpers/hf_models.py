"""Small seeded models of `gla_ext.hf`. Import it after `pytest.importorskip("transformers")`."""

import torch
import transformers

from gla_ext import hf

MAJOR = int(transformers.__version__.split(".")[0])  # of transformers
TINY = {
    "hidden_size": 16,
    "num_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 31,
    "intermediate_size": 24,
    "initializer_range": 0.3,
}
ATTN = [
    {"layers": [0], "num_heads": 2, "window_size": 5},
    {"layers": [2], "num_heads": 4, "num_kv_heads": 2, "qkv_bias": True, "rope_theta": 500.0},
]
HYBRID = {"num_hidden_layers": 3, "attn": ATTN}
PADDED = (torch.arange(12) >= torch.tensor([[5], [0]])).long()


def make_model(seed=0, kind="GLAForCausalLM", **options):
    """In eval mode; kind is the name of its class."""
    torch.manual_seed(seed)
    return getattr(hf, kind)(hf.GLAConfig(**TINY | options)).eval()
