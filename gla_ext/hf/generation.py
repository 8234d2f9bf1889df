"""What `generate` of transformers asks of a GLA language model."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import GenerationConfig, GenerationMixin

from gla_ext.cache import GLACache
from gla_ext.hf._cache import CACHE, one_cache


class GLAGenerationMixin(GenerationMixin):
    """`generate` on recurrent states, from a cache that forward makes."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """False: forward makes a cache, and not `generate`."""
        return False

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any
    ) -> None:
        """Makes a cache where a prompt comes in chunks: `generate` wants one before the first."""
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)
        chunked = generation_config.prefill_chunk_size is not None
        if chunked and generation_config.use_cache and model_kwargs.get(CACHE) is None:
            model_kwargs[CACHE] = GLACache()

    def _prepare_position_ids_for_generation(self, *args: Any) -> None:
        """None: a recurrence needs none, and `generate` would lengthen them at every step."""
        return

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: Any | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache_position: Tensor | None = None,
        next_sequence_length: int | None = None,
        cache: Any | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """What `generate` passes to forward for its next step.

        transformers 5 says how many tokens are new by next_sequence_length, 4 by the length of
        cache_position; from 5.24 on past_key_values come as `cache`.
        """
        past_key_values = one_cache(past_key_values, cache)
        started = past_key_values is not None and len(past_key_values) > 0
        if next_sequence_length is None and cache_position is not None:
            next_sequence_length = len(cache_position)
        if inputs_embeds is not None and not started:
            inputs = {"inputs_embeds": inputs_embeds}
        elif next_sequence_length is None:
            inputs = {"input_ids": input_ids}
        else:
            inputs = {"input_ids": input_ids[:, -next_sequence_length:].contiguous()}
        # Without a mask nothing is packed; and what was generated is no padding. Of a prompt in
        # chunks transformers 4 tells a token by its position alone.
        T = next(iter(inputs.values())).shape[1]
        if attention_mask is not None:
            of_prompt = kwargs.get("is_first_iteration", False) or position_ids is not None
            if (started and T == 1 and not of_prompt) or attention_mask[:, -T:].all():
                attention_mask = None
        if position_ids is not None:
            inputs["position_ids"] = position_ids[:, -T:]
        inputs |= {"past_key_values": past_key_values, "attention_mask": attention_mask}
        return kwargs | inputs


__all__ = ["GLAGenerationMixin"]
