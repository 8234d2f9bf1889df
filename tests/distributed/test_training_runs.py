"""Runs of many processes from the command line: to the end, stopped, killed, and gone on with.

Equal bits (see common.py): the same calls.
"""

import contextlib
import io
import json
import os
import signal
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from common import assert_close
from launching import torchrun
from test_training import TINY, sharded

from gla_ext import train
from gla_ext.model.checkpoint import load_model, read_metadata
from gla_ext.train import command
from gla_ext.train.output.saving import Saver
from gla_ext.train.presets import Options, command_line
from gla_ext.train.run_folder import (
    CHECKPOINT,
    METRICS,
    RESULTS,
    earlier,
    folders,
    remove_folders,
)
from gla_ext.train.trainer import Settings, Trainer


def flags(folder, steps, device="cpu"):
    options = ["--data", folder, "--device", device, "--sample-bytes", 8]
    options += ["--dtype", "float32", "--no-compile"]
    for name, value in (TINY | {"steps": steps}).items():
        options += [f"--{name.replace('_', '-')}", *([] if value is True else [value])]
    return [*map(str, options)]


RESUME = ("--resume", "--sample-bytes", "8", "--no-compile", "--device")


def assert_ended_as_one_process(out, args, alone, rel, weights):
    """A run's weights and bits a byte are those of one process with these flags."""
    assert train.main([*args, "--out", str(alone)]) == 0
    assert all((out / name).exists() for name in (CHECKPOINT, *RESULTS))
    found, expected = (json.loads((path / METRICS).read_text()) for path in (out, alone))
    assert found["steps"] == expected["steps"]
    found, expected = (x["held_out_bits_per_byte"]["this model"] for x in (found, expected))
    assert found == pytest.approx(expected, rel=rel)
    pairs = zip(load_model(out).parameters(), load_model(alone).parameters(), strict=True)
    for mine, theirs in pairs:
        assert_close(mine, theirs, weights)


def run_command(group, args, signalled):
    """Status, output and errors of the command; the rank signalled gets a SIGTERM in step 3."""
    from gla_ext.train.ranks import processes

    update = Trainer.update

    def step(self):
        update(self)
        if dist.get_rank() == signalled and self.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    out, errors = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(processes.Processes, "joined", lambda _: processes.quiet_but_first()),
        mock.patch.object(Trainer, "update", step),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
    ):
        parallel = processes.Processes("cpu")
        status = command.run(vars(command_line().parse_args(args)), parallel)
    return status, out.getvalue(), errors.getvalue()


@pytest.mark.slow
def test_stopped_by_one_rank_and_gone_on_with_to_the_end(pool, folder, tmp_path):
    """One rank's signal stops all at one step; other sizes go on. The first rank alone speaks."""
    out, args = tmp_path / "run", flags(folder, 6)
    first, *others = pool(run_command, [*args, "--out", str(out), "--context-parallel", "2"], 2)
    assert first[0] == 128 + signal.SIGTERM and "Stopped. To go on: torchrun" in first[1]
    assert others == [(first[0], "", "")] * 3
    assert read_metadata(out / CHECKPOINT)["step"] == 3
    args_to_go_on = ["--out", str(out), *RESUME, "cpu", "--tensor-parallel", "2"]
    first, *others = pool(run_command, args_to_go_on, None)
    assert first[0] == 0, first[1:]
    assert others == [(0, "", "")] * 3
    assert "Going on from step 3 of 6" in first[1] and first[1].count("A continuation of") == 1
    assert first[2].count("train:  50%") == 1 and first[2].count("train: 100%") == 1
    assert_ended_as_one_process(out, args, tmp_path / "one", 1e-5, 1e-3)


class Killed(BaseException):
    """In place of a kill: nothing after it happens."""


# How far a save comes before the process is killed: the last function that it calls, whether that
# one runs, and whether the new checkpoint is there then.
MOMENTS = {
    "nothing": ("dcp.save", False, False),
    "the folder": ("dcp.save", True, False),
    "not the file": ("write_tensors", False, False),
    "the file": ("write_tensors", True, True),
    "not the old folder's end": ("remove_folders", False, True),
}


AGAIN = ("the file", "not the old folder's end")  # after which more steps are asked for, too


