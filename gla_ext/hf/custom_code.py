"""Models on the Hub that can be loaded with `trust_remote_code=True`, without importing gla_ext."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from gla_ext.model import custom_code


def add_custom_code(model: PreTrainedModel) -> PreTrainedModel:
    """Makes `save_pretrained` and `push_to_hub` write a file with which transformers' Auto classes
    find gla_ext's classes, given only `trust_remote_code=True`. gla_ext must still be installed.

        gla_ext.hf.add_custom_code(model).push_to_hub("name/of-a-model")

    Args:
        model: a model of `gla_ext.hf`.

    Returns:
        The model.
    """
    model.config.auto_map = dict(custom_code.AUTO_MAP)
    return model


def write_custom_code(model: PreTrainedModel, folder: str | Path) -> None:
    """Writes the file next to a config.json that refers to it."""
    auto_map = getattr(model.config, "auto_map", None) or {}
    if custom_code.AUTO_MAP["AutoConfig"] in auto_map.values():
        custom_code.write_custom_code(folder)
