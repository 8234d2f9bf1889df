"""The benchmark of two GPUs, on two processes of the CPU."""

import os
import subprocess
import sys

import pytest
from common import ROOT


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
        "| context parallel training step",
    ]
