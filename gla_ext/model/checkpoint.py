"""A model as a folder of safetensors and JSON, and the tensors in such files."""

from __future__ import annotations

from pathlib import Path

from gla_ext.model.causal_lm import GLAForCausalLM
from gla_ext.model.tensors import (
    CONFIG_FILE,
    INDEX_FILE,
    MODEL_FILE,
    load_tensors,
    model_tensors,
    read_metadata,
    read_tensors,
    save_model,
    write_tensors,
)

__all__ = [
    "CONFIG_FILE",
    "INDEX_FILE",
    "MODEL_FILE",
    "load_model",
    "load_tensors",
    "model_tensors",
    "read_metadata",
    "read_tensors",
    "save_model",
    "write_tensors",
]


def load_model(folder: str | Path) -> GLAForCausalLM:
    """Reads what `save_model`, or FLA, wrote.

    Args:
        folder: holds config.json and model.safetensors, or model.safetensors.index.json and the
            files that it names. Not pytorch_model.bin, which is a pickle.

    Returns:
        The model on CPU, in eval mode, its parameters fp32 whatever the file's dtype.

    Raises:
        FileNotFoundError: without these files.
        ValueError: if config.json holds no configuration, the tensors are not those of it or of
            the index, or there are none but in a pickle.
    """
    return GLAForCausalLM.from_pretrained(folder)