@pytest.mark.parametrize(
    ("moment", "steps"),
    [
        pytest.param(moment, steps, id=f"{name}-{steps}")
        for name, moment in MOMENTS.items()
        for steps in ((6, 9) if name in AGAIN else (6,))
    ],
)
def test_killed_while_it_saves(one_rank, folder, tmp_path, monkeypatch, moment, steps):
    """The old checkpoint or the new one is whole, and what else lies there goes at the start.

    With more steps than before the same step is saved again, as a resumed run does.
    """
    from gla_ext.train.ranks import weights

    path = tmp_path / CHECKPOINT

    def trainer(**changed):
        return sharded(folder, TINY | changed)

    name, done, is_new = moment
    first = trainer()
    first.update()
    first.save(path)
    if steps == first.settings.steps:
        first.update()
    else:
        first.settings = Settings(**TINY | {"steps": steps})
    place, _, attribute = f"weights.{name}".rpartition(".")
    place = {"weights": weights, "weights.dcp": weights.dcp}[place]
    original = getattr(place, attribute)

    def killed(*args, **kwargs):
        if done:
            original(*args, **kwargs)
        raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(place, attribute, killed)
        first.save(path)
    named = read_metadata(path)["sharded"]
    remove_folders(tmp_path, but=named)
    assert [found.name for found in folders(tmp_path)] == [named]
    again, whole = trainer(steps=steps), trainer()
    again.load(path)
    assert again.step == (first.step if is_new else 1)
    assert read_metadata(path)["settings"]["steps"] == (steps if is_new else 6)
    while whole.step < again.step:
        whole.update()
    whole.settings = again.settings
    for one in (again, whole):
        one.update()
    for mine, theirs in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), theirs.full_tensor())


def run_saver(group, folder, sizes, out):
    """Saves three steps, the last two of which are kept; the losses, also of going on from both."""
    trainer = sharded(folder, **sizes)
    with Saver(trainer, Options(out=out, keep=2, save_every=1)) as saver:
        for _ in range(3):
            trainer.update()
            assert saver.is_due()
            saver.save()
    while trainer.step < TINY["steps"]:
        trainer.update()
    found = [trainer._mean_losses()]
    for name, step in ((CHECKPOINT, 3), ("checkpoint-2.safetensors", 2)):
        again = sharded(folder, **sizes)
        again.load(out / name)
        assert again.step == step
        while again.step < TINY["steps"]:
            again.update()
        found.append(again._mean_losses())
    return found


@pytest.mark.parametrize("kind", ["shard", "replicate"])
def test_the_last_checkpoints_are_kept(pool, folder, tmp_path, kind):
    """With their folders, and nothing else."""
    for losses, *again in pool(run_saver, folder, {"parallel": kind}, tmp_path, ranks=4):
        for found in again:
            assert_close(found, losses, 0 if kind == "shard" else 1e-5)  # DDP lays buckets out anew
    assert [path.name for path in earlier(tmp_path)] == ["checkpoint-2.safetensors"]
    names = ["checkpoint-2.dcp", "checkpoint-3.dcp"] if kind == "shard" else []
    assert [path.name for path in folders(tmp_path)] == names


def test_training_goes_on_while_shards_are_written(one_rank, folder, tmp_path, monkeypatch):
    from gla_ext.train.ranks import weights

    updated, original = threading.Event(), weights.dcp.save

    def late(*args, **kwargs):
        assert updated.wait(60)
        return original(*args, **kwargs)

    monkeypatch.setattr(weights.dcp, "save", late)
    trainer = sharded(folder)
    with Saver(trainer, Options(out=tmp_path)) as saver:
        trainer.update()
        before = [p.full_tensor().clone() for p in trainer.model.parameters()]
        saver.save()
        trainer.update()
        updated.set()
    again = sharded(folder)
    again.load(tmp_path / CHECKPOINT)
    assert again.step == 1
    for expected, mine, now in zip(
        before, again.model.parameters(), trainer.model.parameters(), strict=True
    ):
        assert torch.equal(expected, mine.full_tensor())
        assert not torch.equal(expected, now.full_tensor())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["replicate", "shard"])
def test_a_killed_rank_ends_the_job_and_one_process_goes_on(folder, tmp_path, device, capsys, kind):
    """The first rank is killed without warning in the middle; the other does not wait for it.

    Few steps: gradients that differ by 1e-6 change these weights by 4e-5 in 16, by 0.2 in 300.
    """
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    args, out = flags(folder, 16, device), tmp_path / "run"
    script = Path(__file__).with_name("killed_run.py")
    status, text = torchrun(
        2, script, 12, *args, "--out", out, "--save-every", 5, "--parallel", kind
    )
    assert status not in (0, None), text
    assert "Signal 9 (SIGKILL)" in text
    step = read_metadata(out / CHECKPOINT)["step"]
    assert step in (5, 10), text  # whether the one of step 10 was whole by then
    capsys.readouterr()
    assert train.main(["--out", str(out), *RESUME, device]) == 0
    text = capsys.readouterr().out
    assert text.count("A continuation of") == 1
    assert f"Going on from step {step} of 16" in text
    assert_ended_as_one_process(out, args, tmp_path / "one", 1e-3, 1e-2)
