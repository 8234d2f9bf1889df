"""Training from the command line: text, batches, what is written, stopping and going on."""

import functools
import importlib.util
import json
import lzma
import math
import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from common import ROOT
from torch.nn import functional as F

from gla_ext import data, train, trainer
from gla_ext.checkpoint import load_model, read_tensors, write_tensors
from gla_ext.data import Batches, Corpus, encode, load_corpus

TINY = ["--steps", 6, "--batch-size", 2, "--seq-len", 32, "--hidden-size", 16, "--layers", 1]
TINY += ["--heads", 2, "--device", "cpu", "--sample-bytes", 8]


def words(seed: int, count: int) -> bytes:
    choose = random.Random(seed).choice
    return " ".join(choose(["def", "return", "x", "y", "+", "\n"]) for _ in range(count)).encode()


@pytest.fixture
def folder(tmp_path):
    """Twelve text files in a folder, two of them in another one inside."""
    for i in range(12):
        file = tmp_path / "text" / ("sub" if i < 2 else ".") / f"{i}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(words(i, 200 + 10 * i))
    return tmp_path / "text"


@pytest.fixture
def corpus(folder):
    return load_corpus(folder)


def run(*args, code=0):
    assert train.main([str(arg) for arg in args]) == code


def checkpoint(out):
    return read_tensors(out / train.CHECKPOINT)


def assert_same_checkpoints(a, b):
    (tensors, metadata), (others, other_metadata) = checkpoint(a), checkpoint(b)
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, others[name]), name
    assert metadata == other_metadata


def test_split_is_by_file_disjoint_and_repeatable(folder, corpus):
    parts = [dict(corpus.train), dict(corpus.held_out)]
    assert not parts[0].keys() & parts[1].keys()
    assert all(parts)
    files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*.txt")}
    assert parts[0] | parts[1] == files
    assert load_corpus(folder) == corpus


def test_fingerprint_sees_every_change(folder, corpus):
    fingerprints = {corpus.fingerprint, load_corpus(folder).fingerprint}
    assert len(fingerprints) == 1
    (folder / "5.txt").write_bytes((folder / "5.txt").read_bytes()[:-1] + b"!")
    fingerprints.add(load_corpus(folder).fingerprint)
    (folder / "5.txt").rename(folder / "five.txt")
    fingerprints.add(load_corpus(folder).fingerprint)
    swapped = Corpus("", corpus.held_out, corpus.train)
    assert len(fingerprints | {swapped.fingerprint}) == 4


def test_held_out_size(monkeypatch):
    documents = [(str(i), bytes([65]) * 1000) for i in range(200)]
    assert len(data._split("", documents, data.MAX_BYTES).held_out) == 6  # 3 % of 200,000 bytes
    monkeypatch.setattr(data, "MAX_HELD_OUT_BYTES", 2999)
    assert len(data._split("", documents, data.MAX_BYTES).held_out) == 2
    large = [("a", b"a" * 50), ("b", b"b" * 40), ("c", b"c" * 60)]
    assert data._split("", large, data.MAX_BYTES).held_out == (("b", b"b" * 40),)
    assert sum(len(t) for _, t in data._split("", documents, 50_500).train) == 49_000


def test_what_is_not_text_is_left_out(folder, corpus):
    (folder / "image").write_bytes(b"\x89PNG\x00\x01")
    (folder / "empty").touch()
    (folder / "link").symlink_to(folder / "3.txt")
    os.mkfifo(folder / "pipe")
    (folder / ".hidden").write_text("hidden")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("hidden")
    assert load_corpus(folder) == corpus


def test_a_file_is_split_at_its_tail(tmp_path):
    file = tmp_path / "book.txt"
    file.write_bytes(bytes(range(1, 251)) * 4)
    split = load_corpus(file)
    assert split.train == (("book.txt[:970]", file.read_bytes()[:970]),)
    assert split.held_out == (("book.txt[970:]", file.read_bytes()[970:]),)


