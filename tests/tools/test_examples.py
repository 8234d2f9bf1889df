"""Every program of examples/, at a tiny size."""

import json
import os
import re
import sys
import urllib.request

import pytest
import torch
from models import make_model
from served import serving
from source_tree import ROOT, load_module, run

from gla_ext.model.checkpoint import load_model
from gla_ext.serve.text import Bytes

EXAMPLES = ROOT / "examples"
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def example(name: str, *args) -> str:
    """What the program prints."""
    command = [sys.executable, EXAMPLES / f"{name}.py", *args]
    result = run(*map(str, command), **ENVIRONMENT)
    assert result.returncode == 0, result.stderr
    return result.stdout


def numbers(pattern: str, text: str) -> list[float]:
    return [float(x) for x in re.findall(pattern, text)]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{n} times {n} is {n * n}. \N{CHECK MARK}\n" for n in range(200)))
    return path


@pytest.fixture
def checkpoint(request, tmp_path):
    """The folder of a small model of bytes, in eval mode, and the model; `param` is its end."""
    model = make_model(vocab_size=256, eos_token_id=getattr(request, "param", 0))
    model.save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint", model


TINY = ["--steps", 41, "--batch-size", 4, "--seq-len", 32, "--lr", "1e-2"]


def test_train(text, tmp_path, device):
    tiny = [*TINY, "--hidden-size", 32, "--device", device]
    output = example("train", text, *tiny, "--out", tmp_path / "model")
    losses = numbers(r"step \d+: ([\d.]+) bits/byte", output)
    assert len(losses) == 3
    assert losses[0] == pytest.approx(8, abs=1.5)
    (held_out,) = numbers(r"held out: ([\d.]+) bits/byte", output)
    assert max(losses[-1], held_out) < 0.6 * losses[0]
    assert "\ndef " in output
    assert load_model(tmp_path / "model").config.hidden_size == 32


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("pipe", "to be a text file, got a pipe, socket, folder or device"),
        ("latin", "to be UTF-8, got 'utf-8' codec can't decode byte 0xe9 in position 3"),
        ("large", "to have at most 16777216 bytes, got 16777217; python -m gla_ext.train takes"),
        ("short", "to have at least 320 tokens, got 6"),
    ],
)
def test_text_that_cannot_be_used(tmp_path, monkeypatch, place, message):
    monkeypatch.syspath_prepend(EXAMPLES)
    module = load_module("examples/text.py")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "latin").write_bytes(b"caf\xe9" * 200)
    (tmp_path / "large").write_bytes(b"a" * ((16 << 20) + 1))
    (tmp_path / "short").write_bytes(b"short")
    with pytest.raises(ValueError, match=message):
        module.load_text(tmp_path / place, Bytes(), 32)


