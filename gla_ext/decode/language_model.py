"""The interface of a model that can be decoded."""

from __future__ import annotations

from typing import Any

from torch import nn


class LanguageModel(nn.Module):
    """A model that `generate` and `Decoder` can run: `gla_ext.model.GLAForCausalLM` is one.

    It is called with tokens `[B, T]`, past_key_values, use_cache, logits_to_keep and cu_seqlens, as
    documented for `GLAForCausalLM.forward`, and returns an object with an attribute `logits`.

    Attributes:
        config: has vocab_size and num_hidden_layers.
    """

    config: Any
