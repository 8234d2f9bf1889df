"""Checkpoints: written while a run goes on, and gone on from after any stop.

Equal bits (see common.py): the same calls.
"""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from common import ROOT
from trainers import TINY, make_trainer, run

from gla_ext.model.checkpoint import read_metadata, read_tensors
from gla_ext.train import command as train
from gla_ext.train import parallel, trainer
from gla_ext.train.data import load_corpus
from gla_ext.train.run_folder import earlier


def checkpoint(out):
    return read_tensors(out / train.CHECKPOINT)


def checkpoint_of(tmp_path):
    return tmp_path / "out" / train.CHECKPOINT


def assert_same_checkpoints(a, b):
    (tensors, metadata), (others, other_metadata) = checkpoint(a), checkpoint(b)
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, others[name]), name
    assert metadata == other_metadata


@pytest.fixture(scope="module")
def whole(tmp_path_factory, texts):
    """The arguments of a run, and the folder of one that nothing stopped."""
    folder, out = (tmp_path_factory.mktemp("whole") / name for name in ("text", "out"))
    texts(folder)
    args = ["--data", folder, *TINY, "--steps", 150, "--save-every", 20, "--eval-every", 40]
    run("--out", out, *args)
    return args, out


@pytest.mark.parametrize(
    ("number", "first_step"),
    [
        (signal.SIGKILL, 0),
        pytest.param(signal.SIGTERM, 20, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 20, marks=pytest.mark.slow),
    ],
)
def test_stopped_at_any_moment_it_goes_on(whole, tmp_path, number, first_step):
    args, never_stopped = whole
    command = [sys.executable, "-m", "gla_ext.train", "--out", tmp_path / "stopped", *args]
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    process = subprocess.Popen(
        [str(x) for x in command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    path = tmp_path / "stopped" / train.CHECKPOINT
    while not path.exists() or read_metadata(path)["step"] < first_step:
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    if number == signal.SIGKILL:
        assert process.returncode == -number, err
    else:
        assert process.returncode == 128 + number, err
        again = f"-m gla_ext.train --out {tmp_path / 'stopped'} --resume --device cpu\n"
        assert f"To go on: {sys.executable} {again}" in out
    assert first_step <= checkpoint(tmp_path / "stopped")[1]["step"] < 150
    run("--out", tmp_path / "stopped", "--resume", "--device", "cpu")
    assert_same_checkpoints(tmp_path / "stopped", never_stopped)


@pytest.mark.slow
def test_killed_again_and_again_it_loses_only_the_steps_since(whole, tmp_path):
    """Every step is saved, so that most kills come while a checkpoint is written."""
    args, never_stopped = whole
    out, path = tmp_path / "out", tmp_path / "out" / train.CHECKPOINT
    command = [sys.executable, "-m", "gla_ext.train", "--out", out, *args, "--save-every", 1]
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    for target in (9, 40, 77, 123):
        process = subprocess.Popen(
            [*map(str, command), "--resume", "--keep", "3"],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while not path.exists() or read_metadata(path)["step"] < target:
            assert process.poll() is None
            time.sleep(0.001)
        process.kill()
        process.wait()
        assert target <= read_metadata(path)["step"] < 150
        for kept in out.glob("checkpoint-*.safetensors"):
            assert f"checkpoint-{read_tensors(kept)[1]['step']}.safetensors" == kept.name
    run("--out", out, "--resume", "--device", "cpu", "--save-every", 20)
    assert_same_checkpoints(out, never_stopped)


def test_the_next_updates_run_while_a_checkpoint_is_written(folder, tmp_path, monkeypatch):
    """The writes of steps 2 and 4 wait for the updates 3 and 5; what they write is of 2 and 4."""
    done, written = [threading.Event() for _ in range(9)], []
    update, write = trainer.Trainer.update, parallel.write_tensors

    def updates(self):
        update(self)
        done[self.step].set()

    def writes(path, tensors, metadata):
        if 0 < metadata["step"] < 6:
            assert done[metadata["step"] + 1].wait(60)
        written.append((metadata["step"], tensors["model.lm_head.weight"].clone()))
        write(path, tensors, metadata)

    monkeypatch.setattr(trainer.Trainer, "update", updates)
    monkeypatch.setattr(parallel, "write_tensors", writes)
    run("--data", folder, "--out", tmp_path / "out", *TINY, "--save-every", 2, "--keep", 2)
    assert [step for step, _ in written] == [0, 2, 4, 6]
    again = make_trainer(load_corpus(folder), **read_metadata(checkpoint_of(tmp_path))["settings"])
    for step, weight in written:
        while again.step < step:
            again.update()
        assert torch.equal(weight, again.model.lm_head.weight)
    kept = tmp_path / "out" / "checkpoint-4.safetensors"
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == [kept.name]
    kept.replace(checkpoint_of(tmp_path))
    run("--out", tmp_path / "out", "--resume", "--device", "cpu")
    assert torch.equal(checkpoint(tmp_path / "out")[0]["model.lm_head.weight"], written[-1][1])


def test_a_write_that_fails_ends_the_run(folder, tmp_path, monkeypatch, capsys):
    write = parallel.write_tensors

    def fails(path, tensors, metadata):
        if metadata["step"] == 4:
            raise OSError("no space left")
        write(path, tensors, metadata)

    monkeypatch.setattr(parallel, "write_tensors", fails)
    run("--data", folder, "--out", tmp_path / "out", *TINY, "--save-every", 2, code=2)
    assert "gla_ext.train: no space left" in capsys.readouterr().err
    assert read_metadata(checkpoint_of(tmp_path))["step"] == 2


def test_minutes_between_checkpoints(folder, tmp_path):
    given = ["--data", folder, "--out", tmp_path / "out", *TINY, "--keep", 9]
    run(*given, "--save-minutes", 1e-9)
    names = [f"checkpoint-{step}.safetensors" for step in range(1, 6)]
    assert [path.name for path in earlier(tmp_path / "out")] == names
    run(*given, "--overwrite")
    assert not earlier(tmp_path / "out")
