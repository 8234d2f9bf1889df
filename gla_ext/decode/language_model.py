"""What decoding asks of a model."""

from __future__ import annotations

from typing import Any

from torch import nn


class LanguageModel(nn.Module):
    """A model that `generate` and `Decoder` can run: `gla_ext.model.GLAForCausalLM` is one.

    Called with tokens `[B, T]`, past_key_values, use_cache, logits_to_keep and cu_seqlens, as
    `GLAForCausalLM.forward` documents them, it returns what has `logits`.

    Attributes:
        config: has vocab_size and num_hidden_layers.
    """

    config: Any
