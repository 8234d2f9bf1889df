"""Mamba and RWKV from transformers, by its plain PyTorch paths: a loop over tokens, so they are
slow and stand in recall alone.
"""

from __future__ import annotations

import os

from torch import Tensor, nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read as transformers loads: no kernels of the Hub
NAMES = ("mamba", "rwkv")


class Borrowed(nn.Module):
    """A model of transformers with the two attributes of `GLAForCausalLM` that recall calls. Its
    output matrix is the embeddings.

    Args:
        name: 'mamba' (blocks without an MLP) or 'rwkv' (version 4; its blocks have channel mixing).
        width: hidden size.
        layers: number of blocks.
        vocab_size: number of tokens.
        seq_len: longest sequence.
    """

    def __init__(self, name: str, width: int, layers: int, vocab_size: int, seq_len: int) -> None:
        super().__init__()
        sizes = {"vocab_size": vocab_size, "hidden_size": width, "num_hidden_layers": layers}
        if name == "mamba":
            from transformers import MambaConfig, MambaModel

            self.model = MambaModel(MambaConfig(**sizes, use_cache=False))
        else:
            from transformers import RwkvConfig, RwkvModel

            self.model = RwkvModel(RwkvConfig(**sizes, context_length=seq_len, use_cache=False))
        self.lm_head = nn.Linear(width, vocab_size, bias=False)
        self.lm_head.weight = self.model.get_input_embeddings().weight
        nn.init.normal_(self.lm_head.weight, std=0.02)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits `[B, T, vocab_size]`."""
        return self.lm_head(self.model(input_ids).last_hidden_state)
