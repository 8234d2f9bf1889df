"""Runs on a GPU that are the same again, bit for bit.

Equal bits (see common.py): the same calls.
"""

import functools
import os
import subprocess
import sys
from contextlib import nullcontext as nothing

import pytest
import torch
from common import ROOT
from torch.utils import deterministic

from gla_ext.devices import in_fixed_order
from gla_ext.model.checkpoint import read_tensors
from gla_ext.train import CHECKPOINT, command

CUDA = torch.device("cuda")


def modes():
    return torch.get_deterministic_debug_mode(), deterministic.fill_uninitialized_memory


@pytest.mark.parametrize("before", [0, 1, 2])
def test_modes_are_as_strict_inside_and_as_before_outside(before):
    filled = deterministic.fill_uninitialized_memory
    torch.set_deterministic_debug_mode(before)
    try:
        with pytest.raises(KeyError), in_fixed_order(CUDA):
            assert modes() == (max(before, 1), False)
            raise KeyError
        assert modes() == (before, filled)
        with in_fixed_order(torch.device("cpu")):
            assert modes() == (before, filled)
    finally:
        torch.set_deterministic_debug_mode(0)


@pytest.mark.cuda
@pytest.mark.parametrize("graph", ["--cuda-graph", "--no-cuda-graph"])
def test_a_run_is_the_same_again(folder, tmp_path, graph):
    """torch sums the gradient of 256 embeddings over 65,536 bytes by atomics, left to itself."""
    sizes = ["--steps", "8", "--batch-size", "32", "--seq-len", "2048", "--hidden-size", "64"]
    options = [*sizes, "--heads", "1", "--layers", "1", "--sample-bytes", "4", "--no-compile"]
    run = [sys.executable, "-m", "gla_ext.train", "--data", str(folder), *options, graph]
    environment = dict(os.environ)
    environment.pop("CUBLAS_WORKSPACE_CONFIG", None)  # which only these tests have
    checkpoints = []
    for out in (tmp_path / "first", tmp_path / "second"):
        subprocess.run([*run, "--out", str(out)], cwd=ROOT, env=environment, check=True)
        checkpoints.append(read_tensors(out / CHECKPOINT)[0])
    first, second = checkpoints
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@pytest.mark.slow
def test_the_command_asks_for_it_unless_it_compiles(folder, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(command, "in_fixed_order", lambda device: asked.append(device) or nothing())
    sizes = ["--steps", "1", "--batch-size", "1", "--seq-len", "8", "--hidden-size", "16"]
    options = [*sizes, "--heads", "1", "--layers", "1", "--sample-bytes", "1", "--device", "cpu"]
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    for compiled in ("--compile", "--no-compile"):
        where = ["--data", str(folder), "--out", str(tmp_path / compiled)]
        assert command.main([*where, *options, compiled]) == 0
    assert asked == [torch.device("cpu")]
