"""The server's command line: errors that a user can mend are a sentence, and --help tells all."""

import argparse
import functools
import json
import re
import shlex
import shutil
import socket
import sys

import pytest
import torch
from models import make_model

from gla_ext import generate
from gla_ext.model import GLAConfig, GLAForCausalLM
from gla_ext.serve import command

pytest.importorskip("uvicorn")


def fails(capsys, *arguments) -> str:
    """What the command says as it ends with status 2, which is one line."""
    with pytest.raises(SystemExit) as ended:
        command.main([str(argument) for argument in (*arguments, "--device", "cpu")])
    assert ended.value.code == 2
    out, error = capsys.readouterr()
    *usage, last = error.splitlines()
    assert out == "" and (not usage or usage[0].startswith("usage: "))
    assert last.startswith("python -m gla_ext.serve: ")
    return last


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rows", 0], "expected rows to be at least 1, got 0"),
        (["--rows", "many"], "argument --rows: invalid int value: 'many'"),
        (["--waiting", -1], "expected waiting to be at least 0, got -1"),
        (["--max-prompt-tokens", 0], "expected prompt_tokens to be at least 1, got 0"),
        (["--max-new-tokens", 0], "expected new_tokens to be at least 1, got 0"),
        (["--prefill-tokens", 0], "expected prefill_tokens to be at least 1, got 0"),
        (["--checkpoint-tokens", 100], "expected checkpoint_tokens to be a multiple of 64, got"),
        (["--cache-bytes", 10**15], "can't allocate memory: you tried to allocate"),
        (["--cache-bytes", 10**30], "expected cache_bytes below 2**63, got 1000"),
        (["--cache-bytes", -1], "expected cache_bytes to be at least 0, got -1"),
        (["--port", 65536], "argument --port: expected a number from 0 to 65535, got 65536"),
        (["--connections", 0], "argument --connections: expected a number at least 1, got 0"),
        (["--shutdown-seconds", -1], "expected a number at least 0, got -1"),
        (["--host", "no such host"], "expected no such host and port 8000 to be free to listen"),
        (["--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (
            ["--api-key", ""],
            "argument --api-key: expected a key of ASCII characters without blanks",
        ),
        (["--allow-origin", "me.org"], "argument --allow-origin: expected an origin such as http"),
        (["--log-level", "all"], "argument --log-level: invalid choice: 'all'"),
        (["--device", "gpu"], "argument --device: expected --device to be one of torch's"),
    ],
    ids=lambda x: str(x[0]) if isinstance(x, list) else "",
)
def test_options_that_cannot_be(folder, capsys, options, message):
    assert message in fails(capsys, folder, *options)


