"""examples/train.slurm as two nodes run it, here on one machine: two torchruns of two processes."""

import os
import socket
import subprocess
import sys

import pytest
from common import ROOT, assert_close
from test_training_runs import RESUME, flags

from gla_ext import train
from gla_ext.model.checkpoint import load_model, read_metadata
from gla_ext.train.run_folder import CHECKPOINT, folders

# What SLURM and torch have under these names: the first node, the command on each of two nodes.
COMMANDS = {
    "scontrol": 'test "$*" = "show hostnames one,two" && printf "localhost\\ntwo\\n"',
    "srun": 'shift; "$@" & first=$!; "$@"; status=$?; wait $first && exit $status',
    "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hybrid", "replicate"])
def test_two_nodes_train_as_one_process(folder, tmp_path, kind):
    """Then one process goes on from their checkpoint."""
    for name, code in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{code}\n")
        (tmp_path / name).chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    out, args = tmp_path / "run", flags(folder, 6)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PORT": port,
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": "one,two",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "2",
    }
    script = [str(ROOT / "examples" / "train.slurm"), *args, "--out", str(out)]
    found = subprocess.run(
        ["bash", *script, "--parallel", kind], env=environment, capture_output=True, timeout=200,
        text=True, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    assert f"Processes: 4 on 2 nodes, 4 x data, 1 x context, 1 x tensor; --parallel {kind}" in (
        found.stdout
    )
    assert len(folders(out)) == (kind == "hybrid")
    assert train.main([*args, "--out", str(tmp_path / "one")]) == 0
    pairs = zip(
        load_model(out).parameters(), load_model(tmp_path / "one").parameters(), strict=True
    )
    for mine, theirs in pairs:
        assert_close(mine, theirs, 1e-3)
    assert train.main(["--out", str(out), *RESUME, "cpu", "--steps", "7"]) == 0
    assert read_metadata(out / CHECKPOINT)["step"] == 7
