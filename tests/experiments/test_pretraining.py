"""Pretraining beside others: a corpus of a pack, runs of a few updates, and the page of them."""

import json
import math

import pytest
import torch
import torch.nn.functional as F

from experiments import pretraining
from experiments.pack import Document, write_pack
from gla_ext.model import GLAConfig, GLAForCausalLM
from gla_ext.train.presets import RECIPES
from gla_ext.train.tokens.corpus import TokenCorpus
from gla_ext.train.tokens.folder import open_folder

TINY = {"hidden_size": 64, "heads": 1, "layers": 1, "seq_len": 16}
MARKS = ("<!-- begin proof -->", "<!-- end proof -->")


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A corpus of a pack, and batches that suit it."""
    monkeypatch.setitem(RECIPES, "gla-tiny", RECIPES["gla-tiny"] | TINY)
    monkeypatch.setattr(pretraining, "WINDOWS", 4)
    texts = [(f"some words {i} and more of them, " * (5 + i)).encode() for i in range(12)]
    documents = [Document("prose", str(i), text) for i, text in enumerate(texts)]
    monkeypatch.setattr("experiments.pack.HELD_OUT_BYTES", {"prose": 1500, "code": 0})
    write_pack(tmp_path / "pack.tar.xz", documents, {}, {})
    out = tmp_path / "corpus"
    run("corpus", "--text", tmp_path / "pack.tar.xz", "--data", out, "--vocabulary", 280)
    return out


def run(*args, code=0):
    assert pretraining.main([str(arg) for arg in args]) == code


def test_models_side_by_side(data, tmp_path, capsys):
    out, page = tmp_path / "out", tmp_path / "page.md"
    where = ["--data", data, "--out", out, "--preset", "gla-tiny", "--device", "cpu"]
    for name in ("gla", "transformer"):
        run("train", "--model", name, "--tokens", 64 * 12, "--rows", 2, *where)
    lines = {n: (out / f"{n}.jsonl").read_text().splitlines() for n in ("gla", "transformer")}
    results = {name: json.loads(of[-1])["result"] for name, of in lines.items()}
    for name, of in lines.items():
        updates = [entry for entry in map(json.loads, of) if "loss" in entry]
        assert [entry["update"] for entry in updates] == list(range(1, 13))
        assert updates[-1]["tokens"] == results[name]["tokens"] == 64 * 12
        told = results[name]
        folder = open_folder(data)
        per_byte = (len(folder.held_out) - len(folder.held_out.starts)) / folder.held_out.bytes
        assert told["perplexity"] == pytest.approx(2 ** (told["bits_per_byte"] / per_byte))
        assert told["perplexity"] < 280 and told["tokens_per_second"] > 0
    first = [json.loads(of[0])["loss"] for of in lines.values()]
    assert first[0] != first[1] and first == pytest.approx([math.log(280)] * 2, abs=0.7)
    page.write_text(f"before\n{MARKS[0]}\n{MARKS[1]}\nafter\n")
    run("report", "--out", out, "--page", page)
    assert (tmp_path / pretraining.FIGURE).read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    for name, told in results.items():
        assert f"| {pretraining.MODELS[name]} | " in text
        assert f"| {told['perplexity']:.2f} | {told['bits_per_byte']:.4f} | " in text
    assert "FLA" not in text and text.startswith("before\n") and text.endswith("\nafter\n")
    capsys.readouterr()
    run("train", "--model", "fla", "--tokens", 64 * 12, *where, code=2)
    assert "expected a GPU and no --compile with --model fla" in capsys.readouterr().err
    run("train", "--model", "gla", "--tokens", 64 * 10, *where, code=2)
    assert "expected --tokens to be over 640, 10 updates, got 640" in capsys.readouterr().err
    run("report", "--out", tmp_path, "--page", page, code=2)
    assert "to hold runs of this command, got none" in capsys.readouterr().err


def test_an_evaluation_counts_each_token_of_whole_windows_once(data):
    options = {"model": "transformer", "preset": "gla-tiny", "tokens": 64 * 12, "rows": 4}
    given = pretraining.argparse.Namespace(**options, lr=1e-3)
    corpus, cpu = TokenCorpus((open_folder(data),)), torch.device("cpu")
    settings = pretraining.settings_of(given, cpu)
    trainer = pretraining.Contender("transformer", settings, corpus, cpu)
    kinds = [type(block.attn).__name__ for block in trainer.model.model.layers]
    assert kinds == ["Attention"]
    bits = trainer.evaluate()
    tokens = trainer.held_out[:]
    windows = (len(tokens) - 1) // 16
    nats, count = 0.0, 0
    for start in range(0, windows * 16, 16):
        with torch.no_grad():
            logits = trainer.model(tokens[None, start : start + 16]).logits[0]
        for row, target in zip(logits, tokens[start + 1 : start + 17], strict=True):
            if target != corpus.document_start:
                nats += F.cross_entropy(row, target).item()
                count += 1
    perplexity = math.exp(nats / count)
    assert trainer.perplexity(bits) == pytest.approx(perplexity, rel=1e-4)
    assert trainer.evaluations == [(0, bits)]


def test_flas_model_starts_from_our_weights():
    pytest.importorskip("fla.models")
    ours = GLAForCausalLM(GLAConfig(64, num_hidden_layers=2, num_heads=2, vocab_size=100))
    theirs = pretraining.fla_model(ours)
    assert type(theirs).__module__.startswith("fla.")
    pairs = zip(ours.named_parameters(), theirs.named_parameters(), strict=True)
    for (name, x), (their_name, theirs_x) in pairs:
        assert name == their_name and torch.equal(x, theirs_x)
        assert x.data_ptr() != theirs_x.data_ptr()
