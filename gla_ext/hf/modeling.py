"""GLA language models as classes of transformers, made of the blocks of gla_ext.model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from os import PathLike
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from gla_ext.cache import GLACache
from gla_ext.hf._cache import CACHE, check_cache, one_cache
from gla_ext.hf._packing import one_row, starts_again
from gla_ext.hf.configuration import GLAConfig
from gla_ext.hf.custom_code import write_custom_code
from gla_ext.hf.generation import GLAGenerationMixin
from gla_ext.hf.parallel import HEAD_PLAN
from gla_ext.layers._options import OF_MODELS, check_keywords
from gla_ext.layers.norms import RMSNorm
from gla_ext.model import blocks
from gla_ext.model.causal_lm import check_logits_to_keep
from gla_ext.model.loss import IGNORE_INDEX, head_and_loss
from gla_ext.model.weights import init_own_weights
from gla_ext.ops.chunk import in_mode_of_now


def _first(*values: Tensor | None) -> Tensor | None:
    """The first value that is not None."""
    return next((value for value in values if value is not None), None)


class GLAPreTrainedModel(PreTrainedModel):
    """Base class of the models below."""

    config_class = GLAConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    _no_split_modules = ["GLABlock"]  # noqa: RUF012  transformers' attribute
    _skip_keys_device_placement = ["past_key_values", "cache"]  # noqa: RUF012
    _is_stateful = False  # a cache can go back to fewer tokens: see GLACache.crop

    def _init_weights(self, module: nn.Module) -> None:
        init_own_weights(module, self.config.initializer_range)

    def save_pretrained(self, save_directory: str | PathLike[str], **kwargs: Any) -> None:
        """Like transformers' method; also writes the file of `gla_ext.hf.add_custom_code` if
        requested.
        """
        super().save_pretrained(save_directory, **kwargs)
        write_custom_code(self, save_directory)

    def get_parameter_or_buffer(self, target: str) -> Tensor:
        """Like transformers' method; of a sharded module, which itself sees only this rank's part,
        the whole parameter.
        """
        path, _, name = target.rpartition(".")
        found = self.get_submodule(path)._parameters.get(name)
        return super().get_parameter_or_buffer(target) if found is None else found

    def get_input_embeddings(self) -> nn.Embedding:
        return self.base_model.embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.base_model.embeddings = value


class GLAModel(GLAPreTrainedModel):
    """Embeddings, blocks and a last norm.

    Gradient checkpointing recomputes each block in backward, in training without a cache.

    Args:
        config: the configuration.

    Raises:
        NotImplementedError: for options of FLA that have no effect there; the error names them.
    """

    one_sequence_a_row = False  # set by heads that give one result per row

    def __init__(self, config: GLAConfig) -> None:
        super().__init__(config)
        core = config.core()
        self.gradient_checkpointing = False
        self.embeddings = nn.Embedding(core.vocab_size, core.hidden_size, core.pad_token_id)
        layers = (blocks.GLABlock(core, i) for i in range(core.num_hidden_layers))
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(core.hidden_size, eps=core.norm_eps)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Any | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cu_seqlens: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        position_ids: Tensor | None = None,
        seq_idx: Tensor | None = None,
        cache: Any | None = None,
        cp_context: Any | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast | tuple:
        """Arguments are those of `GLAForCausalLM.forward`, without those of logits and the loss."""
        check_keywords("GLAModel", kwargs)
        past_key_values = one_cache(past_key_values, cache)
        cu_seqlens = _first(cu_seqlens, cu_seq_lens_q, cu_seq_lens_k)
        if output_attentions:
            raise NotImplementedError("GLAModel: output_attentions = True: there are none")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError(
                "GLAModel: expected one of input_ids and inputs_embeds, got "
                f"{'none' if input_ids is None else 'both'}"
            )
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if use_cache and past_key_values is None:
            past_key_values = GLACache()
        x = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        slots = None
        if cu_seqlens is None and cp_context is None:
            again = starts_again(position_ids, seq_idx, attention_mask, *x.shape[:2])
            if again is not None:
                slots, cu_seqlens = one_row(again, attention_mask)
        if cu_seqlens is not None and self.one_sequence_a_row:
            raise NotImplementedError(
                "GLAModel: packed sequences are not implemented for a head that answers once a "
                "row; pass a padded batch"
            )
        if past_key_values is not None and cp_context is None:
            check_cache(past_key_values, len(x) if cu_seqlens is None else len(cu_seqlens) - 1)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        run = partial(
            self._run_blocks,
            keeps_inputs=output_hidden_states,
            past_key_values=past_key_values,
            use_cache=use_cache,
            cu_seqlens=cu_seqlens,
            cp_context=cp_context,
            slots=slots,
            max_seqlen=x.shape[1] if slots is not None else max_length_q,
        )
        past = getattr(past_key_values, "past", None)
        if past is None:
            x, *inputs = run(x, attention_mask)
        elif cu_seqlens is not None or not use_cache:
            raise NotImplementedError(
                "GLAModel: packed sequences and use_cache = False are not implemented with a cache "
                "that goes back (activate_past_recording), as that of assisted decoding"
            )
        else:
            x, *inputs = past.run(past_key_values, x, attention_mask, run)
        output = BaseModelOutputWithPast(
            last_hidden_state=x,
            hidden_states=(*inputs, x) if output_hidden_states else None,
            **{CACHE: past_key_values},
        )
        return_dict = self.config.return_dict if return_dict is None else return_dict
        return output if return_dict else output.to_tuple()

    def _run_blocks(
        self, x: Tensor, attention_mask: Tensor | None, keeps_inputs: bool, **options: Any
    ) -> list[Tensor]:
        """The output, followed by the inputs of all blocks if `keeps_inputs`."""
        recompute = self.gradient_checkpointing and self.training
        recompute = recompute and options["past_key_values"] is None
        inputs: list[Tensor] | None = [] if keeps_inputs else None
        x = blocks.run_blocks(
            self.layers,
            x,
            attention_mask=attention_mask,
            call=self._checkpointed if recompute else blocks.GLABlock.__call__,
            inputs=inputs,
            norm=self.norm,
            **options,
        )
        return [x, *(inputs or ())]

    def _checkpointed(self, block: blocks.GLABlock, *x: Tensor, **attn_args: Any) -> Any:
        run = in_mode_of_now(partial(block.__call__, **attn_args))
        return self._gradient_checkpointing_func(run, *x)


class GLAForCausalLM(GLAPreTrainedModel, GLAGenerationMixin):
    """The language model: `GLAModel` and a linear map to the logits of the next token.

    Loads checkpoints of FLA's `GLAForCausalLM`, and FLA can load what this class saves: the
    parameters' names and the entries of config.json are the same. The configuration is that of
    `GLAModel`.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}  # noqa: RUF012
    _tp_plan = HEAD_PLAN

    def __init__(self, config: GLAConfig) -> None:
        super().__init__(config)
        self.model = GLAModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.lm_head = new_embeddings

    def get_decoder(self) -> GLAModel:
        return self.model

    def set_decoder(self, decoder: GLAModel) -> None:
        self.model = decoder

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Any | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        cu_seqlens: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        position_ids: Tensor | None = None,
        seq_idx: Tensor | None = None,
        cache: Any | None = None,
        cp_context: Any | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple:
        """Logits of the next token at every position, and the loss when labels are given.

        Args:
            input_ids, attention_mask, labels, cp_context: as in
                `gla_ext.model.GLAForCausalLM.forward`. With cp_context, position_ids and seq_idx
                are ignored: its offsets tell where sequences start. Default: None.
            inputs_embeds: `[B, T, hidden_size]`, instead of input_ids. Default: None.
            past_key_values: a `gla_ext.cache.GLACache`, or a cache with its methods, of the tokens
                before these. Default: None.
            use_cache: store the states after these tokens in past_key_values, or in a new cache.
                Default: False in training, else config.use_cache.
            output_attentions: must not be True. Default: None.
            output_hidden_states: return the input of every block and the output of the last norm,
                `[B, T, hidden_size]` each; gradients pass through them.
                Default: config.output_hidden_states.
            return_dict: False returns a tuple. Default: config.return_dict.
            logits_to_keep: as in `gla_ext.model.GLAForCausalLM.forward`. Default: 0 (all).
            num_items_in_batch: divisor of the summed loss, instead of the number of labels that
                count here. `Trainer` also counts the first labels of packed sequences, unless they
                are -100, as `DataCollatorWithFlattening` sets them. Default: None.
            cu_seqlens: int32 or int64 `[N + 1]`, offsets of the sequences packed into a batch of
                one; attention_mask is then ignored. Default: cu_seq_lens_q.
            cu_seq_lens_q, cu_seq_lens_k: transformers' names of cu_seqlens, from
                `DataCollatorWithFlattening(return_flash_attn_kwargs=True)`. Default: None.
            max_length_q: int, at least the length of the longest packed sequence, also from that
                collator. With it, fewer blocks of a GPU run without work in the attention of a
                hybrid model. Default: None.
            position_ids: int `[B, T]` or `[1, T]`. In every row, another sequence starts where a
                position is not above the one before it, as after `DataCollatorWithFlattening()`. A
                recurrence does not use positions otherwise. The number of sequences is read back
                from the device once per call, and one compiled graph needs
                `torch._dynamo.config.capture_dynamic_output_shape_ops`; offsets need neither.
                Ignored if offsets are given, and for one token per row. Default: None.
            seq_idx: int `[B, T]` or `[1, T]`, the index of each token's sequence: another sequence
                starts where it changes. Takes precedence over position_ids. Default: None.
            cache: transformers' name of past_key_values from 5.24 on. Default: None.
            **kwargs: `shift_labels`, int64 `[B, T]`, replace labels. They are already shifted, so
                logits at t are compared with shift_labels at t, also in packed sequences. `Trainer`
                passes them if it splits sequences over ranks. States start from zero at such a
                split; only cp_context passes them from rank to rank. `cache_position`,
                `max_length_k`, `output_router_logits`, `token_type_ids`, the others of
                `gla_ext.layers._options.OF_MODELS` and `is_causal = True` have no effect, but are
                passed to a loss_function.

        `model.loss_function = f` makes f the loss, instead of the losses of config, as in
        transformers' models. f gets logits, labels, vocab_size, kwargs, and num_items_in_batch and
        shift_labels if they are given. A loss_type of transformers works the same way.

        Returns:
            A `CausalLMOutputWithPast`, or a tuple without the values that are None, with: loss
            (nats per token; fp32, fp64 for an fp64 model); logits `[B, T, vocab_size]`;
            past_key_values (`cache` from transformers 5.24 on); hidden_states. In train mode,
            backward of the loss writes the gradient over the logits, as FLA's does. With labels and
            config.fuse_linear_cross_entropy logits are None, also in evaluation; set that option to
            False to use compute_metrics of `Trainer`.

        Raises:
            ValueError: for shapes that do not fit; neither or both of input_ids and inputs_embeds;
                both past_key_values and cache, or a cache of another number of sequences;
                logits_to_keep below 0; shift_labels without labels for a loss_type of transformers.
            TypeError: for a cache of transformers, such as `DynamicCache`, and in a hybrid model
                for any cache but a `GLACache`; for other keywords, which it names.
            NotImplementedError: for output_attentions, is_causal = False, and a loss_function
                together with cp_context.
        """
        # Not in the signature: `Trainer` would require any argument with "label" in its name.
        shift_labels = kwargs.pop("shift_labels", None)
        targets = labels if shift_labels is None else shift_labels
        loss_function = None if targets is None else self._chosen_loss(labels, cp_context)
        check_keywords("GLAForCausalLM", kwargs, OF_MODELS if loss_function is None else kwargs)
        logits_to_keep = check_logits_to_keep(logits_to_keep)
        cu_seqlens = _first(cu_seqlens, cu_seq_lens_q, cu_seq_lens_k)
        return_dict = self.config.return_dict if return_dict is None else return_dict
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            past_key_values=one_cache(past_key_values, cache),
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            cu_seqlens=cu_seqlens,
            max_length_q=max_length_q,
            position_ids=position_ids,
            seq_idx=seq_idx,
            cp_context=cp_context,
        )
        x = output.last_hidden_state
        if targets is None:
            kept = logits_to_keep
            x = x[:, -kept:] if isinstance(kept, int) else x[:, kept]
            loss, logits = None, self.lm_head(x)
        elif loss_function is not None:
            given = {"num_items_in_batch": num_items_in_batch, "shift_labels": shift_labels}
            kwargs |= {name: value for name, value in given.items() if value is not None}
            logits = self.lm_head(x)
            loss = loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        else:
            if cu_seqlens is None and cp_context is None and shift_labels is None:
                again = starts_again(position_ids, seq_idx, attention_mask, *labels.shape)
                if again is not None:
                    targets = labels.masked_fill(again.to(labels.device), IGNORE_INDEX)
            args = (self.lm_head, x, targets, self.config, self.training, num_items_in_batch)
            shifted = shift_labels is not None
            loss, logits = head_and_loss(*args, cu_seqlens, cp_context, shifted)
        result = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=output.hidden_states,
            **{CACHE: getattr(output, CACHE)},
        )
        return result if return_dict else result.to_tuple()

    def _chosen_loss(self, labels: Tensor | None, cp_context: Any) -> Callable[..., Tensor] | None:
        """The loss_function, if it or a loss_type was set, else None; raises if it cannot be
        used.
        """
        is_set = hasattr(self, "_loss_function")
        if not is_set and self.loss_type in (None, "ForCausalLM"):
            return None
        if labels is None and not is_set:
            raise ValueError(
                f"GLAForCausalLM: expected loss_type = {self.loss_type!r} to have labels, got "
                "shift_labels alone"
            )
        if cp_context is not None:
            raise NotImplementedError(
                "GLAForCausalLM: expected no loss_function beside cp_context, got one; it would "
                "see one rank's tokens"
            )
        return self.loss_function
