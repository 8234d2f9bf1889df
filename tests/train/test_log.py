"""What a run tells while it goes, and updates whose loss is no number or a spike."""

import importlib.util
import json
import math
import sys
import types
from dataclasses import replace

import pytest
import torch
from trainers import TINY, make_trainer, run

from gla_ext.model.checkpoint import load_model, read_metadata
from gla_ext.train import loop
from gla_ext.train.output import log
from gla_ext.train.run_folder import CHECKPOINT, LOG, METRICS
from gla_ext.train.trainer import SPIKE_SPAN, Trainer


def lines(out):
    return [json.loads(line) for line in (out / LOG).read_text().splitlines()]


def test_a_line_each_n_updates(folder, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(log, "_PICTURE_SECONDS", 0)
    monkeypatch.setattr(log, "plot_losses", lambda _, run, bits: drawn.append((run.step, bits)))
    out = tmp_path / "out"
    run("--data", folder, "--out", out, *TINY, "--log-every", 2, "--eval-every", 4)
    updates = [x for x in lines(out) if "loss" in x]
    assert [x["update"] for x in updates] == [2, 4, 6]
    assert drawn == [(2, {}), (4, {}), (6, {})]
    assert [x["tokens"] for x in updates] == [128, 256, 384]
    numbers = {"update", "loss", "bits_per_byte", "learning_rate", "gradient_norm", "tokens"}
    assert updates[0].keys() == numbers | {"tokens_per_second", "mfu", "memory_bytes"}
    assert all(x["mfu"] is None and x["memory_bytes"] > 1 << 20 for x in updates)
    assert all(x["tokens_per_second"] > 1 and x["gradient_norm"] > 0 for x in updates)
    assert updates[0]["bits_per_byte"] == pytest.approx(updates[0]["loss"] / math.log(2))
    evaluated = [x for x in lines(out) if "loss" not in x]
    metrics = json.loads((out / METRICS).read_text())
    assert [[x["update"], x["held_out_bits_per_byte"]] for x in evaluated] == metrics["evaluations"]
    assert evaluated[-1]["held_out_perplexity"] == metrics["held_out_perplexity"]
    assert metrics["held_out_perplexity"] == pytest.approx(2 ** metrics["evaluations"][-1][1])


def test_going_on_removes_what_the_checkpoint_does_not_know(folder, tmp_path):
    out = tmp_path / "out"
    run("--data", folder, "--out", out, *TINY, "--log-every", 2)
    before = lines(out)
    with (out / LOG).open("a") as file:
        file.write('{"update": 8, "loss": 1.0}\n{"update": 6, "held_out_perp')
    run("--out", out, "--resume", "--steps", 10, "--device", "cpu", "--log-every", 2)
    kept = [x for x in before if "loss" in x]  # the evaluation was behind the checkpoint
    assert lines(out)[:3] == kept
    assert [x["update"] for x in lines(out)] == [2, 4, 6, 8, 10, 10]


def test_mfu(monkeypatch, corpus):
    trainer = make_trainer(corpus, dtype="bfloat16")
    matrices = [p for n, p in trainer.model.named_parameters() if p.ndim > 1 and "embed" not in n]
    assert log.flops_per_token(trainer) == 6 * sum(p.numel() for p in matrices)
    monkeypatch.setattr(trainer, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    assert log.peak_flops(trainer) == 989e12
    monkeypatch.setattr(trainer, "settings", replace(trainer.settings, dtype="float32"))
    assert log.peak_flops(trainer) is None


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_programs_that_watch(folder, tmp_path, capsys, monkeypatch, name):
    there, told = importlib.util.find_spec, []
    monkeypatch.setattr(importlib.util, "find_spec", lambda x: None if x == name else there(x))
    given = ["--data", folder, "--out", tmp_path / "out", *TINY, "--log-every", 2, "--log", name]
    run(*given, code=2)
    assert f"got no {name}; 'pip install {name}' brings them" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()

    class Writer:
        def __init__(self, folder, purge_step):
            assert folder == str(tmp_path / "out" / "tensorboard") and purge_step == 1

        def add_scalar(self, key, value, step):
            told.append((step, {key: value}))

        def flush(self):
            pass

    def init(dir, config, project, name, resume):
        assert (dir, name) == (str(tmp_path / "out"), "out") and config["steps"] == 6
        return types.SimpleNamespace(log=lambda entry, step: told.append((step, entry)))

    for module, content in (
        ("torch.utils.tensorboard", {"SummaryWriter": Writer}),
        ("wandb", {"init": init}),
    ):
        fake = types.ModuleType(module)
        vars(fake).update(content)
        monkeypatch.setitem(sys.modules, module, fake)
    monkeypatch.setattr(importlib.util, "find_spec", there)
    monkeypatch.setattr("gla_ext.train.command.check_packages", lambda names: None)
    run(*given)
    losses = {step: entry["loss"] for step, entry in told if "loss" in entry}
    assert losses == {x["update"]: x["loss"] for x in lines(tmp_path / "out") if "loss" in x}
    assert {step for step, entry in told if "held_out_perplexity" in entry} == {6}


@pytest.fixture
def bad(monkeypatch):
    """A function that multiplies the losses of these updates, counted from 0, by a value."""
    original = Trainer._loss

    def make(steps, value):
        def loss(self, *batch):
            found = original(self, *batch)
            return found * value if self.step in steps else found

        monkeypatch.setattr(Trainer, "_loss", loss)

    return make


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_update_leaves_all_as_it_is(corpus, bad, value):
    bad({2}, value)
    trainer = make_trainer(corpus)
    trainer.update()
    trainer.update()
    before = [p.detach().clone() for p in trainer.model.parameters()]
    states = {p: {k: x.clone() for k, x in s.items()} for p, s in trainer.optimizer.state.items()}
    trainer.update()
    assert all(map(torch.equal, before, trainer.model.parameters()))
    for p, state in states.items():
        assert all(torch.equal(x, trainer.optimizer.state[p][k]) for k, x in state.items())
    trainer.update()
    assert trainer.bad.tolist() == [0, 0, 1, 0, 0, 0]
    assert trainer.has_finite_weights() and not torch.equal(before[0], trainer.model.lm_head.weight)


def test_a_spike(corpus, bad):
    bad({SPIKE_SPAN, SPIKE_SPAN + 1}, 6)
    trainer = make_trainer(corpus, steps=SPIKE_SPAN + 3)
    for _ in range(SPIKE_SPAN + 3):
        trainer.update()
    assert trainer.losses[SPIKE_SPAN] > trainer.losses[:SPIKE_SPAN].mean() + 3
    assert trainer.bad.nonzero().flatten().tolist() == [SPIKE_SPAN, SPIKE_SPAN + 1]
    never = make_trainer(corpus, steps=SPIKE_SPAN + 3, spike=0)
    for _ in range(SPIKE_SPAN + 3):
        never.update()
    assert not never.bad.any()


def test_it_stops_after_a_checkpoint(folder, tmp_path, bad, capsys):
    bad({3}, math.nan)
    given = ["--data", folder, "--out", tmp_path / "out", *TINY]
    run(*given, "--log-every", 2, code=2)
    assert (
        "expected finite losses without spikes, got a loss of nan and a gradient norm of nan in "
        "update 4, which was left out; --resume goes on behind step 4, with --skip-bad also past"
    ) in capsys.readouterr().err
    assert read_metadata(tmp_path / "out" / CHECKPOINT)["step"] == 4
    run("--out", tmp_path / "out", "--resume", "--device", "cpu")
    run(*given, "--overwrite", "--skip-bad", "--out", tmp_path / "skipped")
    assert "Skipped update 4, whose loss is nan" in capsys.readouterr().err
    pair = [load_model(tmp_path / name).parameters() for name in ("out", "skipped")]
    assert all(torch.equal(a, b) for a, b in zip(*pair, strict=True))


def test_many_in_a_row_stop_it_all_the_same(folder, tmp_path, bad, capsys, monkeypatch):
    monkeypatch.setattr(loop, "MOST_SKIPPED", 3)
    bad({1, 2, 3, 4, 5}, math.nan)
    given = ["--data", folder, "--out", tmp_path / "out", *TINY, "--skip-bad", "--log-every", 2]
    run(*given, code=2)
    error = capsys.readouterr().err
    assert "Skipped update 2" in error and "in update 3, which was left out" in error


def test_weights_that_are_no_numbers_are_not_saved(folder, tmp_path, capsys):
    run("--data", folder, "--out", tmp_path / "out", *TINY, "--lr", "inf", code=2)
    assert (
        "in update 2, and weights that are no numbers; --resume goes on from the last checkpoint; "
        "a lower --lr may help"
    ) in capsys.readouterr().err
    assert read_metadata(tmp_path / "out" / CHECKPOINT)["step"] == 0
