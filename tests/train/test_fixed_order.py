"""Runs on a GPU that are the same again, bit for bit."""

import pytest
import torch
from torch.utils import deterministic

from gla_ext.model.checkpoint import read_tensors
from gla_ext.train import command as train
from gla_ext.train.devices import in_fixed_order

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
    command = [*sizes, "--heads", "1", "--layers", "1", "--sample-bytes", "4", "--no-compile"]
    checkpoints = []
    for out in (tmp_path / "first", tmp_path / "second"):
        assert train.main(["--data", str(folder), "--out", str(out), *command, graph]) == 0
        checkpoints.append(read_tensors(out / train.CHECKPOINT)[0])
    first, second = checkpoints
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    assert torch.get_deterministic_debug_mode() == 0
