"""The folder that a run leaves for Hugging Face's libraries, and lm-eval on it."""

import json
import os
import subprocess
import sys
import types

import pytest
import torch
from trainers import TINY, run

from gla_ext.model.checkpoint import load_model
from gla_ext.train import command
from gla_ext.train.parallel import Parallel
from gla_ext.train.run_folder import RESULTS


def test_transformers_loads_a_run(folder, tmp_path):
    """In a process without gla_ext.hf: test_pretraining_page.py."""
    transformers = pytest.importorskip("transformers")
    from gla_ext import hf

    out = tmp_path / "out"
    run("--data", folder, "--out", out, *TINY)
    assert all((out / name).exists() for name in RESULTS)
    assert json.loads((out / "config.json").read_text())["auto_map"]["AutoConfig"]
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    tokens = transformers.AutoTokenizer.from_pretrained(out)("text", return_tensors="pt").input_ids
    assert type(model) is hf.GLAForCausalLM
    assert torch.equal(model(tokens).logits, load_model(out)(tokens).logits)
    hf.add_custom_code(model).save_pretrained(tmp_path / "again")
    name = "modeling_gla_ext.py"
    assert (out / name).read_text() == (tmp_path / "again" / name).read_text()
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    metrics = json.loads((out / "metrics.json").read_text())
    assert f"| perplexity a token | {metrics['held_out_perplexity']:.2f} |" in card
    assert "in 6 updates of 64 tokens" in card


def test_lm_eval(folder, tmp_path, capsys, monkeypatch):
    out, called = tmp_path / "out", []
    given = ["--data", folder, "--out", out, *TINY, "--evaluate", "piqa", "lambada_openai"]
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: None if name == "lm_eval" else True)
        run(*given, code=2)
    assert "got no lm_eval; 'pip install lm_eval' brings them" in capsys.readouterr().err
    assert not out.exists()

    def starts(words, env, check):
        called.append((words, env))
        return types.SimpleNamespace(returncode=len(called) - 1)

    monkeypatch.setattr(command, "check_packages", lambda names: None)
    monkeypatch.setattr(subprocess, "run", starts)
    monkeypatch.setenv("RANK", "0")
    run(*given)
    words, env = called[0]
    assert words[:5] == [sys.executable, "-m", "lm_eval", "--model", "hf"]
    assert words[5:9] == ["--tasks", "piqa,lambada_openai", "--device", "cpu"]
    assert f"pretrained={out},trust_remote_code=True" in words
    assert "RANK" not in env and env["PATH"] == os.environ["PATH"]
    run("--out", out, "--resume", "--device", "cpu", "--evaluate", "piqa", code=2)
    assert f"lm-eval ended with status 1; the model in {out} is whole" in capsys.readouterr().err
    monkeypatch.setattr(Parallel, "is_first", False)
    run("--out", out, "--resume", "--device", "cpu", "--evaluate", "piqa")
    assert len(called) == 2
