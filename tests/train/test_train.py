"""Training from the command line: steps, what is written, stopping and going on.

Equal bits (see common.py): the same calls.
"""

import importlib.util
import json
import math
import os
import re
import shutil
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from trainers import TINY, make_trainer, run

from gla_ext.devices import check_device
from gla_ext.model import GLAForCausalLM
from gla_ext.model.checkpoint import load_model, read_tensors, write_tensors
from gla_ext.train import command as train
from gla_ext.train import data, trainer
from gla_ext.train.data import encode, load_corpus
from gla_ext.train.run_folder import LOCK


def checkpoint(out):
    return read_tensors(out / train.CHECKPOINT)


FALLS = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "warmup-stable-decay": lambda done: min(1, (1 - done) * 8),
}


@pytest.mark.parametrize("schedule", FALLS)
def test_learning_rate_warms_up_and_falls(schedule):
    settings = trainer.Settings(steps=100, warmup=20, lr=2.0, schedule=schedule)
    rates = [settings.learning_rate(step) for step in range(100)]
    assert rates[:20] == pytest.approx([0.1 * (i + 1) for i in range(20)])
    assert rates[20:] == pytest.approx([2 * FALLS[schedule](i / 80) for i in range(80)])
    assert trainer.Settings(steps=1, schedule=schedule).learning_rate(0) > 0
    settings = replace(settings, warmup_tokens=20 * settings.tokens - 1, warmup=1, min_lr=0.5)
    rates = [settings.learning_rate(step) for step in range(100)]
    assert rates[:20] == pytest.approx([0.5 + 0.075 * (i + 1) for i in range(20)])
    assert rates[20:] == pytest.approx([0.5 + 1.5 * FALLS[schedule](i / 80) for i in range(80)])


def test_the_length_of_the_decay():
    settings = trainer.Settings(steps=100, warmup=20, schedule="warmup-stable-decay", decay=50)
    assert settings.learning_rate(50) == settings.lr > settings.learning_rate(51)
    assert replace(settings, decay=1000).learning_rate(20) == settings.lr


