"""Training from the command line: steps, what is written, stopping and going on.

Equal bits (see common.py): the same calls.
"""

import functools
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from common import ROOT
from torch.nn import functional as F

from gla_ext.decode.sampling import choose
from gla_ext.devices import check_device
from gla_ext.model import GLAForCausalLM
from gla_ext.model.checkpoint import load_model, read_metadata, read_tensors, write_tensors
from gla_ext.train import command as train
from gla_ext.train import data, trainer
from gla_ext.train.data import encode, load_corpus

TINY = ["--steps", 6, "--batch-size", 2, "--seq-len", 32, "--hidden-size", 16, "--layers", 1]
TINY += ["--heads", 2, "--device", "cpu", "--sample-bytes", 8]


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
        run.update()
    first = run.losses[0].item() / math.log(2)
    assert first == pytest.approx(8, abs=1.5)
    assert run.recent_loss() < 0.4 * first
    assert run.evaluate() < 0.4 * first


@pytest.mark.parametrize("use_short_conv", [False, True])
def test_held_out_bits_are_those_of_one_long_text(corpus, monkeypatch, use_short_conv):
    run = make_trainer(corpus, use_short_conv=use_short_conv)
    run.update()
    monkeypatch.setattr(run, "evaluation_segment", 50)
    bits = run.evaluate()
    row = run.held_out.long()
    log2_p = run.model(row[None, :-1]).logits[0].double().log_softmax(-1) / math.log(2)
    log2_p = log2_p.gather(-1, row[1:, None])[row[1:] != 0]
    assert len(log2_p) == sum(len(text) for _, text in corpus.held_out)
    assert bits == pytest.approx(-log2_p.mean().item(), rel=1e-5)
    assert run.evaluate() == bits
    assert run.evaluate(lambda: True) is None
    assert run.evaluations == [(1, bits), (1, bits)]


@pytest.mark.parametrize("use_short_conv", [False, True])
def test_resumed_run_equals_the_uninterrupted_one(corpus, tmp_path, use_short_conv):
    whole, first = (make_trainer(corpus, use_short_conv=use_short_conv) for _ in range(2))
    for _ in range(6):
        whole.update()
    for _ in range(3):
        first.update()
    first.save(tmp_path / "first")
    del first
    torch.manual_seed(99)
    rest = make_trainer(corpus, use_short_conv=use_short_conv)
    rest.load(tmp_path / "first")
    rest.evaluate()
    rest.evaluations.clear()
    for _ in range(3):
        rest.update()
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


@pytest.fixture(scope="module")
def whole(tmp_path_factory, texts):
    """The arguments of a run, and the folder of one that nothing stopped."""
    folder, out = (tmp_path_factory.mktemp("whole") / name for name in ("text", "out"))
    texts(folder)
    args = ["--data", folder, *TINY, "--steps", 300, "--save-every", 20, "--eval-every", 40]
    run("--out", out, *args)
    return args, out


@pytest.mark.parametrize("first_step", [0, 20])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
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
    assert first_step <= checkpoint(tmp_path / "stopped")[1]["step"] < 300
    run("--out", tmp_path / "stopped", "--resume", "--device", "cpu")
    assert_same_checkpoints(tmp_path / "stopped", never_stopped)


@pytest.mark.parametrize("damage", [b"", b"not a checkpoint", None])
def test_resume_from_a_damaged_checkpoint(folder, tmp_path, capsys, damage):
    out = tmp_path / "out"
    run("--data", folder, "--out", out, *TINY)
    path = out / train.CHECKPOINT
    path.write_bytes(path.read_bytes()[:-100] if damage is None else damage)
    run("--out", out, "--resume", code=2)
    assert f"expected {path} to be a whole safetensors file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--save-every", 0, "expected --save-every to be at least 1, got 0"),
        ("--steps", -1, "expected --steps to be at least 0, got -1"),
        ("--batch-size", 0, "expected --batch-size to be at least 1, got 0"),
        ("--grad-clip", -1.0, "expected --grad-clip to be at least 0, got -1.0"),
        ("--lr", "nan", "expected --lr to be at least 0, got nan"),
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


def test_resume_without_a_checkpoint_starts(folder, tmp_path, capsys):
    run("--data", folder, "--out", tmp_path / "out", "--resume", *TINY)
    assert "No checkpoint" in capsys.readouterr().out
    assert checkpoint(tmp_path / "out")[1]["step"] == 6


def test_resume_of_a_finished_run_writes_again(folder, tmp_path):
    out = tmp_path / "out"
    run("--data", folder, "--out", out, *TINY)
    before = (out / train.CHECKPOINT).read_bytes()
    (out / "loss.png").unlink()
    run("--out", out, "--resume", "--device", "cpu")
    assert (out / "loss.png").exists()
    assert (out / train.CHECKPOINT).read_bytes() == before


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--lr", "0.5"], "expected --lr to be 0.003 as in .*, got 0.5; leave --lr out"),
        (["--steps", "5"], "expected --steps to be at least 6, the step of .*, got 5"),
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
    run("--data", tmp_path / "elsewhere", "--out", tmp_path / "out", "--resume", "--device", "cpu")
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
    assert_error(capsys, r"expected .* got no matplotlib; 'pip install matplotlib' brings")


def test_a_loss_that_is_not_finite_stops_the_run(folder, tmp_path, capsys):
    run("--data", folder, "--out", tmp_path / "out", *TINY, "--lr", "inf", code=2)
    assert_error(capsys, "expected a finite loss, got nan before step 6; a lower --lr may help")
    assert checkpoint(tmp_path / "out")[1]["step"] == 0  # nothing saved since the start


def test_short_convolutions(folder, tmp_path):
    """They start as torch's, and are in the model that is written."""
    run("--data", folder, "--out", tmp_path, *TINY, "--use-short-conv", "--steps", 0)
    weight = checkpoint(tmp_path)[0]["model.model.layers.0.attn.q_conv1d.weight"]
    assert weight.shape == (8, 1, 4)
    assert 0.3 < weight.abs().max() <= 0.5 and weight.std() > 0.2  # uniform, within 4 ** -0.5
    model = GLAForCausalLM.from_pretrained(tmp_path)
    assert model.config.use_short_conv
    assert model.generate(torch.tensor([[0, 100]]), 3).shape == (1, 5)


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
    with pytest.raises(ValueError, match="this build has no CUDA operators, got cuda"):
        check_device("cuda")


def blanks_drawn(**options) -> float:
    """The share of blanks in draws of text whose blanks come in runs of 25, words of 12 letters."""
    after_blank, after_letter = (torch.tensor([p, 1 - p]).log() for p in (24 / 25, 1 / 12))
    torch.manual_seed(0)
    blanks, tokens = 0, torch.zeros(256, dtype=torch.long)
    for _ in range(400):
        logits = torch.where(tokens[:, None] == 0, after_blank, after_letter)
        tokens, _ = choose(logits, torch.empty(256, 2).exponential_(), **options)
        blanks += (tokens == 0).sum().item()
    return blanks / (256 * 400)


def test_the_sample_has_as_many_blanks_as_the_text():
    share = blanks_drawn(temperature=trainer.SAMPLE_TEMPERATURE)
    assert share == pytest.approx(25 / 37, abs=0.05)
    assert blanks_drawn(temperature=0.7, top_p=0.95) > 0.9  # as the sample once was


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
