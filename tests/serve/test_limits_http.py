"""What the HTTP server does with connections that bring no request, with more of them than it
takes, and with what outlives its shutdown."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from served import ENVIRONMENT

for package in ("starlette", "uvicorn"):
    pytest.importorskip(package)

CONNECTIONS, READ_SECONDS, SHUTDOWN_SECONDS = 3, 0.5, 1
HEAD = b"GET /health HTTP/1.1\r\nHost: a\r\n"
PROGRAM = f"""
from models import make_model
from gla_ext.serve import Engine, Limits
from gla_ext.serve.http import Options, serve
from gla_ext.serve.text import Bytes

engine = Engine(make_model(vocab_size=256, eos_token_id=None), Bytes(), Limits(new_tokens=10**6))
serve(engine, port=0, options=Options(read_seconds={READ_SECONDS}), connections={CONNECTIONS},
      shutdown_seconds={SHUTDOWN_SECONDS})
"""


@contextlib.contextmanager
def running(folder):
    """The process and its port."""
    path = os.pathsep.join([ENVIRONMENT["PYTHONPATH"], "tests/helpers"])
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": path}
    log = folder / "log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=errors, text=True,
            env=environment, cwd=ENVIRONMENT["PYTHONPATH"],
        ) as process,
    ):  # fmt: skip
        try:
            line = process.stdout.readline()
            assert line.startswith("Serving"), log.read_text()
            yield process, int(line.rpartition(":")[2])
        finally:
            process.kill()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running(tmp_path_factory.mktemp("log")) as process_and_port:
        yield process_and_port


def connect(port) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=30)


def streaming(port, **options) -> socket.socket:
    """A connection on which a stream without an end comes."""
    body = json.dumps({"prompt": "a", "max_tokens": 1_000_000, "stream": True} | options).encode()
    client = connect(port)
    client.sendall(
        b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )
    return client


def health(port) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    with contextlib.closing(connection):
        connection.request("GET", "/health")
        return connection.getresponse().status


@pytest.mark.slow
def test_connections_without_a_request_end(server):
    """Silent ones and ones that send a head letter by letter; none of them keeps others out."""
    _, port = server
    assert health(port) == 200
    start = time.monotonic()
    silent, dripping = (connect(port) for _ in range(CONNECTIONS - 1))
    assert health(port) == 200  # as many as there may be
    kept = connect(port)
    assert health(port) == 503
    with pytest.raises(ConnectionError):
        for letter in HEAD + b"X: " + b"a" * 200:
            dripping.sendall(bytes([letter]))
            time.sleep(0.05)
    assert READ_SECONDS <= time.monotonic() - start < 10
    assert silent.recv(10) == kept.recv(10) == b""
    assert health(port) == 200


def test_a_connection_with_requests_stays(server):
    """Each head has the time anew."""
    _, port = server
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as client:
        client.connect()
        sock = client.sock
        for _ in range(3):
            client.request("GET", "/health")
            response = client.getresponse()
            assert (response.status, json.loads(response.read())) == (200, {"status": "ok"})
            time.sleep(0.6 * READ_SECONDS)
        assert client.sock is sock
        sock.sendall(HEAD)
        assert sock.recv(10) == b""


@pytest.mark.parametrize(("size", "status"), [(50_000, b"200"), (1_000_000, b"400")])
def test_the_size_of_a_head(server, size, status):
    with connect(server[1]) as client:
        with contextlib.suppress(ConnectionError):  # refused before all of it was sent
            client.sendall(HEAD + b"X: " + b"a" * size + b"\r\n\r\n")
        assert client.recv(12) == b"HTTP/1.1 " + status


def test_a_whole_reply_that_outlives_the_shutdown_is_an_error(tmp_path):
    with running(tmp_path) as (process, port):
        with contextlib.closing(
            http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        ) as client:
            client.request("POST", "/v1/completions", b'{"prompt": "a", "max_tokens": 1000000}')
            time.sleep(0.5)
            process.send_signal(signal.SIGTERM)
            response = client.getresponse()
            assert response.status == 503
            assert "shut down" in json.loads(response.read())["error"]["message"]
        assert process.wait(20) == 0
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_what_outlives_the_shutdown_ends(tmp_path):
    with running(tmp_path) as (process, port):
        client = streaming(port)
        assert client.recv(10)
        start = time.monotonic()
        process.send_signal(signal.SIGTERM)
        received = b""
        with contextlib.suppress(ConnectionError):
            while block := client.recv(1 << 16):
                received += block
        assert process.wait(20) == 0
        assert SHUTDOWN_SECONDS <= time.monotonic() - start < 15
        assert b"[DONE]" not in received
        last = received.rpartition(b"data: ")[2].decode()
        assert json.loads(last)["error"]["message"].startswith("the server shut down before")
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_a_client_that_reads_nothing_does_not_delay_the_shutdown(tmp_path):
    with running(tmp_path) as (process, port), streaming(port, logprobs=20):
        time.sleep(8)  # until the socket's buffers are full
        start = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert time.monotonic() - start < SHUTDOWN_SECONDS + 5
    assert "Traceback" not in (tmp_path / "log").read_text()
