"""The interface that `generate` of transformers needs from a GLA language model."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation import GenerationMode

from gla_ext.cache import GLACache
from gla_ext.hf._cache import CACHE, CompiledStepsCache, one_cache


class GLAGenerationMixin(GenerationMixin):
    """`generate` on recurrent states, with a cache that forward makes."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """False: forward makes the cache, not `generate`."""
        return False

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        mode_or_assistant: Any = None,
        *args: Any,
    ) -> None:
        """Makes a cache in three cases: for a prompt in chunks, as `generate` needs a cache before
        the first chunk; for assisted decoding, one that can go back; and with
        cache_implementation='static', one whose token steps are compiled.
        """
        config = generation_config
        if config.cache_implementation == "static" and model_kwargs.get(CACHE) is None:
            each = max(config.num_beams or 1, config.num_return_sequences or 1)
            batch_size, max_length = args[:2]
            model_kwargs[CACHE] = CompiledStepsCache(each * batch_size, max_length)
            return
        super()._prepare_cache_for_generation(config, model_kwargs, mode_or_assistant, *args)
        if not config.use_cache:
            return
        # The third argument is the mode in transformers 5, the assistant in 4.
        assisted = (
            mode_or_assistant == GenerationMode.ASSISTED_GENERATION
            or isinstance(mode_or_assistant, PreTrainedModel)
            or config.prompt_lookup_num_tokens is not None
            or config.is_assistant
        )
        chunked = config.prefill_chunk_size is not None
        if (assisted or chunked) and model_kwargs.get(CACHE) is None:
            model_kwargs[CACHE] = GLACache()
        if assisted and isinstance(cache := model_kwargs.get(CACHE), GLACache):
            cache.activate_past_recording()
            if config.is_assistant:  # all tokens of a draft may be taken back
                cache.past.reach = max(cache.past.reach, config.max_new_tokens or 0)

    def generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Not implemented: transformers' continuous batching pages keys and values, not states.

        In `gla_ext.decode.Decoder` rows can start and end while others continue.
        """
        raise NotImplementedError(
            f"{type(self).__name__}: generate_batch is not implemented, transformers' continuous "
            "batching pages keys and values and keeps no states; gla_ext.decode.Decoder of a "
            "gla_ext.model.GLAForCausalLM batches continuously"
        )

    init_continuous_batching = generate_batch

    def _prepare_position_ids_for_generation(self, *args: Any) -> None:
        """None: a recurrence needs no positions, and `generate` would extend them at every step."""
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
        is_first_iteration: bool | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The arguments that `generate` passes to forward for its next step.

        The number of new tokens is next_sequence_length in transformers 5, and the length of
        cache_position in 4. From 5.24 on, past_key_values are passed as `cache`. inputs_embeds hold
        all tokens so far; only the first step uses them.

        Raises:
            ValueError: if the prompt has no more tokens than the cache has seen.
        """
        past_key_values = one_cache(past_key_values, cache)
        started = past_key_values is not None and len(past_key_values) > 0
        if next_sequence_length is None and cache_position is not None:
            next_sequence_length = len(cache_position)
        if next_sequence_length is not None and next_sequence_length < 1:
            raise ValueError(
                "generate: expected a prompt of more tokens than the cache has had, got "
                f"{1 - next_sequence_length} too few"
            )
        new = slice(None if next_sequence_length is None else -next_sequence_length, None)
        first = is_first_iteration
        if first is None:
            first = not started or input_ids.shape[1] == 0
        if inputs_embeds is not None and first:
            inputs = {"inputs_embeds": inputs_embeds[:, new]}
        else:
            inputs = {"input_ids": input_ids[:, new].contiguous()}
        # Without a mask nothing is packed, and generated tokens are never padding. In a prompt that
        # comes in chunks, transformers 4 marks a single token only by its position.
        T = next(iter(inputs.values())).shape[1]
        if isinstance(past_key_values, CompiledStepsCache):
            past_key_values.expect(T)
        if attention_mask is not None:
            of_prompt = is_first_iteration or position_ids is not None
            # Assistants get their own tokens as a prompt, in which pad tokens would count as
            # padding.
            drafts = started and getattr(past_key_values, "past", None) is not None
            drawn = drafts or (started and T == 1 and not of_prompt)
            if drawn or attention_mask[:, -T:].all():
                attention_mask = None
        if position_ids is not None:
            inputs["position_ids"] = position_ids[:, -T:]
        inputs |= {"past_key_values": past_key_values, "attention_mask": attention_mask}
        return kwargs | inputs
