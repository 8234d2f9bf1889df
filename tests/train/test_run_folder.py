"""The folder of a training run: one run at a time, no leftovers, nothing overwritten unasked."""

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from source_tree import ROOT
from trainers import TINY, run

from gla_ext.model import GLAConfig, GLAForCausalLM
from gla_ext.model.checkpoint import load_model, read_metadata, read_tensors, write_tensors
from gla_ext.model.files import replacing, write_text
from gla_ext.train import command as train
from gla_ext.train import data
from gla_ext.train.data import Corpus
from gla_ext.train.output.plot import plot_losses
from gla_ext.train.run_folder import CHECKPOINT, LOCK, LOG, RESULTS, held


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def other_process(code, *args) -> subprocess.Popen:
    """A process that runs the code, which prints a line when it is where the test wants it."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "there\n"
    return process


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.communicate()


HOLDS = """
import pathlib, sys, time
from gla_ext.train.run_folder import held
with held(pathlib.Path(sys.argv[1])):
    print("there", flush=True)
    time.sleep(60)
"""


def test_one_run_at_a_time(folder, tmp_path, capsys):
    out = tmp_path / "out"
    process = other_process(HOLDS, out)
    try:
        before = contents(out)
        for more in ([], ["--overwrite"], ["--resume"]):
            run("--data", folder, "--out", out, *TINY, *more, code=2)
            error = capsys.readouterr().err
            assert f"expected {out} to be free, got another run in it (process " in error
            assert f"(process {process.pid} on {os.uname().nodename}); wait for its end" in error
        assert contents(out) == before
    finally:
        kill(process)
    run("--data", folder, "--out", out, *TINY)
    assert set(contents(out)) == {LOCK, LOG, CHECKPOINT, *RESULTS}


SAVES = """
import pathlib, sys, time
import safetensors.torch, torch
from gla_ext.model.checkpoint import write_tensors

def save_file(tensors, path, metadata):
    for name in (path, path.with_name(".tmpRandom")):
        name.write_bytes(bytes(10**6))
    print("there", flush=True)
    time.sleep(60)

