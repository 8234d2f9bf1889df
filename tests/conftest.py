import os
import random
from pathlib import Path

import hypothesis
import pytest
import torch

from gla_ext.data import load_corpus

hypothesis.settings.register_profile(
    "default", deadline=None, max_examples=40, derandomize=True, print_blob=True
)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture
def nan_in_fresh_memory():
    """Makes torch fill what it allocates without a value with NaN, so that nothing goes
    unwritten."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _words(seed: int, count: int) -> bytes:
    choose = random.Random(seed).choice
    return " ".join(choose(["def", "return", "x", "y", "+", "\n"]) for _ in range(count)).encode()


def _write_texts(folder: Path) -> Path:
    """Writes twelve text files into a new folder, two of them in another one inside."""
    for i in range(12):
        file = folder / ("sub" if i < 2 else ".") / f"{i}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(_words(i, 200 + 10 * i))
    return folder


@pytest.fixture
def folder(tmp_path):
    """A folder of text files."""
    return _write_texts(tmp_path / "text")


@pytest.fixture
def corpus(folder):
    return load_corpus(folder)
