"""The configuration of a GLA language model as transformers knows configurations."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from transformers import PretrainedConfig

from gla_ext.model import config
from gla_ext.model.attention import Spec, read_attn
from gla_ext.model.legacy import modern_options

# Options of FLA's that do nothing there; gla_ext.model.config.GLAConfig.from_dict refuses them.
_FLA_DEFAULTS: dict[str, Any] = {"use_gk": True, "use_gv": False}
_DEFAULTS = {field.name: field.default for field in fields(config.GLAConfig)} | _FLA_DEFAULTS
# PretrainedConfig's own, in some versions of transformers with other defaults.
_COMMON = ("pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings")


class GLAConfig(PretrainedConfig):
    """What `GLAForCausalLM` is built from: names and defaults of FLA 0.6.0's `GLAConfig`.

    It holds every option of FLA's, so that a config.json passes through unchanged. `core()`, and
    with it the models, refuse by name those that are not built here.

    Args:
        **options: the fields of `gla_ext.model.config.GLAConfig`, documented there; FLA's `use_gk`
            and `use_gv`, which FLA reads nowhere and of which only the default is taken; and what
            `transformers.PretrainedConfig` takes.
    """

    model_type = "gla"
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
        """Which blocks have attention: see `gla_ext.model.config.GLAConfig`."""
        return self.__dict__["attn"]

    @attn.setter
    def attn(self, value: Spec | list[Spec] | None) -> None:
        self.__dict__["attn"] = read_attn(value, self.num_hidden_layers)

    def core(self) -> config.GLAConfig:
        """The same model as gla_ext's own configuration.

        Raises:
            NotImplementedError: for options that are not built here.
            ValueError: for sizes out of range.
        """
        return config.GLAConfig.from_dict({name: getattr(self, name) for name in _DEFAULTS})