def test_a_port_in_use(folder, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = fails(capsys, folder, "--port", port)
    assert f"expected 127.0.0.1 and port {port} to be free to listen on, got" in message
    assert "Address already in use" in message


@pytest.mark.parametrize("place", ["init", "warm_up"])
def test_memory_is_a_sentence_and_a_fault_of_ours_a_traceback(folder, capsys, monkeypatch, place):
    def fail(*args, error, **kwargs):
        raise error

    name = {"init": "gla_ext.serve.command.Engine", "warm_up": "gla_ext.serve.Engine.warm_up"}
    no_memory = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    monkeypatch.setattr(name[place], functools.partial(fail, error=no_memory))
    assert "CUDA out of memory" in fails(capsys, folder, "--port", 0)
    monkeypatch.setattr(name[place], functools.partial(fail, error=TypeError("ours")))
    with pytest.raises(TypeError, match="ours"):
        command.main([str(folder), "--port", "0", "--device", "cpu"])


def test_folders_that_hold_no_model(folder, tmp_path, capsys):
    assert f"expected {tmp_path / 'no'} to be a folder" in fails(capsys, tmp_path / "no")
    assert f"expected {tmp_path} to hold config.json" in fails(capsys, tmp_path)
    options = {"hidden_size": 32, "num_heads": 2, "num_hidden_layers": 2, "vocab_size": 256}
    attention = {"layers": [0], "num_heads": 2}
    hybrid = GLAForCausalLM(GLAConfig(**options, attn=attention))
    hybrid.save_pretrained(tmp_path / "hybrid")
    assert "a model with attention layers is not impl" in fails(capsys, tmp_path / "hybrid")
    GLAForCausalLM(GLAConfig(**options | {"vocab_size": 300})).save_pretrained(tmp_path / "words")
    assert "to hold a tokenizer, as its model has 300" in fails(capsys, tmp_path / "words")
    whole = json.loads((folder / "config.json").read_text())
    for name, text, message in (
        ("config.json", "{", "to be JSON, got"),
        ("config.json", json.dumps(whole | {"model_type": "llama"}), "model_type to be 'gla'"),
        ("config.json", json.dumps(whole | {"num_heads": "two"}), "num_heads"),
        ("config.json", "[1]", "config.json to be a JSON object, got list"),
        ("model.safetensors", "none", "to be a whole safetensors file"),
    ):
        shutil.copytree(folder, tmp_path / "odd")
        (tmp_path / "odd" / name).write_text(text, encoding="utf-8")
        assert message in fails(capsys, tmp_path / "odd")
        shutil.rmtree(tmp_path / "odd")


def test_a_training_run_that_stopped(tmp_path, capsys):
    """The sentence has the command that finishes the run, which ends with two commands of its
    model.
    """
    train = pytest.importorskip("gla_ext.train")
    text, out = tmp_path / "text", tmp_path / "out"
    text.write_text("the quick brown fox " * 400)
    tiny = "--batch-size 2 --seq-len 16 --hidden-size 16 --layers 1 --heads 2 --sample-bytes 4"
    given = ["--data", str(text), "--out", str(out), *tiny.split(), "--device", "cpu"]
    assert train.main([*given, "--steps", "3"]) == 0
    for path in out.iterdir():  # removes what a run writes at its end
        if path.suffix != ".safetensors" or path.name == "model.safetensors":
            path.unlink()
    capsys.readouterr()
    message = fails(capsys, out)
    assert f"expected {out} to hold config.json, got a training run that stopped at st" in message
    finish, end = re.findall(r"'python -m gla_ext\.train (.*?)'", message)
    assert finish == f"--out {out} --resume" and end == f"--out {out} --resume --steps 3"
    assert train.main([*end.split(), "--device", "cpu"]) == 0
    text, talk = map(shlex.split, capsys.readouterr().out.splitlines()[-2:])
    program = [sys.executable, "-m", "gla_ext.generate", str(out)]
    assert (text, talk) == ([*program, "def "], [*program, "-i"])
    generate.main([*text[3:], "--device", "cpu", "--max-new-tokens", "4"])
    assert capsys.readouterr().out.startswith("def ")


@pytest.fixture
def served(folder, monkeypatch):
    """A function that runs the command, and returns the engine and the options it would serve."""
    from gla_ext.serve import http

    def run(*arguments, folder=folder):
        found = []
        monkeypatch.setattr(http, "serve", lambda *args: found.append(args))
        command.main([str(folder), "--device", "cpu", "--cache-bytes", "0", *arguments])
        ((engine, _, _, options, *_),) = found
        return engine, options

    return run


def test_options_of_the_server(served):
    _, plain = served()
    assert plain == http_options("checkpoint")
    origins = ("https://a.org", "http://localhost:3000")
    given = [text for origin in origins for text in ("--allow-origin", origin)]
    _, options = served("--allow-refresh", "--api-key", "s3cret", "--name", "a", *given)
    more = {"allow_refresh": True, "api_key": "s3cret", "allow_origins": origins}
    assert options == http_options("a", **more)
    assert "s3cret" not in repr(options)


def http_options(*args, **kwargs):
    from gla_ext.serve.http import Options

    return Options(*args, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_dtype_is_the_checkpoints(served, tmp_path, dtype):
    """Unless another is asked for."""
    make_model(dtype, vocab_size=256, eos_token_id=None).save_pretrained(tmp_path)
    for options, expected in (([], dtype), (["--dtype", "float32"], torch.float32)):
        engine, _ = served(*options, folder=tmp_path)
        assert {x.dtype for x in engine.model.parameters()} == {expected}


def test_help_tells_what_each_option_does():
    """And that its default is the one shown."""
    parser = command.command_line()
    shown = " ".join(parser.format_help().split())
    for action in parser._actions:
        assert len(action.help.split()) >= 3, action.dest
        if action.option_strings and not isinstance(action, argparse._HelpAction):
            shown_as = {"name": "its folder's", "dtype": "the checkpoint's", "api_key": "none"}
            shown_as |= {"allow_origin": "none"}
            default = "no" if action.default is False else action.default
            default = shown_as.get(action.dest, default)
            assert action.help.endswith(f" (default: {default})"), action.dest
            assert " ".join(action.help.split()) in shown


def test_the_command_names_what_is_missing(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "gla_ext.serve.http", None)
    with pytest.raises(SystemExit, match="'pip install safetensors starlette uvicorn' brings it"):
        command.main([str(folder)])
