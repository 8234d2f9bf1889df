"""The programs of examples/ at a tiny size; tests/distributed runs train_distributed.py."""

import os
import re
import sys

import pytest
import torch
from models import make_model
from source_tree import ROOT, load_module

from gla_ext.model.checkpoint import load_model
from gla_ext.serve.text import Bytes

EXAMPLES = ROOT / "examples"
TINY = ["--steps", 41, "--batch-size", 4, "--seq-len", 32, "--lr", "1e-2"]


@pytest.fixture
def example(monkeypatch, capsys):
    """A function that calls a program's `main` and returns what it prints."""
    monkeypatch.syspath_prepend(EXAMPLES)

    def call(name: str, *args) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, args)])
        load_module(f"examples/{name}.py").main()
        return capsys.readouterr().out

    return call


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{n} times {n} is {n * n}. \N{CHECK MARK}\n" for n in range(200)))
    return path


def numbers(pattern: str, text: str) -> list[float]:
    return [float(x) for x in re.findall(pattern, text)]


def test_train(example, text, tmp_path, device):
    args = [*TINY, "--hidden-size", 32, "--device", device, "--out", tmp_path / "model"]
    output = example("train", text, *args)
    losses = numbers(r"step \d+: ([\d.]+) bits/byte", output)
    assert len(losses) == 3
    assert losses[0] == pytest.approx(8, abs=1.5)
    (held_out,) = numbers(r"held out: ([\d.]+) bits/byte", output)
    assert max(losses[-1], held_out) < 0.6 * losses[0]
    assert "\ndef " in output
    assert load_model(tmp_path / "model").config.hidden_size == 32
    with pytest.raises(ValueError, match="model to hold no earlier run"):
        example("train", text, *args)


def test_text_that_cannot_be_used(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    load_text = load_module("examples/text.py").load_text
    path = tmp_path / "text"
    for written, message in [
        (b"caf\xe9" * 200, "to be UTF-8, got 'utf-8' codec can't decode byte 0xe9 in position 3"),
        (b"a" * ((16 << 20) + 1), "at most 16777216 bytes, got 16777217; python -m gla_ext.train"),
        (b"short", "to have at least 320 tokens, got 6"),
    ]:
        path.write_bytes(written)
        with pytest.raises(ValueError, match=message):
            load_text(path, Bytes(), 32)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match="a text file, got a pipe, socket, folder or device"):
        load_text(path, Bytes(), 32)


@pytest.mark.parametrize("tokens", [256, 400])
def test_finetune(tokens, example, text, tmp_path, device):
    """A model of bytes, and one with a tokenizer of 400 tokens, which is used and saved again."""
    folder, out = tmp_path / "checkpoint", tmp_path / "out"
    model = make_model(vocab_size=tokens, eos_token_id=0)
    model.save_pretrained(folder)
    tokenizer = Bytes()
    if tokens > 256:
        transformers = pytest.importorskip("transformers")
        trained = pytest.importorskip("tokenizers").ByteLevelBPETokenizer()
        trained.train([str(text)], vocab_size=tokens)
        with pytest.raises(ValueError, match=f"as its model has {tokens} tokens"):
            example("finetune_fla_checkpoint", folder, out, text)
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer)
        tokenizer.save_pretrained(folder)
    output = example("finetune_fla_checkpoint", folder, out, text, *TINY, "--device", device)
    (before,) = numbers(r"before: held out ([\d.]+)", output)
    (after,) = numbers(r"after: held out ([\d.]+)", output)
    found = torch.tensor(tokenizer.encode(text.read_text()))
    tail = found[-(len(found) // 10) :].unfold(0, 32, 32)[:16]
    tuned = load_model(out)
    with torch.no_grad():
        assert before == pytest.approx(model(tail, labels=tail).loss.item(), abs=1e-3)
        assert after == pytest.approx(tuned(tail, labels=tail).loss.item(), abs=1e-3)
    assert after < 0.6 * before
    assert tuned.config == model.config
    if tokens > 256:
        again = transformers.AutoTokenizer.from_pretrained(out)
        assert again.encode("12 times 12") == tokenizer.encode("12 times 12")
    with pytest.raises(ValueError, match="out to hold no earlier run"):
        example("finetune_fla_checkpoint", folder, out, text)


@pytest.mark.parametrize("gla", [[], ["--gla"]], ids=["attention", "GLA"])
def test_transformer(gla, example, text, device):
    tiny = ["--width", 32, "--heads", 2, "--layers", 1, "--device", device]
    losses = numbers(r"loss ([\d.]+) nats/byte", example("transformer", text, *TINY, *tiny, *gla))
    assert len(losses) == 3
    assert losses[-1] < 0.7 * losses[0]
