import os
import random
from pathlib import Path

import hypothesis
import pytest
import torch

from gla_ext import _C
from gla_ext.data import load_corpus

# What cuBLAS asks for under nan_in_fresh_memory; read when it starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

hypothesis.settings.register_profile(
    "default", deadline=None, max_examples=40, derandomize=True, print_blob=True
)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def why_no_cuda() -> str | None:
    """Why tests marked `cuda` cannot run here, or None if they can."""
    if _C.build_info()["cuda"] is None:
        return "this build of gla_ext has no CUDA kernels"
    if not torch.cuda.is_available():
        return "no CUDA GPU"
    return None


def pytest_generate_tests(metafunc):
    """A test that takes a `device` runs on CPU and, marked `cuda`, on CUDA."""
    if "device" in metafunc.fixturenames:
        cuda = pytest.param("cuda", marks=pytest.mark.cuda)
        metafunc.parametrize("device", ["cpu", cuda])


def pytest_collection_modifyitems(items):
    """CUDA has no fp64 kernels."""
    fp64_on_cuda = {"device": "cuda", "dtype": torch.float64}.items()
    items[:] = [x for x in items if not fp64_on_cuda <= _parameters(x).items()]


def _parameters(item) -> dict:
    return item.callspec.params if hasattr(item, "callspec") else {}


def pytest_runtest_setup(item):
    if item.get_closest_marker("cuda") and (reason := why_no_cuda()):
        pytest.skip(reason)


ACCURACY = pytest.StashKey[dict]()


@pytest.fixture
def accuracy(request) -> dict:
    """Errors by (row, quantity), the worst of the run: what `pytest_terminal_summary` prints."""
    return request.config.stash.setdefault(ACCURACY, {})


def pytest_terminal_summary(terminalreporter, config):
    """The table of csrc/README.md, as Markdown, after a run that measured it."""
    if errors := config.stash.get(ACCURACY, None):
        rows, columns = (list(dict.fromkeys(x)) for x in zip(*errors, strict=True))
        terminalreporter.section("relative RMS error against the fp64 recurrence")
        terminalreporter.line(f"| dtype | gates | {' | '.join(columns)} |")
        terminalreporter.line("|---|---|" + "--:|" * len(columns))
        for row in rows:
            cells = " | ".join(f"{errors[row, x]:.1e}" for x in columns)
            terminalreporter.line(f"| {' | '.join(row)} | {cells} |")


@pytest.fixture
def nan_in_fresh_memory():
    """Makes torch fill what it allocates without a value with NaN, so that nothing goes unwritten.

    It warns only: what the reference uses on CUDA is not deterministic there, as torch sees it.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
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
