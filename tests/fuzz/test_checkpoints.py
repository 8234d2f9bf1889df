"""Damaged folders of a model are loaded, or refused with an error that the reader documents."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from fuzzing import VALUES, as_bytes, damaged, edited, refused
from hypothesis import given
from hypothesis import strategies as st
from models import make_model
from safetensors.torch import save_file

from gla_ext.model.checkpoint import load_model, read_metadata, read_tensors
from gla_ext.model.config import GLAConfig
from gla_ext.model.convert import convert

CONFIG, MODEL, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLE, PART = "pytorch_model.bin", "part.safetensors"
DOCUMENTED = (FileNotFoundError, ValueError, NotImplementedError)
SPEC = {"layers": [1], "num_heads": 2, "num_kv_heads": 1, "window_size": 8, "rope_theta": 1e4}
OLD = {"rms_norm_eps": 1e-5, "num_attention_heads": 4, "share_conv_kernel": False, "use_gk": True}
WHOLE = make_model(attn=SPEC).config.to_dict()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The bytes of a model's files."""
    folder = tmp_path_factory.mktemp("model")
    model = make_model(attn=SPEC)
    model.save_pretrained(folder)
    torch.save(model.state_dict(), folder / PICKLE)
    index = {"weight_map": dict.fromkeys(model.state_dict(), PART)}
    (folder / INDEX).write_bytes(as_bytes(index))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def in_a_folder(files, reads, documented=DOCUMENTED):
    """Calls a reader with a folder of these files, and refuses what it does not document."""
    with tempfile.TemporaryDirectory() as folder:
        for name, data in files.items():
            Path(folder, name).write_bytes(data)
        with refused(documented):
            reads(Path(folder))


@given(edited(WHOLE | OLD))
def test_config(values):
    with tempfile.TemporaryDirectory() as folder, refused(DOCUMENTED):
        path = Path(folder, CONFIG)
        path.write_bytes(as_bytes(values))
        config = GLAConfig.load(path)
        config.save(path)
        assert GLAConfig.load(path) == config


@given(data=damaged(as_bytes(WHOLE)))
def test_bytes_of_a_config(data):
    in_a_folder({CONFIG: data}, lambda folder: GLAConfig.load(folder / CONFIG))


@given(data=st.data())
def test_a_model_of_another_config(whole, data):
    config = as_bytes(data.draw(edited(WHOLE)))
    in_a_folder({CONFIG: config, MODEL: whole[MODEL]}, load_model)


@given(data=st.data())
def test_tensors(whole, data):
    def read(folder):
        read_metadata(folder / MODEL)
        read_tensors(folder / MODEL)
        load_model(folder)

    in_a_folder({CONFIG: whole[CONFIG], MODEL: data.draw(damaged(whole[MODEL]))}, read)


@given(data=st.data())
def test_the_header_of_tensors(whole, data):
    end = 8 + int.from_bytes(whole[MODEL][:8], "little")
    header = as_bytes(data.draw(edited(json.loads(whole[MODEL][8:end]))))
    tensors = len(header).to_bytes(8, "little") + header + whole[MODEL][end:]
    in_a_folder({CONFIG: whole[CONFIG], MODEL: tensors}, load_model)


@given(metadata=VALUES | st.text().map(json.dumps))
def test_the_metadata_of_tensors(metadata):
    def read(folder):
        save_file({"x": torch.zeros(1)}, folder / MODEL, {"gla_ext": json.dumps(metadata)})
        assert isinstance(read_metadata(folder / MODEL), dict)

    in_a_folder({}, read)


@given(data=st.data())
def test_an_index(whole, data):
    index = data.draw(damaged(whole[INDEX]) | edited(json.loads(whole[INDEX])).map(as_bytes))
    in_a_folder({CONFIG: whole[CONFIG], PART: whole[MODEL], INDEX: index}, load_model)


@given(data=st.data())
def test_a_pickle(whole, data):
    def read(folder):
        convert(folder, folder / "new")

    documented = (*DOCUMENTED, FileExistsError)
    pickle = data.draw(damaged(whole[PICKLE]))
    in_a_folder({CONFIG: whole[CONFIG], PICKLE: pickle}, read, documented)