def call(monkeypatch, name: str, *args) -> None:
    """The program's `main` in this process."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", [name, *map(str, args)])
    load_module(f"examples/{name}.py").main()


def test_a_model_is_not_written_over_unasked(text, checkpoint, monkeypatch):
    folder, _ = checkpoint
    before = (folder / "model.safetensors").read_bytes()
    message = f"{folder} to hold no earlier run, got model.safetensors, config.json; another"
    with pytest.raises(ValueError, match=message):
        call(monkeypatch, "train", text, "--out", folder)
    with pytest.raises(ValueError, match=message):
        call(monkeypatch, "finetune_fla_checkpoint", folder, folder, text)
    assert (folder / "model.safetensors").read_bytes() == before
    args = [*TINY, "--steps", 1, "--device", "cpu", "--overwrite"]
    call(monkeypatch, "finetune_fla_checkpoint", folder, folder, text, *args)
    tuned = (folder / "model.safetensors").read_bytes()
    call(monkeypatch, "train", text, "--out", folder, *args)
    assert len({before, tuned, (folder / "model.safetensors").read_bytes()}) == 3


@pytest.mark.parametrize(
    ("name", "args"),
    [("train", []), ("finetune_fla_checkpoint", ["model", "out"])],
)
def test_a_device_that_is_not_supported(monkeypatch, capsys, name, args):
    with pytest.raises(SystemExit, match="2"):
        call(monkeypatch, name, *args, "--device", "mps")
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.endswith("operators for, cpu or cuda, got mps")


def test_finetune(text, checkpoint, tmp_path, device):
    folder, model = checkpoint
    out = tmp_path / "out"
    output = example("finetune_fla_checkpoint", folder, out, text, *TINY, "--device", device)
    (before,) = numbers(r"before: held out ([\d.]+)", output)
    (after,) = numbers(r"after: held out ([\d.]+)", output)
    tokens = torch.tensor([0, *text.read_bytes()])
    tail = tokens[-(len(tokens) // 10) :].unfold(0, 32, 32)[:16]
    tuned = load_model(out)
    with torch.no_grad():
        assert before == pytest.approx(model(tail, labels=tail).loss.item(), abs=1e-3)
        assert after == pytest.approx(tuned(tail, labels=tail).loss.item(), abs=1e-3)
    assert after < 0.6 * before
    assert tuned.config == model.config


def test_a_model_of_other_tokens_needs_its_tokenizer(text, tmp_path):
    folder = tmp_path / "checkpoint"
    make_model().save_pretrained(folder)
    command = [EXAMPLES / "finetune_fla_checkpoint.py", folder, tmp_path / "out", text]
    result = run(sys.executable, *map(str, command), **ENVIRONMENT)
    assert result.returncode == 1
    assert "as its model has 31 tokens" in result.stderr.splitlines()[-1]


def test_finetune_with_a_tokenizer(text, tmp_path):
    """The tokenizer beside the checkpoint, of 400 tokens, is used and saved again."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train([str(text)], vocab_size=400)
    folder, out = tmp_path / "checkpoint", tmp_path / "out"
    model = make_model(vocab_size=400)
    model.save_pretrained(folder)
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer)
    wrapped.save_pretrained(folder)
    args = [folder, out, text, *TINY, "--device", "cpu"]
    (before,) = numbers(r"before: held out ([\d.]+)", example("finetune_fla_checkpoint", *args))
    tokens = torch.tensor(wrapped.encode(text.read_text()))
    tail = tokens[-(len(tokens) // 10) :].unfold(0, 32, 32)[:16]
    with torch.no_grad():
        assert before == pytest.approx(model(tail, labels=tail).loss.item(), abs=1e-3)
    line = "12 times 12"
    assert transformers.AutoTokenizer.from_pretrained(out).encode(line) == wrapped.encode(line)


@pytest.mark.parametrize("gla", [[], ["--gla"]], ids=["attention", "GLA"])
def test_transformer(gla, text, device):
    tiny = ["--width", 32, "--heads", 2, "--layers", 1, "--device", device]
    output = example("transformer", text, *TINY, *tiny, *gla)
    losses = numbers(r"loss ([\d.]+) nats/byte", output)
    assert len(losses) == 3
    assert losses[-1] < 0.7 * losses[0]


def test_serve(checkpoint, tmp_path):
    pytest.importorskip("uvicorn")
    folder, model = checkpoint
    with serving(folder, tmp_path / "log") as server:
        url = f"http://127.0.0.1:{server.port}/v1/completions"
        body = json.dumps({"prompt": "def f(x):", "max_tokens": 30, "temperature": 0}).encode()
        with urllib.request.urlopen(url, body, timeout=60) as reply:
            (choice,) = json.load(reply)["choices"]
    prompt = [0, *b"def f(x):"]
    (row,) = model.generate([prompt], 30, temperature=0, eos_token_id=0)
    tokens = row[len(prompt) :].tolist()
    tokens = tokens[: tokens.index(0)] if 0 in tokens else tokens
    assert choice["text"] == bytes(tokens).decode(errors="replace").rstrip("\ufffd")