def test_default_text_is_the_standard_library():
    split = load_corpus()
    names = [name for name, _ in split.train + split.held_out]
    assert "Python" in split.name
    assert "functools.py" in names
    assert all(name.endswith(".py") for name in names)
    assert not any("test" in name.split("/")[:-1] or "site-packages" in name for name in names)
    assert sum(len(text) for _, text in split.train) > 4_000_000
    assert 50_000 < sum(len(text) for _, text in split.held_out) <= 128 << 10


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (None, FileNotFoundError, "text"),
        (b"a\x00b", ValueError, "to be text, got a file with NUL bytes"),
        (b"a", ValueError, "at least 2 bytes of text, got 1"),
        ([b"one file"], ValueError, "at least two text files .* got 1"),
    ],
)
def test_text_that_cannot_be_used(tmp_path, content, error, message):
    path = tmp_path / "text"
    if isinstance(content, list):
        path.mkdir()
        (path / "file").write_bytes(content[0])
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(error, match=message):
        load_corpus(path)


def test_encode_puts_a_zero_before_each_document():
    assert encode((("a", b"xy"), ("b", b"z"))).tolist() == [0, 120, 121, 0, 122]


def test_order0_of_a_known_case():
    held_out = (("", b"ab"),)
    expected = -(math.log2(4 / 260) + math.log2(2 / 260)) / 2
    actual = data.order0_bits_per_byte((("", b"aaab"),), held_out)
    assert actual == pytest.approx(expected, rel=1e-12)
    even = (("", bytes(range(1, 256)) * 1000),)
    assert data.order0_bits_per_byte(even, held_out) == pytest.approx(math.log2(255), abs=1e-4)


def test_lzma_of_known_cases():
    noise = tuple((str(i), random.Random(i).randbytes(4000)) for i in range(2))
    assert 8 < data.lzma_bits_per_byte(noise) < 8.2
    assert data.lzma_bits_per_byte((("", b"a" * 100_000),)) < 0.05
    assert data.lzma_bits_per_byte(noise + noise) < 4.2  # across documents
    assert data.lzma_bits_per_byte(noise[:1]) <= 8 * len(lzma.compress(noise[0][1])) / 4000


def test_batches_depend_on_seed_and_step_alone():
    stream = torch.arange(1003) % 251
    batches = Batches(stream, 3, 10, seed=5)
    in_order = [batches(step) for step in range(80)]
    for step in (79, 0, 33, 34):
        for got, wanted in zip(Batches(stream, 3, 10, seed=5)(step), in_order[step], strict=True):
            assert torch.equal(got, wanted)
        assert torch.equal(batches(step)[0], in_order[step][0])
    assert not torch.equal(Batches(stream, 3, 10, seed=6)(0)[0], in_order[0][0])


def test_an_epoch_sees_every_window_once():
    batches = Batches(torch.arange(1003), 4, 10, seed=0)
    windows, starts = [batches(step) for step in range(50)], []
    for inputs, targets in windows:
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert torch.equal(inputs[:, -1] + 1, targets[:, -1])
        starts += inputs[:, 0].tolist()
    for epoch in (starts[:100], starts[100:]):
        assert sorted(epoch) == list(range(min(epoch), min(epoch) + 1000, 10))
    assert starts[:100] != starts[100:]


def test_batches_need_one_window():
    with pytest.raises(ValueError, match=r"at least seq_len \+ 1 = 33 tokens, got 32"):
        Batches(torch.zeros(32), 1, 32, 0)


