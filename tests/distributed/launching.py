"""A script in processes of torchrun."""

import os
import subprocess
import sys

import pytest
from common import ROOT


def torchrun(processes, script, *args):
    """Status, and output with errors."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes), str(script), *map(str, args)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "helpers")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        text, _ = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends what it has started
        text, _ = process.communicate(timeout=60)
        pytest.fail(f"the job did not end by itself:\n{text}")
    return process.returncode, text
