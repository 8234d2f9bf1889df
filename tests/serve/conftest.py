"""A model of bytes, and a stand-in for CUDA graphs of an engine."""

import functools
import types

import pytest
from models import make_model

from gla_ext.decode import _capture
from gla_ext.serve import engine, prompts


@pytest.fixture(scope="module")
def model():
    return make_model(vocab_size=256, eos_token_id=None)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """The model, saved."""
    path = tmp_path_factory.mktemp("model") / "checkpoint"
    model.save_pretrained(path)
    return path


@pytest.fixture
def captures(monkeypatch):
    """What the graphs that are captured are of, a step or a prompt, and those that are replayed."""
    captured, replayed = [], []

    def capture(call, device, shared):
        of = "step" if isinstance(call, functools.partial) else "prompt"

        def replay():
            replayed.append(of)
            call()

        assert isinstance(shared, _capture.SharedMemory)
        captured.append(of)
        call()
        return types.SimpleNamespace(replay=replay)

    monkeypatch.setattr(_capture, "capture", capture)
    monkeypatch.setattr(engine, "uses_graph", lambda *_: True)
    monkeypatch.setattr(prompts, "TOKENS", (8, 128))
    monkeypatch.setattr(prompts, "PIECES", (1, 3))
    return captured, replayed
