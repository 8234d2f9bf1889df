"""The losses of one run, in one process, by replicas and by shards."""

import json
import statistics
from pathlib import Path

import pytest
import torch
from launching import torchrun

from gla_ext.train.presets import PRESETS

SMALL = {"steps": 40, "batch_size": 4, "seq_len": 32, "hidden_size": 32, "layers": 2, "heads": 2}
CHANGES = {"steps": 200, "lr": 3e-4, "batch_size": 16, "dtype": "float32"}
LARGE = vars(PRESETS["cuda"].settings) | CHANGES


@pytest.mark.slow
def test_losses_are_one_process_s(tmp_path, device):
    """On GPUs of 200 updates of 50 M parameters. They are in fp32, since in bf16 rounding alone
    moves a loss by .06.
    """
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    settings, losses = json.dumps(LARGE if device == "cuda" else SMALL), {}
    for kind, processes in (("one", 1), ("replicate", 2), ("shard", 2)):
        script, out = Path(__file__).with_name("losses_run.py"), tmp_path / kind
        status, text = torchrun(processes, script, kind, device, out, settings)
        assert status == 0, text
        losses[kind] = json.loads(out.read_text())
    one = losses.pop("one")
    assert one[-1] < one[0] - 1
    for kind, found in losses.items():
        worst = max(abs(a - b) for a, b in zip(one, found, strict=True))
        last = abs(statistics.fmean(one[-50:]) - statistics.fmean(found[-50:]))
        print(f"{kind}: each loss within {worst:.5f}, the mean of the last 50 within {last:.5f}")
        assert worst < 0.01 and last < 0.003, kind
