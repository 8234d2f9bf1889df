"""Folders of a model that `load_model` reads, and the sentences of those that it does not."""

import json
import re

import pytest
import torch
from models import make_model

from gla_ext.model import GLAForCausalLM
from gla_ext.model.checkpoint import load_model, model_tensors, read_tensors, write_tensors

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.fixture
def model():
    return make_model(seed=3)


def write_sharded(model, folder):
    """As transformers writes it: files of tensors, and an index."""
    model.save_pretrained(folder)
    tensors, _ = read_tensors(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: SHARDS[i % 2] for i, name in enumerate(tensors)}
    for shard in SHARDS:
        held = {name: tensors[name] for name, place in weight_map.items() if place == shard}
        write_tensors(folder / shard, held)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder, weight_map):
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("tied", [False, True])
def test_shards_are_read_by_the_index(tmp_path, tied):
    model = make_model(tie_word_embeddings=tied)
    write_sharded(model, tmp_path)
    found = model_tensors(GLAForCausalLM.from_pretrained(tmp_path))
    for name, wanted in model_tensors(model).items():
        assert torch.equal(found[name], wanted), name


def test_shards_that_transformers_writes(model, tmp_path):
    transformers = pytest.importorskip("gla_ext.hf")
    theirs = transformers.GLAForCausalLM(transformers.GLAConfig(**model.config.to_dict()))
    theirs.load_state_dict(model.state_dict())
    theirs.save_pretrained(tmp_path, max_shard_size="4KB")
    assert not (tmp_path / "model.safetensors").exists()
    found = load_model(tmp_path).state_dict()
    assert all(torch.equal(found[name], wanted) for name, wanted in model.state_dict().items())


def test_one_file_is_preferred(model, tmp_path):
    model.save_pretrained(tmp_path)
    write_index(tmp_path, {"nothing": "nowhere"})
    (tmp_path / "pytorch_model.bin").touch()
    assert torch.equal(load_model(tmp_path).lm_head.weight, model.lm_head.weight)


def test_folders_that_are_not_whole(model, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"expected .*nowhere to be a folder with config"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"expected .* to hold config\.json$"):
        load_model(tmp_path)
    model.config.save(tmp_path / "config.json")
    either = r"to hold model\.safetensors or model\.safetensors\.index\.json$"
    with pytest.raises(FileNotFoundError, match=either):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_a_pickle_is_not_read(model, tmp_path, name):
    model.config.save(tmp_path / "config.json")
    (tmp_path / name).touch()
    with pytest.raises(
        ValueError,
        match=f"got {name}, a pickle, .* convert it once: python -m gla_ext.model.convert",
    ):
        load_model(tmp_path)


CHANGES = {
    "to hold 'model.norm.weight'": lambda held: held.pop("model.norm.weight"),
    "not to hold 'zzz'": lambda held: held.update(zzz=torch.ones(3)),
    "model.norm.weight to have shape [16], got [7]": lambda held: held.update(
        {"model.norm.weight": torch.ones(7)}
    ),
}


@pytest.mark.parametrize("sentence", CHANGES)
def test_wrong_tensors_are_named(model, tmp_path, sentence):
    model.save_pretrained(tmp_path)
    tensors, _ = read_tensors(tmp_path / "model.safetensors")
    CHANGES[sentence](tensors)
    write_tensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        load_model(tmp_path)


def test_a_missing_shard(model, tmp_path):
    write_sharded(model, tmp_path)
    (tmp_path / SHARDS[1]).unlink()
    with pytest.raises(FileNotFoundError, match=f"to hold {SHARDS[1]}, which model.safetensors.in"):
        load_model(tmp_path)


def test_an_index_that_lies(model, tmp_path):
    weight_map = write_sharded(model, tmp_path)
    name = next(name for name, shard in weight_map.items() if shard == SHARDS[0])
    write_index(tmp_path, weight_map | {name: SHARDS[1]})
    with pytest.raises(ValueError, match=f"expected {SHARDS[1]} to hold '{name}', as model.safete"):
        load_model(tmp_path)
    write_index(tmp_path, {other: shard for other, shard in weight_map.items() if other != name})
    with pytest.raises(ValueError, match=f"expected the file to hold '{name}'"):
        load_model(tmp_path)


@pytest.mark.parametrize("place", ["../model.safetensors", "/model.safetensors", "a/b", ""])
def test_an_index_that_names_files_elsewhere(model, tmp_path, place):
    write_index(tmp_path, dict.fromkeys(write_sharded(model, tmp_path), place))
    with pytest.raises(ValueError, match="to name files beside it, got '"):
        load_model(tmp_path)


@pytest.mark.parametrize("place", ["a" * 300, "a\0b"])
def test_an_index_of_names_that_no_file_has(model, tmp_path, place):
    write_index(tmp_path, dict.fromkeys(write_sharded(model, tmp_path), place))
    with pytest.raises(FileNotFoundError, match=r"to hold a.*, which model.safetensors.index.json"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": []}}']
)
def test_an_index_that_is_none(model, tmp_path, text):
    model.config.save(tmp_path / "config.json")
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(
        ValueError, match=r"to be JSON|a JSON object|a weight_map of tensors and files"
    ):
        load_model(tmp_path)
