"""Damaged requests get a completion or an error of the interface, and the server serves on."""

import errno
import json
import socket
from pathlib import Path

import pytest
from fuzzing import BYTES, SECONDS, as_bytes, damaged, edited, limited
from hypothesis import example, given
from hypothesis import strategies as st
from models import make_model
from served import client_of, serving

from gla_ext.serve import Engine, Limits
from gla_ext.serve.http import protocol
from gla_ext.serve.text import Bytes

for package in ("starlette", "uvicorn"):
    pytest.importorskip(package)

ASKED = {
    "model": "gla",
    "prompt": [[1, 2, 3], "text"],
    "max_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "n": 2,
    "best_of": 2,
    "stream": False,
    "stream_options": {"include_usage": True},
    "logprobs": 2,
    "stop": ["a", "bc"],
    "seed": 7,
    "ignore_eos": True,
    "skip_special_tokens": False,
    "user": "someone",
    "echo": True,
    "suffix": None,
    "logit_bias": {"65": 1.5, "7": -100},
    "presence_penalty": 0.5,
    "frequency_penalty": -2,
    "repetition_penalty": 1.1,
    "min_p": 0.1,
    "max_completion_tokens": 3,
    "metadata": {"a": "b"},
}
CHAT = {
    "messages": [
        {"role": "system", "content": "a", "name": "b"},
        {"role": "user", "content": [{"type": "text", "text": "c"}], "audio": None},
        {"role": "assistant", "content": "", "refusal": None, "annotations": []},
    ],
    "logprobs": True,
    "top_logprobs": 2,
    "max_completion_tokens": 3,
    "stream": True,
    "tools": [],
    "response_format": {"type": "text"},
    "stop": "a",
}
BODIES = edited(ASKED).map(as_bytes) | damaged(as_bytes(ASKED))
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"
CHUNKED = f"{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode()
SMALL = as_bytes({"prompt": [1, 2], "max_tokens": 1})
MESSAGES = (
    f"{HEAD}Content-Length: {len(SMALL)}\r\n\r\n".encode() + SMALL,
    CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(SMALL), SMALL),
    b"GET /v1/models/gla HTTP/1.1\r\nHost: here\r\nConnection: keep-alive\r\n\r\n" * 2,
)


def check_error(status: int, body: dict) -> None:
    error = body["error"]
    assert 400 <= status < 500 and error["message"] and error["type"]
    assert json.loads(json.dumps(body, allow_nan=False)) == body


@given(BODIES)
def test_a_body_is_read_or_refused(body):
    with limited(64 << 20):
        try:
            asked = protocol.read(body, "gla")
            tokens = [Bytes().encode(x) if isinstance(x, str) else x for x in asked.prompts]
            assert len(asked.requests(tokens)) == len(tokens) * asked.n
        except protocol.RefusedError as error:
            check_error(error.status, json.loads(error.body()))


@given(edited(CHAT).map(as_bytes) | damaged(as_bytes(CHAT)))
def test_a_conversation_is_read_or_refused(body):
    with limited(64 << 20):
        try:
            asked, messages = protocol.read_chat(body, "gla")
            assert len(asked.requests([[1]])) == asked.n and json.dumps(messages).encode()
            assert all(isinstance(message["content"], str) for message in messages)
        except protocol.RefusedError as error:
            check_error(error.status, json.loads(error.body()))


@given(damaged(b'{"keep_running": true}') | edited({"keep_running": True}).map(as_bytes))
def test_the_body_of_a_refresh_is_read_or_refused(body):
    with limited(64 << 20):
        try:
            assert protocol.read_refresh(body) in (True, False)
        except protocol.RefusedError as error:
            check_error(error.status, json.loads(error.body()))


@pytest.fixture(scope="module")
def client():
    limits = Limits(2, 3, prompt_tokens=64, new_tokens=4, cache_bytes=1 << 20, checkpoint_tokens=64)
    model = make_model(vocab_size=256, eos_token_id=None)
    with client_of(Engine(model, Bytes(), limits)) as client:
        yield client


@given(body=BODIES)
def test_the_application_answers(client, body):
    with limited():
        reply = client.post("/v1/completions", content=body)
    if reply.headers["content-type"].startswith("text/event-stream"):
        assert reply.text.endswith("data: [DONE]\n\n")
    elif reply.status_code == 200:
        assert reply.json()["choices"]
    else:
        check_error(reply.status_code, reply.json())


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder, log = (tmp_path_factory.mktemp(name) / name for name in ("model", "log"))
    make_model(vocab_size=256, eos_token_id=None).save_pretrained(folder)
    with serving(folder, log, "--rows", "2", "--name", "gla") as server:
        before = resident(server)
        yield server
        assert resident(server) < before + BYTES
        assert "Traceback" not in log.read_text()


def resident(served) -> int:
    """The most memory that the process had so far, in bytes."""
    lines = Path(f"/proc/{served.process.pid}/status").read_text().splitlines()
    return next(int(x.split()[1]) << 10 for x in lines if x.startswith("VmHWM"))


@given(sent=st.sampled_from(MESSAGES).flatmap(damaged))
@example(sent=CHUNKED.replace(b"completions", b"nothing") + b"no length\r\n")
def test_a_connection_is_answered_or_closed(served, sent):
    with socket.create_connection(("127.0.0.1", served.port), timeout=SECONDS) as connection:
        received = b""
        try:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            while block := connection.recv(1 << 16):
                received += block
        except OSError as error:  # it may close before all has been sent
            assert error.errno in (errno.ECONNRESET, errno.ENOTCONN, errno.EPIPE)
    assert not received or received.startswith(b"HTTP/1.1 ")
    assert not received.startswith(b"HTTP/1.1 5")
    assert served.process.poll() is None
