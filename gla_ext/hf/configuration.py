"""The configuration of a GLA language model as a class of transformers."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from transformers import PretrainedConfig

from gla_ext.hf.parallel import BASE_PLAN
from gla_ext.model import config
from gla_ext.model.attention import Spec, read_attn
from gla_ext.model.legacy import modern_options

# Options of FLA without effect there; gla_ext.model.config.GLAConfig.from_dict rejects other
# values.
_FLA_DEFAULTS: dict[str, Any] = {"use_gk": True, "use_gv": False}
_DEFAULTS = {field.name: field.default for field in fields(config.GLAConfig)} | _FLA_DEFAULTS
# PretrainedConfig's own options, which have other defaults in some versions of transformers.
_COMMON = ("pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings")


class GLAConfig(PretrainedConfig):
    """The configuration of `GLAForCausalLM`, with names and defaults of FLA 0.6.0's `GLAConfig`.

    It holds every option of FLA, so that a config.json is not changed by loading and saving.
    `core()`, and so the models, raise an error that names an option that is not implemented here.

    Args:
        **options: the fields of `gla_ext.model.config.GLAConfig`, documented there; FLA's `use_gk`
            and `use_gv`, which FLA never reads and of which only the default is accepted; and the
            options of `transformers.PretrainedConfig`.
    """

    model_type = "gla"
    base_model_tp_plan = BASE_PLAN
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012  transformers' attribute

    def __init__(self, **options: Any) -> None:
        options = modern_options(options)
        values = {name: options.pop(name, default) for name, default in _DEFAULTS.items()}
        common = {name: values.pop(name) for name in _COMMON}
        for name, value in values.items():
            setattr(self, name, value)
        super().__init__(**common, **options)

    @property
    def attn(self) -> Spec | list[Spec] | None:
        """The blocks that have attention: see `gla_ext.model.config.GLAConfig`."""
        return self.__dict__["attn"]

    @attn.setter
    def attn(self, value: Spec | list[Spec] | None) -> None:
        self.__dict__["attn"] = read_attn(value, self.num_hidden_layers)

    def core(self) -> config.GLAConfig:
        """The same model as gla_ext's own configuration.

        Raises:
            NotImplementedError: for options that are not implemented here.
            ValueError: for sizes out of range.
        """
        return config.GLAConfig.from_dict({name: getattr(self, name) for name in _DEFAULTS})