@pytest.mark.parametrize("packed", [False, True])
def test_several_passes_are_one_large_batch(corpus, packed):
    """Of the same windows, up to rounding."""
    whole = make_trainer(corpus, batch_size=6, packed=packed)
    parts = make_trainer(corpus, batch_size=2, tokens_per_update=6 * 32, packed=packed)
    for step in range(6):
        assert torch.equal(whole.batches(step)[0], parts.batches(step)[0])
        whole.update()
        parts.update()
    torch.testing.assert_close(parts.losses, whole.losses)
    for a, b in zip(parts.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_an_updates_loss_is_the_mean_cross_entropy(corpus):
    trained = make_trainer(corpus)
    inputs, targets = trained.batches(0)
    log_p = trained.model(inputs).logits.detach().double().log_softmax(-1)
    trained.update()
    wanted = -log_p.gather(-1, targets.unsqueeze(-1)).mean().item()
    assert trained.losses[0].item() == pytest.approx(wanted, rel=1e-5)


def test_loss_falls(corpus):
    trained = make_trainer(corpus, steps=80, hidden_size=32, warmup=5, lr=1e-2)
    for _ in range(80):
        trained.update()
    first = trained.losses[0].item() / math.log(2)
    assert first == pytest.approx(8, abs=1.5)
    assert trained.recent_loss() < 0.4 * first
    assert trained.evaluate() < 0.4 * first


@pytest.mark.parametrize("use_short_conv", [False, True])
def test_held_out_bits_are_those_of_one_long_text(corpus, monkeypatch, use_short_conv):
    trained = make_trainer(corpus, use_short_conv=use_short_conv)
    trained.update()
    monkeypatch.setattr(trained, "evaluation_segment", 50)
    bits = trained.evaluate()
    row = trained.held_out.long()
    log2_p = trained.model(row[None, :-1]).logits[0].double().log_softmax(-1) / math.log(2)
    log2_p = log2_p.gather(-1, row[1:, None])[row[1:] != 0]
    assert len(log2_p) == sum(len(text) for _, text in corpus.held_out)
    assert bits == pytest.approx(-log2_p.mean().item(), rel=1e-5)
    assert trained.evaluate() == bits
    assert trained.evaluate(lambda: True) is None
    assert trained.evaluations == [(1, bits), (1, bits)]


def test_writes_everything(folder, tmp_path, capfd):
    out = tmp_path / "out"
    run("--data", folder, "--out", out, "--prompt", "def", *TINY)
    written = capfd.readouterr()
    for text in ("held out", "lzma", "order-0", "this model", "continuation of 'def'"):
        assert text in written.out
    assert "bits/byte" in written.err
    assert "tokens/s" in written.err
    assert (out / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert (out / "sample.txt").read_text().startswith("def")
    metrics = json.loads((out / "metrics.json").read_text())
    corpus = load_corpus(folder)
    bits = metrics["held_out_bits_per_byte"]
    assert bits["lzma"] == data.lzma_bits_per_byte(corpus.held_out)
    assert bits["order-0"] == data.order0_bits_per_byte(corpus.train, corpus.held_out)
    assert metrics["evaluations"] == [[6, bits["this model"]]]
    model, tensors = load_model(out), checkpoint(out)[0]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, tensors[f"model.{name}"])
    row = encode(corpus.held_out).long()
    with torch.no_grad():
        nats = F.cross_entropy(model(row[None, :-1]).logits[0], row[1:], reduction="none")
    assert nats[row[1:] != 0].mean().item() / math.log(2) == pytest.approx(bits["this model"])


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--save-every", 0, "expected --save-every to be at least 1, got 0"),
        ("--steps", -1, "expected --steps to be at least 0, got -1"),
        ("--segments", 0, "expected --segments to be at least 1, got 0"),
        ("--batch-size", 0, "expected --batch-size to be at least 1, got 0"),
        ("--grad-clip", -1.0, "expected --grad-clip to be at least 0, got -1.0"),
        ("--lr", "nan", "expected --lr to be at least 0, got nan"),
        ("--min-lr", 1, "expected --min-lr to be at most --lr 0.003, got 1.0"),
        ("--tokens-per-update", 100, "to be a multiple of --batch-size times --seq-len, 64, got"),
        ("--sample-bytes", -1, "expected --sample-bytes to be at least 0, got -1"),
        ("--seed", 2**64, f"expected --seed to have at most 64 bits, got {2**64}"),
        (
            "--device",
            "foo",
            "--device to be one of torch's, such as cpu or cuda:0, got foo\n",
        ),
        ("--device", "meta", "one gla_ext has operators for, cpu or cuda, got meta\n"),
        ("--device", "mps", "one gla_ext has operators for, cpu or cuda, got mps\n"),
        ("--device", "cuda:99", "expected --device to be cpu"),
    ],
)
def test_bad_options(folder, tmp_path, capsys, option, value, message):
    run("--data", folder, "--out", tmp_path / "out", *TINY, option, value, code=2)
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_betas_out_of_range(tmp_path, capsys):
    run("--out", tmp_path, *TINY, "--betas", 0.9, 1, code=2)
    assert_error(capsys, r"expected --betas to be from 0 to below 1, got \[0.9, 1.0\]")
    run("--out", tmp_path, *TINY, "--tokens-per-update", 128, "--segments", 2, code=2)
    assert_error(capsys, "expected --segments 1 with several passes an update, got 2")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--learning-rate=1", "got --learning-rate; --help lists them"),
        ("--step", "got --step; the nearest is --steps"),
        ("--token-per-update", "got --token-per-update; the nearest is --tokens-per-update"),
        ("stray", "got stray; --help lists them"),
    ],
)
def test_flags_are_whole_words(capsys, given, said):
    with pytest.raises(SystemExit) as stopped:
        train.main([given, "3"])
    assert stopped.value.code == 2
    assert f"expected flags of this command, as whole words, {said}" in capsys.readouterr().err


def test_resume_without_a_checkpoint_starts(folder, tmp_path, capsys):
    run("--data", folder, "--out", tmp_path / "out", "--resume", *TINY)
    assert "No checkpoint" in capsys.readouterr().out
    assert checkpoint(tmp_path / "out")[1]["step"] == 6


@pytest.fixture
def out(finished, tmp_path):
    """A copy of the finished run."""
    return shutil.copytree(finished[1], tmp_path / "out")


def test_resume_of_a_finished_run_writes_again(out):
    before = (out / train.CHECKPOINT).read_bytes()
    (out / "loss.png").unlink()
    run("--out", out, "--resume", "--device", "cpu")
    assert (out / "loss.png").exists()
    assert (out / train.CHECKPOINT).read_bytes() == before


def assert_error(capsys, message):
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.search("^gla_ext[.]train: .*" + message, error)


def damaged(data):
    def change(out):
        path = out / train.CHECKPOINT
        path.write_bytes(path.read_bytes()[:-100] if data is None else data)

    return change


def of_another_format(out):
    write_tensors(out / train.CHECKPOINT, {"x": torch.zeros(1)})


def emptied(out):
    shutil.rmtree(out)
    out.mkdir()


def something_else(out):
    emptied(out)
    (out / "config.json").write_text("{}")