safetensors.torch.save_file = save_file
write_tensors(sys.argv[1], {"x": torch.zeros(1)})
"""


def test_what_a_kill_leaves_is_removed_and_no_more(folder, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    kill(other_process(SAVES, out / CHECKPOINT))
    shutil.copytree(out, tmp_path / "library")
    assert sum(path.stat().st_size for path in out.rglob("*")) >= 2 * 10**6
    mine = {"notes.tmp": b"1", ".tmpMine": b"2", f"{CHECKPOINT}.tmp": b"3"}
    for name, content in mine.items():
        (out / name).write_bytes(content)
    with held(out):
        assert contents(out).keys() == {LOCK, *mine}
    run("--data", folder, "--out", out, *TINY)
    assert set(contents(out)) == {LOCK, LOG, CHECKPOINT, *RESULTS, *mine}
    write_tensors(tmp_path / "library" / CHECKPOINT, {"x": torch.ones(1)})
    assert list(contents(tmp_path / "library")) == [CHECKPOINT]
    assert read_tensors(tmp_path / "library" / CHECKPOINT)[0]["x"] == 1


def test_a_rerun_is_told_what_to_do(folder, tmp_path, capsys):
    out = tmp_path / "out"
    run("--data", folder, "--out", out, *TINY)
    before = contents(out)
    run("--data", folder, "--out", out, *TINY, code=2)
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"gla_ext.train: expected {out} to hold no earlier run, got {', '.join(RESULTS)}, "
        f"{CHECKPOINT} of step 6; --resume goes on with it, up to more --steps; another folder "
        "keeps it, --overwrite writes over it"
    )
    assert {name: x for name, x in contents(out).items() if name != LOCK} == {
        name: x for name, x in before.items() if name != LOCK
    }
    run("--data", folder, "--out", out, *TINY, "--seed", 1, "--overwrite")
    assert read_metadata(out / CHECKPOINT)["settings"]["seed"] == 1
    assert contents(out)["model.safetensors"] != before["model.safetensors"]
    run("--out", out, "--resume", "--overwrite", code=2)
    assert "expected --resume or --overwrite, got both" in capsys.readouterr().err


def test_resume_with_more_steps_goes_on(folder, tmp_path, monkeypatch):
    out = tmp_path / "out"
    run("--data", folder, "--out", out, *TINY)
    first, model = read_tensors(out / CHECKPOINT)[0]["losses"], load_model(out)

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(train, "train", stop)  # before a step is done, 9 steps are what it is told
        with pytest.raises(KeyboardInterrupt):
            run("--out", out, "--resume", "--device", "cpu", "--steps", 9)
    run("--out", out, "--resume", "--device", "cpu", "--sample-bytes", 4)
    tensors, metadata = read_tensors(out / CHECKPOINT)
    assert (metadata["step"], metadata["settings"]["steps"]) == (9, 9)
    assert [step for step, _ in metadata["evaluations"]] == []
    assert torch.equal(tensors["losses"][:6], first)
    assert tensors["losses"].shape == (9,)
    assert not torch.equal(load_model(out).lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EIO])
def test_a_file_system_without_locks_is_said(tmp_path, capsys, monkeypatch, number):
    def fails(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", fails)
    if number == errno.ENOLCK:
        with held(tmp_path):
            assert "on a file system without locks" in capsys.readouterr().err
    else:
        with pytest.raises(OSError, match="Input/output"), held(tmp_path):
            pass


def test_text_in_odd_places(folder, tmp_path, capsys):
    link, name = tmp_path / "link", os.fsdecode(b"caf\xe9.txt")
    link.symlink_to(link)
    run("--data", link, "--out", tmp_path / "out", *TINY, code=2)
    assert "to be a text file, got a link to itself" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    (folder / name).write_bytes(b"au lait " * 100)
    run("--data", folder / name, "--out", tmp_path / "out", *TINY)
    run("--out", tmp_path / "out", "--resume", "--device", "cpu", "--sample-bytes", 4)
    assert read_metadata(tmp_path / "out" / CHECKPOINT)["settings"]["data"] == [str(folder / name)]


def test_text_that_is_left_out_is_said(folder, tmp_path, capsys, monkeypatch):
    size = sum(path.stat().st_size for path in folder.rglob("*.txt"))
    (folder / "large").write_bytes(b"text" * (1 << 18))
    monkeypatch.setattr(data.load_corpus, "__defaults__", (None, size))
    monkeypatch.setattr(data, "MAX_BYTES", size)
    run("--data", folder, "--out", tmp_path / "out", *TINY)
    assert f"Left out: {1 << 20:,} bytes of text beyond " in capsys.readouterr().out


def test_a_file_is_the_old_or_the_new_one(tmp_path, monkeypatch):
    """Whatever writes it: after an error the old one stands, and nothing lies beside it."""
    model = GLAForCausalLM(GLAConfig(hidden_size=16, num_hidden_layers=1, vocab_size=8))
    file = tmp_path / "file.png"
    run = {"losses": torch.ones(3), "step": 3, "evaluations": [(3, 2.0)], "corpus": Corpus}
    run = type("Run", (), run)

    def fails(*_):
        raise OSError("no space")

    for write in (
        lambda: write_text(file, "text"),
        lambda: model.config.save(file),
        lambda: plot_losses(file, run, {}),
        lambda: write_tensors(file, {"x": torch.ones(3)}, {"step": 1}),
    ):
        file.write_text("old")
        with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
            patch.setattr(os, "replace", fails)
            write()
        assert contents(tmp_path) == {"file.png": b"old"}
        write()
        assert list(contents(tmp_path)) == ["file.png"]
        assert file.read_bytes() != b"old"
    (tmp_path / "plain").touch()
    with replacing(file) as new:
        new.unlink()
        new.touch(mode=0o600)
    assert file.stat().st_mode == (tmp_path / "plain").stat().st_mode
