"""Every program of examples/, at a tiny size."""

import concurrent.futures
import contextlib
import difflib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from models import make_model
from source_tree import ROOT, load_module, run

from gla_ext.model.checkpoint import load_model

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
        module.load_text(tmp_path / place, module.Bytes(), 32)


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
    [("serve", ["model"]), ("train", []), ("finetune_fla_checkpoint", ["model", "out"])],
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


@pytest.mark.parametrize("name", ["transformer", "transformer_gla"])
def test_transformer(name, text, device):
    tiny = ["--width", 32, "--heads", 2, "--layers", 1, "--device", device]
    output = example(name, text, *TINY, *tiny)
    losses = numbers(r"loss ([\d.]+) nats/byte", output)
    assert len(losses) == 3
    assert losses[-1] < 0.7 * losses[0]


def test_two_lines_make_a_transformer_a_gla_model():
    plain, gla = (
        (EXAMPLES / f"{name}.py").read_text().splitlines()
        for name in ("transformer", "transformer_gla")
    )
    changes = [line for line in difflib.ndiff(plain, gla) if line[0] in "+-" and line[1:].strip()]
    assert changes == [
        "+ from gla_ext import MultiheadGLA",
        "+         layer.self_attn = MultiheadGLA(width, heads, batch_first=True)",
    ]


class Served(NamedTuple):
    """A server in a process of its own."""

    port: int
    model: torch.nn.Module
    log: Path
    process: subprocess.Popen


@pytest.fixture
def served(checkpoint, tmp_path, device):
    folder, model = checkpoint
    log = tmp_path / "log"
    command = [sys.executable, EXAMPLES / "serve.py", folder, "--port", "0", "--device", device]
    command += ["--max-prompt-tokens", "1000"]
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=os.environ | ENVIRONMENT
        ) as server,
    ):
        try:
            port = int(server.stdout.readline().rpartition(":")[2])
            yield Served(port, model.to(device), log, server)
        finally:
            server.terminate()


def post(port, body, path="/generate"):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        body = body if isinstance(body, bytes) else json.dumps(body)
        connection.request("POST", path, body)
        response = connection.getresponse()
        return response.status, response.read().decode()


def events(port, prompt, **options):
    """The tokens and the text of a reply."""
    status, body = post(port, {"prompt": prompt} | options)
    assert status == 200
    *lines, done, end = body.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    pairs = [json.loads(line.removeprefix("data: ")) for line in lines]
    return [pair["token"] for pair in pairs], "".join(pair["text"] for pair in pairs)


def greedy(model, prompt, count):
    """The same of `generate`."""
    prompt = [0, *prompt.encode()]
    (row,) = model.generate([prompt], count, temperature=0, eos_token_id=0)
    tokens = row[len(prompt) :].tolist()
    tokens = tokens[: tokens.index(0)] if 0 in tokens else tokens
    return tokens, bytes(tokens).decode(errors="replace").rstrip("\ufffd")


def at_once(served, count):
    """The tokens of as many replies, to clients that all connect before the first is served."""
    os.kill(served.process.pid, signal.SIGSTOP)
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        replies = [pool.submit(events, served.port, "a", max_new_tokens=2) for _ in range(count)]
        time.sleep(0.5)
        os.kill(served.process.pid, signal.SIGCONT)
        return [reply.result()[0] for reply in replies]


def test_serve(served):
    port, model, log, _ = served
    prompts = ["def f(x):", "\N{SNOWMAN}", "", "yes, " * 50]
    with concurrent.futures.ThreadPoolExecutor() as pool:  # in turns, and none gets another's
        replies = pool.map(lambda p: events(port, p, max_new_tokens=30, temperature=0), prompts)
    for prompt, reply in zip(prompts, replies, strict=True):
        assert reply == greedy(model, prompt, 30), prompt
    assert len(events(port, "a", temperature=2.0, top_k=50, top_p=0.99)[0]) <= 100
    assert events(port, "a", max_new_tokens=0) == ([], "")
    bad = [{}, {"prompt": 5}, {"prompt": "a", "top_k": 1.5}, {"prompt": "a", "beams": 2}, [1]]
    bad += [{"prompt": "a", "temperature": -1}, b"{", b"\xff", b""]
    bad += [{"prompt": "a", "max_new_tokens": 4097}]
    for body in bad:
        status, reason = post(port, body)
        assert (status, "Error: " in reason) == (400, True), body
    assert "expected top_k to be int | None, got 1.5" in post(port, bad[2])[1]
    assert "max_new_tokens to be at most 4096, got 4097" in post(port, bad[-1])[1]
    assert post(port, {"prompt": "a"}, "/")[0] == 404
    assert len(events(port, "a" * 999, max_new_tokens=3)[0]) <= 3
    for size in (1000, 10**6):
        expected = f"expected a prompt of at most 1000 tokens, got {size + 1}\n"
        assert post(port, {"prompt": "a" * size}) == (413, expected)
    status, reason = post(port, {"prompt": "a" * 3 * 10**6})
    assert (status, "a body of 1 to 1048576 bytes, got 30000" in reason) == (413, True)
    assert max(map(len, at_once(served, 64))) <= 2
    assert "Traceback" not in log.read_text()


def open_stream(port) -> socket.socket:
    """The connection of a client that has asked for many tokens."""
    body = json.dumps({"prompt": "a", "max_new_tokens": 4096})
    client = socket.create_connection(("127.0.0.1", port), timeout=60)
    head = f"POST /generate HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
    client.sendall(f"{head}{body}".encode())
    return client


@pytest.mark.parametrize("checkpoint", [None], indirect=True)
def test_an_interrupt_ends_the_server(served):
    """With two streams under way and a request half sent."""
    half = socket.create_connection(("127.0.0.1", served.port), timeout=60)
    with open_stream(served.port) as one, open_stream(served.port) as other, half:
        half.sendall(b"POST /generate HTTP/1.1\r\nContent-Length: 50\r\n\r\n{")
        for stream in (one, other):
            assert stream.recv(100).startswith(b"HTTP/1.1 200")
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(60) == 0
    assert "Traceback" not in served.log.read_text()


@pytest.mark.parametrize("checkpoint", [None], indirect=True)
def test_a_client_that_leaves_ends_its_generation(served):
    port, _, log, _ = served
    for _ in range(3):
        with open_stream(port) as client:
            assert client.recv(100).startswith(b"HTTP/1.1 200")
    end = time.monotonic() + 60
    while log.read_text().count("the client left") < 3 and time.monotonic() < end:
        time.sleep(0.05)
    assert log.read_text().count("the client left") == 3
    assert len(events(port, "b", max_new_tokens=5)[0]) == 5
    assert "Traceback" not in log.read_text()


def test_text_of_tokens():
    """Characters of several tokens, and a decoder that drops a space at the start."""
    helpers = load_module("examples/text.py")
    Bytes = helpers.Bytes

    def pieces(tokenizer, prompt, tokens):
        return [text for _, text in helpers.with_text(tokenizer, prompt, iter(tokens))]

    assert pieces(Bytes(), [0, *b"a"], "xé€.".encode()) == ["x", "", "é", "", "", "€", "."]
    assert pieces(Bytes(), [0], [0xFF, 0x80, *b"a", 0xE2]) == ["", "", "\ufffd\ufffda", ""]

    class Words:
        def decode(self, tokens):
            return " ".join(["one", "two", "three"][token] for token in tokens)

    assert pieces(Words(), [0], [1, 2, 2]) == [" two", " three", " three"]
