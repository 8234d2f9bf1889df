"""Who may ask a server, and what its log says."""

import json
import logging
import re
import signal
import socket

import pytest
from models import make_model
from served import client_of, serving

from gla_ext.serve import Engine, Limits
from gla_ext.serve.text import Bytes

for package in ("starlette", "uvicorn"):
    pytest.importorskip(package)

BODY = {"prompt": "ab", "max_tokens": 4}
LINE = re.compile(r"(\S+) (\S+) (\S+) (\d+), (\d+) tokens in, (\d+) out, (\d+\.\d{3}) s(?:: (.*))?")


def engine():
    return Engine(make_model(vocab_size=256, eos_token_id=None), Bytes(), Limits(rows=2))


def test_the_key():
    """Of all under /v1, and of nothing else."""
    with client_of(engine(), api_key="s3cret") as client:
        for given in (None, "Bearer", "Bearer s3cre", "Basic s3cret", "s3cret", "Bearer é"):
            headers = {} if given is None else {"Authorization": given.encode("latin-1")}
            for method, path in (("POST", "completions"), ("GET", "models"), ("GET", "none")):
                reply = client.request(method, f"/v1/{path}", headers=headers)
                assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer")
                assert reply.json()["error"]["code"] == "invalid_api_key"
        for scheme in ("Bearer", "bearer"):
            headers = {"Authorization": f"{scheme} s3cret"}
            reply = client.post("/v1/completions", json=BODY, headers=headers)
            assert reply.status_code == 200
        assert [client.get(path).status_code for path in ("/health", "/metrics")] == [200, 200]


@pytest.mark.parametrize("api_key", [None, "s3cret"])
def test_pages_of_other_origins(api_key):
    """A browser asks first, without the key; errors can be read too."""
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "a, b"}
    allowed, header = "https://a.org", "access-control-allow-origin"
    with client_of(engine(), api_key=api_key, allow_origins=(allowed,)) as client:
        for origin, status in ((allowed, 200), ("https://b.org", 400)):
            reply = client.options("/v1/completions", headers=ask | {"Origin": origin})
            assert reply.status_code == status
            found = client.post("/v1/completions", json={}, headers={"Origin": origin})
            assert found.status_code == (400 if api_key is None else 401)
            for one in (reply, found):
                assert one.headers.get(header) == (allowed if origin == allowed else None)
    with client_of(engine(), allow_origins=("*",)) as client:
        assert client.get("/health", headers={"Origin": "null"}).headers[header] == "*"
    with client_of(engine()) as client:
        assert (
            client.options("/v1/completions", headers=ask | {"Origin": allowed}).status_code == 405
        )


def test_a_line_for_each_request(caplog):
    caplog.set_level(logging.INFO, "gla_ext.serve")
    with client_of(engine(), api_key="s3cret") as client:

        def post(body, key="s3cret", path="/v1/completions"):
            return client.post(path, json=body, headers={"Authorization": f"Bearer {key}"})

        ident = post(BODY | {"n": 2}).json()["id"]
        event = post(BODY | {"stream": True}).text.split("\n\n")[0]
        post(BODY | {"a\nb": 1})
        post(BODY, "wrong")
        post(BODY, path="/v1/a%0Ab")
        client.get("/health")
    found = [LINE.fullmatch(message).groups() for message in caplog.messages]
    expected = [
        (ident, "/v1/completions", "200", "3", "8", None),
        (json.loads(event[6:])["id"], "/v1/completions", "200", "3", "4", None),
        ("-", "/v1/completions", "400", "0", "0", r"expected names among .*, got a\\nb'"),
        ("-", "/v1/completions", "401", "0", "0", "expected the server's key, as 'Auth.*'"),
        ("-", "/v1/a%0Ab", "404", "0", "0", None),
    ]
    for line, wanted in zip(found, expected, strict=True):
        ident, method, path, status, tokens_in, tokens_out, seconds, note = line
        assert (ident, path, status, tokens_in, tokens_out) == wanted[:-1]
        assert method == "POST" and 0 <= float(seconds) < 60
        assert note is None if wanted[-1] is None else re.search(wanted[-1], note)
    assert "s3cret" not in caplog.text and "wrong" not in caplog.text


@pytest.mark.slow
def test_the_log_of_a_server(tmp_path):
    """A client that leaves, an end by a signal; at level error nothing of this."""
    make_model(vocab_size=256, eos_token_id=None).save_pretrained(tmp_path / "model")
    for options, count in ([], 3), (["--log-level", "error"], 0):
        log = tmp_path / f"log{count}"
        with serving(tmp_path / "model", log, *options) as server:
            client = socket.create_connection(("127.0.0.1", server.port), timeout=60)
            body = json.dumps(BODY | {"max_tokens": 4000, "stream": True}).encode()
            head = b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body)
            client.sendall(head + body)
            assert client.recv(100)
            client.close()
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(60) == 0
        lines = log.read_text().splitlines()
        expected = (
            r"cmpl-\w+ POST /v1/completions 200, 3 tokens in, \d+ out, .* s: the client left",
            r"shutting down: \d sequences run, 0 wait, within 60 s",
            r"shut down",
        )[:count]
        for line, rest in zip(lines, expected, strict=True):
            assert re.fullmatch(rf"\d{{4}}-\d\d-\d\d [\d:,]+ INFO gla_ext\.serve: {rest}", line)