def damaged_alone(out):
    emptied(out)
    (out / train.CHECKPOINT).write_bytes(b"damaged")


def a_file(out):
    shutil.rmtree(out)
    out.touch()


def nothing(out):
    pass


WHOLE, AGAIN = "expected .*checkpoint.* to be a whole safetensors file", ["--resume"]
ELSE = "to hold no earlier run, got config.json; another folder keeps it"
REFUSED = {  # what is done to a finished run's folder, the arguments, and what is said
    "empty": (damaged(b""), AGAIN, WHOLE),
    "text": (damaged(b"not a checkpoint"), AGAIN, WHOLE),
    "cut": (damaged(None), AGAIN, WHOLE),
    "format": (of_another_format, AGAIN, "a checkpoint of the format gla_ext.train/1, got None"),
    "lr": (
        nothing,
        [*AGAIN, "--lr", "0.5"],
        "expected --lr to be 0.003 as in .*, got 0.5; leave --lr out",
    ),
    "steps": (
        nothing,
        [*AGAIN, "--steps", "5"],
        "expected --steps to be at least 6, the step of .*, got 5",
    ),
    "seq-len": (nothing, [*AGAIN, "--seq-len", 16], "--seq-len to be 32 as in .*, got 16"),
    "no text": (emptied, ["--data", "nowhere", *TINY], "nowhere"),
    "something else": (something_else, TINY, ELSE),
    "something else, resumed": (something_else, [*AGAIN, *TINY], ELSE),
    "damaged, not resumed": (damaged_alone, TINY, f"got {train.CHECKPOINT}; --resume goes on"),
    "a file": (a_file, TINY, "expected --out to be a folder, got .*out"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_stands_in_a_folder_is_kept(finished, out, capsys, case):
    change, args, message = case
    change(out)
    before = {path: path.read_bytes() for path in out.glob("*") if path.name != LOCK}
    given = args if "--data" in args or "--resume" in args else ["--data", finished[0], *args]
    run("--out", out, *given, code=2)
    assert_error(capsys, message)
    assert before == {path: path.read_bytes() for path in out.glob("*") if path.name != LOCK}


def test_resume_with_other_text(folder, out, tmp_path, capsys):
    """The same text may lie elsewhere."""
    folder.rename(tmp_path / "elsewhere")
    run("--data", tmp_path / "elsewhere", "--out", out, "--resume", "--device", "cpu")
    (tmp_path / "elsewhere" / "3.txt").write_text("something else")
    run("--out", out, "--resume", "--data", tmp_path / "elsewhere", code=2)
    assert_error(capsys, "to be trained on the text given now .* got a checkpoint of other text")


def test_missing_packages_are_named_at_once(tmp_path, capsys, monkeypatch):
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else there(name)
    )
    run("--out", tmp_path / "out", *TINY, code=2)
    assert_error(capsys, r"expected .* got no matplotlib; 'pip install matplotlib' brings")


def test_device_follows_the_operators(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    asked = []

    def has_kernel(name, key):
        asked.append((name, key))
        return True

    built = torch._C._dispatch_has_kernel_for_dispatch_key("gla_ext::chunk_gla_fwd", "CUDA")
    assert train.default_device() == ("cuda" if built else "cpu")
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", has_kernel)
    assert train.default_device() == "cuda"
    assert asked == [("gla_ext::chunk_gla_fwd", "CUDA")]
    check_device("cuda:1")
    with pytest.raises(ValueError, match="to be cpu or one of 2 GPUs, got cuda:2"):
        check_device("cuda:2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert train.default_device() == "cpu"
    with pytest.raises(ValueError, match="to be cpu or one of 0 GPUs, got cuda"):
        check_device("cuda")
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda *_: False)
    with pytest.raises(
        ValueError, match=r"no CUDA operators .FORCE_CUDA=1 make builds them., got cuda"
    ):
        check_device("cuda")


def test_the_sample_is_drawn_so(tmp_path, monkeypatch):
    given, generate = {}, GLAForCausalLM.generate

    def noting(self, *args, **options):
        given.update(options)
        return generate(self, *args, **options)

    monkeypatch.setattr(GLAForCausalLM, "generate", noting)
    run(*TINY, "--out", tmp_path / "run")
    assert given["temperature"] == trainer.SAMPLE_TEMPERATURE
    assert not {"top_k", "top_p"} & given.keys()


def test_a_prompt_that_is_not_utf_8(tmp_path):
    run(*TINY, "--out", tmp_path / "run", "--prompt", os.fsdecode(b"caf\xe9"))
    assert (tmp_path / "run" / "sample.txt").read_text().startswith("caf\ufffd")
    assert (tmp_path / "run" / "metrics.json").exists()
