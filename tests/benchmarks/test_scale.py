"""The benchmark of two GPUs, on two processes of the CPU."""

import os
import subprocess
import sys

import pytest
from common import ROOT
from parts import ranks_on_paper


def test_latency_and_bandwidth_of_an_all_gather():
    times = {size: ranks_on_paper.gather_time(4, size, 1e-5, 2e11) for size in (1000, 10**6)}
    latency, bandwidth = ranks_on_paper.latency_and_bandwidth(times, 4)
    assert latency == pytest.approx(1e-5) and bandwidth == pytest.approx(2e11)
    # Between hosts the network's.
    far = ranks_on_paper.gather_time(64, 10**6, 1e-5, 2e11)
    assert far == pytest.approx(1e-5 + 63e6 / ranks_on_paper.NETWORK)


@pytest.mark.slow
def test_it_checks_and_then_measures(tmp_path):
    page = tmp_path / "page.md"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "benchmarks/bench_scale.py", "--small", "--repeats", "1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*command, "--only", "operator", "training", "--markdown", str(page)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "WRONG" not in result.stdout and result.stdout.count("right, error") == 10
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0] for row in rows[1:]] == [
        "| chunk_gla, as many tokens a rank",
        "| chunk_gla, the tokens cut",
        "| chunk_gla, 16 rows a rank, as many tokens",
        "| chunk_gla, as many tokens a rank, on paper",
        "| context parallel training step",
    ]
