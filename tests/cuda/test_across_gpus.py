"""chunk_gla over two GPUs by NCCL; the ranks on one GPU are sm90/test_across_ranks.py."""

import os
import subprocess
import sys

import pytest
import torch
from common import ROOT

pytestmark = pytest.mark.cuda


def test_results_are_one_gpu_s():
    """Every kind of plan, both layouts, packed sequences, and a CUDA graph."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "benchmarks/parts/check_across_ranks.py", "--graphs"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "WRONG" not in result.stdout and result.stdout.count("right") > 20
