"""A model as a folder of safetensors and JSON files, and functions for the tensors in them."""

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
    """Reads a folder that `save_model` or FLA wrote.

    Args:
        folder: holds config.json and model.safetensors, or model.safetensors.index.json and the
            files that it lists. pytorch_model.bin is not read, because it is a pickle.

    Returns:
        The model on CPU, in eval mode, with fp32 parameters whatever the file's dtype.

    Raises:
        FileNotFoundError: if these files are missing.
        ValueError: if config.json holds no configuration, if the tensors do not match it or the
            index, or if there are only tensors in a pickle.
    """
    return GLAForCausalLM.from_pretrained(folder)
