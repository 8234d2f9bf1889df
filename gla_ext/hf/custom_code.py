"""Models on the Hub that can be loaded with `trust_remote_code=True`, without importing gla_ext."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

MODULE = "modeling_gla_ext"
_CLASSES = {
    "AutoModel": "GLAModel",
    "AutoModelForCausalLM": "GLAForCausalLM",
    "AutoModelForQuestionAnswering": "GLAForQuestionAnswering",
    "AutoModelForSequenceClassification": "GLAForSequenceClassification",
    "AutoModelForTokenClassification": "GLAForTokenClassification",
}
# Separate classes, because transformers, when it saves a model that was loaded this way, copies the
# file of the model's class.
_SOURCE = '''"""The classes of gla_ext.hf, for Auto classes with trust_remote_code=True.

Needs gla_ext, installed from its source folder or a wheel: it is on no package index.
"""

import gla_ext.hf


class GLAConfig(gla_ext.hf.GLAConfig):
    def __init__(self, **options):  # transformers makes another where there is none
        super().__init__(**options)

''' + "\n".join(
    f"\nclass {name}(gla_ext.hf.{name}):\n    config_class = GLAConfig\n"
    for name in _CLASSES.values()
)


def add_custom_code(model: PreTrainedModel) -> PreTrainedModel:
    """Makes `save_pretrained` and `push_to_hub` write a file with which transformers' Auto classes
    find gla_ext's classes, given only `trust_remote_code=True`. gla_ext must still be installed.

        gla_ext.hf.add_custom_code(model).push_to_hub("name/of-a-model")

    Args:
        model: a model of `gla_ext.hf`.

    Returns:
        The model.
    """
    names = {"AutoConfig": "GLAConfig"} | _CLASSES
    model.config.auto_map = {auto: f"{MODULE}.{name}" for auto, name in names.items()}
    return model


def write_custom_code(model: PreTrainedModel, folder: str | Path) -> None:
    """Writes the file next to a config.json that refers to it."""
    auto_map = getattr(model.config, "auto_map", None) or {}
    if f"{MODULE}.GLAConfig" in auto_map.values():
        (Path(folder) / f"{MODULE}.py").write_text(_SOURCE, encoding="utf-8")