def test_learning_rate_warms_up_and_falls():
    settings = trainer.Settings(steps=100, warmup=10, lr=1.0)
    rates = [settings.learning_rate(step) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[10] == 1.0
    assert rates[10:] == pytest.approx([1 - i / 90 for i in range(90)])
    assert trainer.Settings(steps=1).learning_rate(0) > 0


def make_trainer(corpus, **options) -> trainer.Trainer:
    tiny = {"steps": 6, "batch_size": 2, "seq_len": 32, "hidden_size": 16, "layers": 1, "heads": 2}
    return trainer.Trainer(trainer.Settings(**(tiny | options)), corpus, torch.device("cpu"))


def test_loss_falls(corpus):
    run = make_trainer(corpus, steps=80, hidden_size=32, warmup=5, lr=1e-2)
    for _ in range(80):
        run.train_step()
    first = run.losses[0].item() / math.log(2)
    assert first == pytest.approx(8, abs=1.5)
    assert run.recent_loss() < 0.4 * first
    assert run.evaluate() < 0.4 * first


def test_held_out_bits_are_those_of_one_long_text(corpus, monkeypatch):
    run = make_trainer(corpus)
    run.train_step()
    monkeypatch.setattr(trainer, "_EVAL_SEGMENT", 50)
    bits = run.evaluate()
    row = run.held_out.long()
    log2_p = run.model(row[None, :-1]).logits[0].double().log_softmax(-1) / math.log(2)
    log2_p = log2_p.gather(-1, row[1:, None])[row[1:] != 0]
    assert len(log2_p) == sum(len(text) for _, text in corpus.held_out)
    assert bits == pytest.approx(-log2_p.mean().item(), rel=1e-5)
    assert run.evaluate() == bits
    assert run.evaluate(lambda: True) is None
    assert run.evaluations == [(1, bits), (1, bits)]


def test_resumed_run_equals_the_uninterrupted_one(corpus, tmp_path):
    whole, first = make_trainer(corpus), make_trainer(corpus)
    for _ in range(6):
        whole.train_step()
    for _ in range(3):
        first.train_step()
    first.save(tmp_path / "first")
    del first
    torch.manual_seed(99)
    rest = make_trainer(corpus)
    rest.load(tmp_path / "first")
    rest.evaluate()
    rest.evaluations.clear()
    for _ in range(3):
        rest.train_step()
    for name, run in (("whole", whole), ("rest", rest)):
        (tmp_path / name).mkdir()
        run.save(tmp_path / name / train.CHECKPOINT)
    tensors, metadata = checkpoint(tmp_path / "rest")
    assert metadata["step"] == len(tensors["losses"]) == 6
    moments = [name for name in tensors if name.endswith(".exp_avg_sq")]
    assert len(moments) == len(list(rest.model.parameters()))
    assert_same_checkpoints(tmp_path / "whole", tmp_path / "rest")


def test_writes_everything(folder, tmp_path, capfd):
    out = tmp_path / "out"
    for _ in range(2):
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
    assert (out / "checkpoint.old.safetensors").exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_stopped_at_any_moment_it_goes_on(folder, tmp_path, number):
    args = ["--data", folder, *TINY, "--steps", 300, "--save-every", 20, "--eval-every", 40]
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
    while not (tmp_path / "stopped" / train.CHECKPOINT).exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    if number == signal.SIGKILL:
        assert process.returncode == -number, err
    else:
        assert process.returncode == 128 + number, err
        assert f"--out {tmp_path / 'stopped'} --resume" in out
    assert 20 <= checkpoint(tmp_path / "stopped")[1]["step"] < 300
    run("--out", tmp_path / "stopped", "--resume")
    run("--out", tmp_path / "whole", *args)
    assert_same_checkpoints(tmp_path / "stopped", tmp_path / "whole")


def test_resume_without_a_checkpoint_starts(folder, tmp_path, capsys):
    run("--data", folder, "--out", tmp_path / "out", "--resume", *TINY)
    assert "No checkpoint" in capsys.readouterr().out
    assert checkpoint(tmp_path / "out")[1]["step"] == 6


def test_resume_of_a_finished_run_writes_again(folder, tmp_path):
    out = tmp_path / "out"
    run("--data", folder, "--out", out, *TINY)
    before = (out / train.CHECKPOINT).read_bytes()
    (out / "loss.png").unlink()
    run("--out", out, "--resume")
    assert (out / "loss.png").exists()
    assert (out / train.CHECKPOINT).read_bytes() == before


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--lr", "0.5"], "expected --lr to be 0.003 as in .*, got 0.5; leave --lr out"),
        (["--steps", "7"], "expected --steps to be 6 as in .*, got 7"),
        (["--seq-len", "16"], "expected --seq-len to be 32 as in .*, got 16"),
    ],
)
def test_resume_with_other_settings(folder, tmp_path, capsys, args, message):
    run("--data", folder, "--out", tmp_path / "out", *TINY)
    run("--out", tmp_path / "out", "--resume", *args, code=2)
    assert_error(capsys, message)


