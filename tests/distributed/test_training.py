"""Training on many processes: the losses of one, checkpoints that any number goes on from."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from common import ROOT, assert_close

from gla_ext import train
from gla_ext.model.checkpoint import load_model, read_metadata
from gla_ext.train.data import load_corpus
from gla_ext.train.presets import Options
from gla_ext.train.run_folder import CHECKPOINT, METRICS
from gla_ext.train.trainer import Settings, Trainer

TINY = {"steps": 6, "batch_size": 4, "seq_len": 32, "hidden_size": 16, "layers": 2, "heads": 2}
TINY |= {"lr": 1e-2, "warmup": 2}
CPU = torch.device("cpu")


def sharded(folder, **sizes):
    from gla_ext.distributed.training import ShardedTrainer

    corpus = load_corpus(folder)
    return ShardedTrainer(Settings(**TINY), corpus, Options(device="cpu", **sizes))


def run_steps(group, folder, sizes, out):
    """The losses of some steps, then of a trainer that goes on from their checkpoint."""
    first = sharded(folder, **sizes)
    for _ in range(3):
        first.train_step()
    first.save(out)
    bits = first.evaluate()
    for _ in range(3):
        first.train_step()
    again = sharded(folder, **sizes)
    again.load(out)
    for _ in range(3):
        again.train_step()
    parameters = first.consolidated().model.state_dict()
    parameters = parameters if torch.distributed.get_rank() == 0 else {}
    return first._mean_losses(), again._mean_losses(), bits, parameters


def run_going_on(group, folder, sizes, path):
    trainer = sharded(folder, **sizes)
    trainer.load(path)
    while trainer.step < TINY["steps"]:
        trainer.train_step()
    return trainer._mean_losses()


def one_process(folder):
    trainer = Trainer(Settings(**TINY), load_corpus(folder), CPU)
    for _ in range(TINY["steps"]):
        trainer.train_step()
        if trainer.step == 3:
            bits = trainer.evaluate()
    return trainer, bits


SIZES = {
    "FSDP2": {},
    "tensor": {"tensor_parallel": 2},
    "context": {"context_parallel": 2},
    "context and tensor": {"context_parallel": 2, "tensor_parallel": 2},
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_losses_and_weights_are_one_process_s(pool, folder, tmp_path, sizes):
    trainer, bits = one_process(folder)
    path = tmp_path / "checkpoint.safetensors"
    for losses, again, found, parameters in pool(run_steps, folder, sizes, path):
        assert_close(losses, trainer.losses, 1e-5)
        assert torch.equal(losses, again)
        assert found == pytest.approx(bits, rel=1e-5)
        if parameters:
            for name, x in trainer.model.state_dict().items():
                assert_close(parameters[name], x, 1e-3, name=name)
    assert [f.name for f in tmp_path.glob("*.dcp")] == [read_metadata(path)["sharded"]]
    # As one process, and with other sizes.
    alone = Trainer(Settings(**TINY), load_corpus(folder), CPU)
    alone.load(path)
    while alone.step < TINY["steps"]:
        alone.train_step()
    assert_close(alone.losses, trainer.losses, 1e-5)
    others = {} if sizes else {"tensor_parallel": 2}
    for losses in pool(run_going_on, folder, others, path):
        assert_close(losses, trainer.losses, 1e-5)


def test_going_on_from_one_process(pool, folder, tmp_path):
    trainer = Trainer(Settings(**TINY), load_corpus(folder), CPU)
    while trainer.step < TINY["steps"]:
        if trainer.step == 3:
            trainer.save(tmp_path / "checkpoint.safetensors")
        trainer.train_step()
    path = tmp_path / "checkpoint.safetensors"
    for losses in pool(run_going_on, folder, {"tensor_parallel": 2}, path):
        assert_close(losses, trainer.losses, 1e-5)


def torchrun(*args, N=2):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(N)]
    command += ["--standalone", "-m", "gla_ext.train", *map(str, args)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip


def test_killed_and_resumed(folder, tmp_path):
    """A kill without warning in the middle, then another number of processes."""
    options = ["--data", folder, "--device", "cpu", "--sample-bytes", 8, "--save-every", 5]
    for name, value in TINY.items():
        options += [f"--{name.replace('_', '-')}", value if name != "steps" else 60]
    out = tmp_path / "run"
    process = torchrun(*options, "--out", out)
    checkpoint, deadline = out / CHECKPOINT, time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(ValueError, FileNotFoundError):
            if read_metadata(checkpoint)["step"] >= 10:
                break
        time.sleep(0.05)
    # The workers first, which torchrun has put into sessions of their own.
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for pid in (*map(int, children), process.pid):
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=20)
    step = read_metadata(checkpoint)["step"]
    assert 10 <= step < 60
    process = torchrun("--out", out, "--resume", "--device", "cpu", "--sample-bytes", 8, N=1)
    text, _ = process.communicate(timeout=100)
    assert process.returncode == 0, text
    assert text.count("A continuation of") == 1
    assert f"Going on from step {step} of 60" in text
    metrics = json.loads((out / METRICS).read_text())
    assert metrics["steps"] == 60
    args = [*map(str, options), "--out", str(tmp_path / "one")]
    assert train.main(args) == 0
    bits = json.loads((tmp_path / "one" / METRICS).read_text())["held_out_bits_per_byte"]
    found = metrics["held_out_bits_per_byte"]["this model"]
    assert found == pytest.approx(bits["this model"], rel=1e-3)
    for mine, theirs in zip(
        load_model(out).parameters(), load_model(tmp_path / "one").parameters(), strict=True
    ):
        assert_close(mine, theirs, 1e-2)


def run_refused(group, folder, settings, **options):
    from gla_ext.distributed.training import ShardedTrainer

    with pytest.raises((NotImplementedError, ValueError)) as caught:
        options = Options(device="cpu", **options)
        ShardedTrainer(Settings(**TINY | settings), load_corpus(folder), options)
    return str(caught.value)


def test_graphs_of_steps_are_refused(pool, folder):
    expected = "expected --no-cuda-graph on several processes, got --cuda-graph"
    assert pool(run_refused, folder, {}, cuda_graph=True) == [expected] * 4


@pytest.mark.parametrize(
    ("settings", "got"),
    [({"segments": 3}, "--segments 3"), ({"packed": True}, "--segments 1 --packed")],
)
def test_windows_of_several_steps_are_refused(pool, tmp_path, settings, got):
    (tmp_path / "text.py").write_text("pass\n" * 400)
    expected = f"expected --segments 1 and --no-packed on several processes, got {got}"
    assert pool(run_refused, tmp_path, settings) == [expected] * 4


def test_a_batch_that_the_ranks_do_not_divide_is_refused(pool, folder):
    expected = "expected --batch-size to be a multiple of 4, the ranks of FSDP2, got 6"
    assert pool(run_refused, folder, {"batch_size": 6}) == [expected] * 4


def test_one_process_takes_no_sizes(tmp_path, capsys):
    args = ["--tensor-parallel", "2", "--out", str(tmp_path), "--device", "cpu"]
    assert train.main(args) == 2
    assert "expected --tensor-parallel to be 1 in one process, got 2" in capsys.readouterr().err
