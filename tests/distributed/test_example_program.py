"""examples/train_distributed.py under torchrun, as docs/distributed.md has it."""

import re

import pytest
from common import ROOT, assert_close
from launching import torchrun

from gla_ext.model.checkpoint import load_model

# Few updates at a low rate: Adam divides a gradient by its size, so that rounding grows with each.
TINY = ["--steps", "11", "--lr", "1e-3", "--batch-size", "4", "--seq-len", "32"]
TINY += ["--hidden-size", "32"]


EXAMPLE = ROOT / "examples" / "train_distributed.py"


def launched(processes, out, *options):
    return torchrun(processes, EXAMPLE, *TINY, "--device", "cpu", "--out", out, *options)


def trained(processes, out, *options):
    """Losses that the program prints, and the parameters of the model that it writes."""
    status, text = launched(processes, out, *options)
    assert status == 0, text
    found = re.findall(rf"step \d+: ([\d.]+) bits/byte on {processes} processes", text)
    return [float(x) for x in found], dict(load_model(out).named_parameters())


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    losses, weights = trained(1, tmp_path_factory.mktemp("alone") / "model")
    assert len(losses) == 2 and losses[1] < 0.95 * losses[0]
    return losses, weights


@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], id="fsdp", marks=pytest.mark.slow),
        pytest.param(["--tensor-parallel", "2"], id="tensor", marks=pytest.mark.slow),
        pytest.param(["--context-parallel", "2"], id="context", marks=pytest.mark.slow),
    ],
)
def test_two_processes_train_as_one(alone, tmp_path, options):
    losses, weights = trained(2, tmp_path / "model", *options)
    assert losses == pytest.approx(alone[0], abs=2e-3)
    for name, weight in weights.items():
        assert_close(weight, alone[1][name], 1e-4, name=name)


@pytest.mark.slow
def test_sizes_that_do_not_divide(tmp_path):
    status, text = launched(1, tmp_path / "model", "--tensor-parallel", "2")
    assert "expected the number of processes to be a multiple of 2, got 1" in text
    assert status and not (tmp_path / "model").exists()
