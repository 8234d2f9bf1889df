"""An old checkpoint of FLA's, converted to today's form in a new folder.

    python -m gla_ext.model.convert OLD NEW

OLD holds config.json and model.safetensors, several such files, or pytorch_model.bin, which is read
without running code. NEW gets config.json, model.safetensors in the same dtypes, and the other
files of OLD, such as a tokenizer. gla_ext, FLA and transformers can read it.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from torch import Tensor

from gla_ext.model.causal_lm import GLAForCausalLM
from gla_ext.model.config import GLAConfig
from gla_ext.model.files import read_json, write_text
from gla_ext.model.legacy import modern_tensors
from gla_ext.model.tensors import (
    CONFIG_FILE,
    INDEX_FILE,
    MODEL_FILE,
    fitting,
    read_model_tensors,
    write_tensors,
)

_PICKLE = "pytorch_model.bin"
_WEIGHTS = ("*.safetensors", "*.bin", INDEX_FILE, f"{_PICKLE}.index.json", CONFIG_FILE)


def convert(old: str | Path, new: str | Path) -> None:
    """Writes the model of a folder to a new folder, in today's form.

    Args:
        old: the folder to read.
        new: the folder to make; it must not exist or must be empty.

    Raises:
        FileNotFoundError: if config.json or the weights are missing.
        FileExistsError: if new has files.
        ValueError: if the tensors do not match the configuration, or that is invalid.
        NotImplementedError: for an option that is not implemented.
    """
    old, new = Path(old), Path(new)
    config = GLAConfig.load(old / CONFIG_FILE)
    values = read_json(old / CONFIG_FILE)
    tensors = fitting(GLAForCausalLM, config, _read(old))
    if new.exists() and any(new.iterdir()):
        raise FileExistsError(f"convert: expected {new} to be empty or not to be there")
    new.mkdir(parents=True, exist_ok=True)
    for file in sorted(old.iterdir()):
        if file.is_file() and not any(file.match(pattern) for pattern in _WEIGHTS):
            shutil.copy(file, new)
    write_tensors(new / MODEL_FILE, tensors, metadata={"format": "pt"})
    kept = {name: values[name] for name in ("torch_dtype", "dtype") if name in values}
    write_text(new / CONFIG_FILE, json.dumps(config.to_dict() | kept, indent=2) + "\n")


def _read(folder: Path) -> dict[str, Tensor]:
    if (folder / _PICKLE).is_file() and not (folder / MODEL_FILE).is_file():
        try:
            options = {"map_location": "cpu", "weights_only": True, "mmap": True}
            return modern_tensors(torch.load(folder / _PICKLE, **options))
        except Exception as error:  # torch and what it unpickles raise nothing narrower
            raise ValueError(
                f"convert: expected {folder / _PICKLE} to hold tensors alone, got {error}"
            ) from error
    return read_model_tensors(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m gla_ext.model.convert", description=__doc__.splitlines()[0]
    )
    parser.add_argument("old", type=Path, help="folder of the checkpoint")
    parser.add_argument("new", type=Path, help="folder to make")
    arguments = parser.parse_args()
    try:
        convert(arguments.old, arguments.new)
    except (OSError, ValueError, NotImplementedError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