def assert_error(capsys, message):
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.search("^gla_ext[.]train: .*" + message, error)


def test_resume_with_other_text(folder, tmp_path, capsys):
    run("--data", folder, "--out", tmp_path / "out", *TINY)
    folder.rename(tmp_path / "elsewhere")
    run("--data", tmp_path / "elsewhere", "--out", tmp_path / "out", "--resume")
    (tmp_path / "elsewhere" / "3.txt").write_text("something else")
    run("--out", tmp_path / "out", "--resume", "--data", tmp_path / "elsewhere", code=2)
    assert_error(capsys, "to be trained on the text given now .* got a checkpoint of other text")


def test_resume_from_another_file(folder, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    write_tensors(tmp_path / "out" / train.CHECKPOINT, {"x": torch.zeros(1)})
    run("--data", folder, "--out", tmp_path / "out", "--resume", *TINY, code=2)
    assert_error(capsys, "to be a checkpoint of the format gla_ext.train/1, got None")


def test_missing_text_is_one_line(tmp_path, capsys):
    run("--data", tmp_path / "nowhere", "--out", tmp_path / "out", *TINY, code=2)
    assert_error(capsys, "nowhere")


def test_missing_packages_are_named_at_once(tmp_path, capsys, monkeypatch):
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else there(name)
    )
    run("--out", tmp_path / "out", *TINY, code=2)
    assert_error(capsys, r"expected .* got no matplotlib; pip install 'gla_ext\[train\]'")


def test_a_loss_that_is_not_finite_stops_the_run(folder, tmp_path, capsys):
    run("--data", folder, "--out", tmp_path / "out", *TINY, "--lr", "inf", code=2)
    assert_error(capsys, "expected a finite loss, got nan before step 6; a lower --lr may help")
    assert not (tmp_path / "out" / train.CHECKPOINT).exists()


def test_bfloat16(folder, tmp_path):
    run("--data", folder, "--out", tmp_path / "out", *TINY, "--dtype", "bfloat16")
    tensors, metadata = checkpoint(tmp_path / "out")
    assert metadata["settings"]["dtype"] == "bfloat16"
    assert tensors["model.lm_head.weight"].dtype == torch.float32
    assert tensors["losses"].isfinite().all()


def test_compile(folder, tmp_path, monkeypatch):
    compiled = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", compiled)
    run("--data", folder, "--out", tmp_path / "compiled", *TINY, "--compile")
    run("--data", folder, "--out", tmp_path / "eager", *TINY)
    losses = [checkpoint(tmp_path / name)[0]["losses"] for name in ("compiled", "eager")]
    assert torch.allclose(*losses, rtol=1e-5)


def test_device_follows_the_operators(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    asked = []

    def has_kernel(name, key):
        asked.append((name, key))
        return True

    built = torch._C._dispatch_has_kernel_for_dispatch_key("gla_ext::chunk_gla_fwd", "CUDA")
    assert train.default_device() == ("cuda" if built else "cpu")
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", has_kernel)
    assert train.default_device() == "cuda"
    assert asked == [("gla_ext::chunk_gla_fwd", "CUDA")]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert train.default_device() == "cpu"
