"""Safetensors files that are always complete, and the tensors of a model in them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gla_ext.model.config import GLAConfig
from gla_ext.model.files import json_object, read_json, replacing
from gla_ext.model.legacy import modern_tensors

MODEL_FILE, CONFIG_FILE = "model.safetensors", "config.json"
INDEX_FILE = "model.safetensors.index.json"  # of a model in several files, as saved by transformers
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_METADATA_KEY = "gla_ext"


def save_model(model: nn.Module, folder: str | Path) -> None:
    """Writes model.safetensors and config.json, which FLA's `from_pretrained` can also read.

    Args:
        model: a `GLAForCausalLM`; tied embeddings are stored once, as the embeddings.
        folder: created if it does not exist.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / MODEL_FILE, model_tensors(model), metadata={"format": "pt"})
    model.config.save(folder / CONFIG_FILE)


def read_model(folder: str | Path) -> tuple[GLAConfig, dict[str, Tensor]]:
    """The configuration and tensors for `gla_ext.model.checkpoint.load_model`; raises its
    errors.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"load_model: expected {folder} to be a folder with {CONFIG_FILE} and {MODEL_FILE}, "
            "got no folder; a model of the Hub is to be downloaded first"
        )
    if not (folder / CONFIG_FILE).is_file():
        raise FileNotFoundError(
            f"load_model: expected {folder} to hold {CONFIG_FILE}{_unfinished(folder)}"
        )
    return GLAConfig.load(folder / CONFIG_FILE), read_model_tensors(folder)


def _unfinished(folder: Path) -> str:
    """The end of an error message: how to finish the training run that stopped in this folder, or
    ''.
    """
    checkpoint = folder / "checkpoint.safetensors"
    step = read_metadata(checkpoint).get("step") if checkpoint.is_file() else None
    if step is None:
        return ""
    command = f"python -m gla_ext.train --out {folder} --resume"
    return (
        f", got a training run that stopped at step {step}; '{command}' finishes it, "
        f"'{command} --steps {step}' ends it there"
    )


def read_model_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a model in one file or in several, under today's names."""
    if (folder / MODEL_FILE).is_file():
        return modern_tensors(read_tensors(folder / MODEL_FILE)[0])
    if (folder / INDEX_FILE).is_file():
        return modern_tensors(_read_shards(folder / INDEX_FILE))
    if pickle := next((name for name in _PICKLES if (folder / name).exists()), None):
        raise ValueError(
            f"load_model: expected {folder} to hold {MODEL_FILE}, got {pickle}, a pickle, which "
            "may run code when it is read; convert it once: python -m gla_ext.model.convert "
            f"{folder} NEW_FOLDER"
        )
    raise FileNotFoundError(f"load_model: expected {folder} to hold {MODEL_FILE} or {INDEX_FILE}")


def _read_shards(index: Path) -> dict[str, Tensor]:
    """The tensors that an index lists, each read from its file."""
    weight_map = read_json(index, "load_model: ").get("weight_map")
    places = weight_map.values() if isinstance(weight_map, dict) else [None]
    if not all(isinstance(place, str) for place in places):
        raise ValueError(f"load_model: expected {index} to hold a weight_map of tensors and files")
    shards = sorted(set(places))
    tensors = {}
    for shard in shards:
        if not shard or Path(shard).name != shard:
            raise ValueError(f"load_model: expected {index} to name files beside it, got {shard!r}")
        if not os.path.isfile(index.parent / shard):  # also for what cannot be a name
            raise FileNotFoundError(
                f"load_model: expected {index.parent} to hold {shard:.99}, which {index.name} names"
            )
        with _opened(index.parent / shard) as file:
            held = set(file.keys())
            for name in (name for name, place in weight_map.items() if place == shard):
                if name not in held:
                    raise ValueError(
                        f"load_model: expected {shard} to hold {name!r}, as {index.name} says"
                    )
                tensors[name] = file.get_tensor(name)
    return tensors


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's state_dict, without the output matrix if it is tied to the embeddings."""
    tensors = model.state_dict()
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    return tensors


def load_tensors(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copies tensors, in the form that `model_tensors` returns, into a model.

    Raises:
        ValueError: for a missing or unknown name, or a wrong shape.
    """
    model.load_state_dict(check_tensors_of(model, tensors), strict=False)


def fitting(
    kind: Callable[[GLAConfig], nn.Module], config: GLAConfig, tensors: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The result of `check_tensors_of` for a model of a kind, which is not made for it: no memory
    is taken for a configuration that the tensors do not have.

    Raises:
        ValueError: also for a configuration of no model.
    """
    last = f"model.layers.{config.num_hidden_layers - 1}."
    if not any(name.startswith(last) for name in tensors):
        raise ValueError(f"load_tensors: expected the file to hold tensors of {last}*, got none")
    try:
        with torch.device("meta"):
            model = kind(config)
    except NotImplementedError:
        raise
    except (OverflowError, RuntimeError) as error:
        raise ValueError(f"load_tensors: expected sizes of a model, got {error}") from error
    return check_tensors_of(model, tensors)


def check_tensors_of(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors without an unused output matrix; raises the errors of `load_tensors`."""
    expected = model_tensors(model)
    tensors = {
        name: tensor
        for name, tensor in tensors.items()
        if name != "lm_head.weight" or not model.config.tie_word_embeddings
    }
    if odd := sorted(expected.keys() ^ tensors.keys()):
        kind = "to hold" if odd[0] in expected else "not to hold"
        raise ValueError(f"load_tensors: expected the file {kind} {odd[0]!r}")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise ValueError(
                f"load_tensors: expected {name} to have shape {list(expected[name].shape)}, got "
                f"{list(tensor.shape)}"
            )
    return tensors


def write_tensors(
    path: str | Path, tensors: dict[str, Tensor], metadata: dict[str, Any] | None = None
) -> None:
    """Writes a safetensors file atomically: at any moment `path` is the old file or the new one.

    Args:
        path: the file, written by `gla_ext.model.files.replacing`.
        tensors: names and tensors, on any device.
        metadata: anything that JSON can represent. The header holds all of it as JSON, and also its
            string values as such, which other readers expect. Default: None.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    metadata = metadata or {}
    header = {key: value for key, value in metadata.items() if isinstance(value, str)}
    header[_METADATA_KEY] = json.dumps(metadata)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        with replacing(path) as file:
            save_file(tensors, file, metadata=header)
    except SafetensorError as error:
        raise OSError(f"cannot write {path}: {error}") from error


def read_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Reads a safetensors file: its tensors on CPU, and the metadata of `write_tensors`, or {}.

    Raises:
        FileNotFoundError: if the file does not exist.
        ValueError: if the file is damaged, or not a safetensors file.
    """
    with _opened(path) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    return tensors, read_metadata(path)


def read_metadata(path: str | Path) -> dict[str, Any]:
    """The metadata of `write_tensors`, or {}, without reading tensors; raises as `read_tensors`."""
    with _opened(path) as file:
        header = file.metadata() or {}
    return json_object(header.get(_METADATA_KEY, "{}"), path)


@contextlib.contextmanager
def _opened(path: str | Path) -> Iterator[Any]:
    """A safetensors file, open for reading."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"expected {path} to be a whole safetensors file: {error}") from error
