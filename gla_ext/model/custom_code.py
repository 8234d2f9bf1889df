"""A file beside a model by which transformers finds gla_ext's classes."""

from __future__ import annotations

from pathlib import Path

from gla_ext.model.files import write_text

MODULE = "modeling_gla_ext"
CUSTOM_CODE_FILE = f"{MODULE}.py"
_CLASSES = {
    "AutoModel": "GLAModel",
    "AutoModelForCausalLM": "GLAForCausalLM",
    "AutoModelForQuestionAnswering": "GLAForQuestionAnswering",
    "AutoModelForSequenceClassification": "GLAForSequenceClassification",
    "AutoModelForTokenClassification": "GLAForTokenClassification",
}
# What config.json has under auto_map.
AUTO_MAP = {
    auto: f"{MODULE}.{name}" for auto, name in ({"AutoConfig": "GLAConfig"} | _CLASSES).items()
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


def write_custom_code(folder: str | Path) -> None:
    """Writes the file next to a config.json that refers to it."""
    write_text(Path(folder) / CUSTOM_CODE_FILE, _SOURCE)
