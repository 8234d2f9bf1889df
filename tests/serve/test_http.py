"""The HTTP server with the client of OpenAI, and with requests that no such client sends."""

import asyncio
import http.client
import json
import re
import signal
import socket
import threading
import time

import pytest
from models import make_model
from served import Served, client_of, serving

from gla_ext.serve import Engine, Limits
from gla_ext.serve.text import Bytes

for package in ("starlette", "uvicorn"):
    pytest.importorskip(package)

NAME = "tiny"
OPTIONS = ["--name", NAME, "--max-prompt-tokens", "2000", "--max-new-tokens", "3000"]
OPTIONS += ["--rows", "4", "--waiting", "8", "--checkpoint-tokens", "64"]


@pytest.fixture(scope="module")
def served(folder, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "log"
    with serving(folder, log, *OPTIONS) as server:
        yield server
        assert "Traceback" not in log.read_text()


@pytest.fixture(scope="module")
def client(served):
    openai = pytest.importorskip("openai")
    url = f"http://127.0.0.1:{served.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def expected(prompt: str, count: int) -> tuple[list[int], str]:
    """The tokens and text that the model gives greedily."""
    model, tokens = make_model(vocab_size=256, eos_token_id=None), Bytes().encode(prompt)
    (row,) = model.generate([tokens], count, temperature=0)
    new = row[len(tokens) :].tolist()
    return new, bytes(new).decode(errors="replace").rstrip("\ufffd")


def post(served: Served, body, path="/v1/completions", method="POST"):
    """Status, headers and JSON of a reply."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    try:
        connection.request(method, path, body if isinstance(body, bytes) else json.dumps(body))
        response = connection.getresponse()
        return response.status, response.headers, json.loads(response.read())
    finally:
        connection.close()


def gauges(served: Served) -> dict[str, float]:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return {name: float(x) for name, x in re.findall(r"^gla_ext_(\S+) (\S+)$", text, re.MULTILINE)}


def wait_until(condition) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_completions_of_strings_and_tokens(client):
    prompts = ["def f(x):", "\N{SNOWMAN}", "", "yes, " * 50]
    reply = client.completions.create(model=NAME, prompt=prompts, max_tokens=30, temperature=0)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    for prompt, choice in zip(prompts, reply.choices, strict=True):
        assert choice.text == expected(prompt, 30)[1]
        assert choice.finish_reason == "length"
    lengths = [len(Bytes().encode(prompt)) for prompt in prompts]
    assert reply.usage.prompt_tokens == sum(lengths)
    assert reply.usage.completion_tokens == 120
    again = client.completions.create(model=NAME, prompt=prompts, max_tokens=30, temperature=0)
    assert again.usage.prompt_tokens_details.cached_tokens == 192  # of the longest, 251 tokens
    assert [choice.text for choice in again.choices] == [choice.text for choice in reply.choices]
    for tokens in (Bytes().encode("ab"), [Bytes().encode("ab")]):
        one = client.completions.create(model=NAME, prompt=tokens, temperature=0)
        assert one.choices[0].text == expected("ab", 16)[1]  # OpenAI's default of max_tokens


def test_streams(client):
    stream = client.completions.create(
        model=NAME,
        prompt=["yes, " * 50, "def f(x):"],
        max_tokens=40,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, reasons, usage = ["", ""], [None, None], None
    for event in stream:
        assert usage is None and "usage" in event.model_fields_set
        usage = event.usage
        for choice in event.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert texts == [expected("yes, " * 50, 40)[1], expected("def f(x):", 40)[1]]
    assert reasons == ["length", "length"]
    assert (usage.prompt_tokens, usage.completion_tokens) == (251 + 10, 80)
    without = client.completions.create(model=NAME, prompt="a", max_tokens=3, stream=True)
    assert all("usage" not in event.model_fields_set for event in without)


def test_seeds_n_stop_and_logprobs(client):
    options = {"model": NAME, "prompt": "a", "max_tokens": 12, "temperature": 1.5, "n": 2}
    replies = [client.completions.create(**options, seed=seed) for seed in (1, 1, 2)]
    texts = [[choice.text for choice in reply.choices] for reply in replies]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0][0] != texts[0][1]
    text = expected("a", 60)[1]
    stop = text[5:8]
    options = {"model": NAME, "prompt": "a", "max_tokens": 60, "temperature": 0}
    (choice,) = client.completions.create(**options, stop=["nothing", stop]).choices
    assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")
    (choice,) = client.completions.create(**options, logprobs=3).choices
    assert len(choice.logprobs.token_logprobs) == 60
    assert [len(x) for x in choice.logprobs.top_logprobs] == [3] * 60


def test_what_else_there_is_to_get(client, served):
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).owned_by == "gla_ext"
    assert post(served, b"", "/health", "GET")[::2] == (200, {"status": "ok"})
    client.completions.create(model=NAME, prompt="a", max_tokens=1)
    found = gauges(served)
    assert found["rows"] == 4
    assert found["time_to_first_token_seconds_count"] >= 1
    assert found['request_seconds_bucket{le="+Inf"}'] == found["request_seconds_count"]


BAD = [
    (b"{", "expected JSON, got JSONDecodeError"),
    (b"\xff", "expected JSON, got UnicodeDecodeError"),
    (b"", "expected JSON"),
    (b"[" * 100_000, "expected JSON, got RecursionError"),
    ([1], "expected a JSON object, got list"),
    ({}, "expected prompt to be a string, tokens"),
    ({"prompt": 5}, "expected prompt to be a string, tokens, or a list of these, got 5"),
    ({"prompt": []}, "none of no tokens, got []"),
    ({"prompt": [[]]}, "none of no tokens, got [[]]"),
    ({"prompt": [1, "a"]}, "expected prompt to be"),
    ({"prompt": [True]}, "expected prompt to be"),
    ({"prompt": [1.5]}, "expected prompt to be"),
    ({"prompt": [-1]}, "expected prompt to be"),
    ({"prompt": "\ud800"}, "expected prompt to be Unicode text"),
    ({"prompt": "a" * 2000}, "expected a prompt of at most 2000 tokens, got 2001"),
    ({"prompt": "a", "max_tokens": 3001}, "expected at most 3000 new tokens, got 3001"),
    ({"prompt": "a", "max_tokens": -1}, "max_tokens of at least 0, got -1"),
    ({"prompt": "a", "max_tokens": True}, "expected max_tokens to be an int, got True"),
    (b'{"prompt": "a", "temperature": NaN}', "expected temperature to be a number, got nan"),
    (b'{"prompt": "a", "temperature": 1e999}', "expected temperature to be a number, got inf"),
    ({"prompt": "a", "top_k": 1.5}, "expected top_k to be an int, got 1.5"),
    ({"prompt": "a", "seed": 10**30}, "expected seed to be an int of 64 bits"),
    ({"prompt": "a", "top_p": 2}, "expected top_p to be in (0, 1], got 2"),
    ({"prompt": "a", "n": 0}, "expected n of at least 1, got 0"),
    ({"prompt": "a", "n": 2, "best_of": 3}, "expected best_of to be n = 2"),
    ({"prompt": "a", "n": 1000}, "expected at most 256 choices, got 1 prompts of 1000"),
    ({"prompt": "a", "stop": [1]}, "expected stop to be a string or a list of strings, got [1]"),
    ({"prompt": "a", "stream": 1}, "expected stream to be true or false, got 1"),
    ({"prompt": "a", "stream_options": {"x": 1}}, "expected stream_options to be include_usage"),
    ({"prompt": "a", "echo": 1}, "expected echo to be true or false, got 1"),
    ({"prompt": "a", "suffix": "b"}, "expected suffix to be '' or null, as it is not implemented"),
    ({"prompt": "a", "beams": 2}, "expected names among model, max_tokens"),
    ({"prompt": "a", "\ud800": 2}, "\ud800"),
    ({"prompt": "a", "logit_bias": {"\u0661": 1}}, "an object of numbers, whose names are tokens"),
]

OUT_OF_RANGE = [
    ("temperature", -1),
    ("top_p", 2),
    ("top_k", -5),
    ("min_p", 1.5),
    ("repetition_penalty", 0),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("logprobs", 21),
    ("seed", 10**30),
    ("stop", [""]),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"999": 1}),
    ("max_tokens", -1),
    ("max_completion_tokens", -1),
    ("n", 1000),
    ("prompt", ["a"] * 257),
    ("stream_options", {"x": 1}),
]


def test_requests_that_do_not_fit(served):
    for body, message in BAD:
        status, _, reply = post(served, body)
        assert (status, reply["error"]["type"]) == (400, "invalid_request_error"), body
        assert message in reply["error"]["message"], reply
    for field, value in OUT_OF_RANGE:
        error = post(served, {"prompt": "a"} | {field: value})[2]["error"]
        assert error["param"] == field, error
        assert error["message"].startswith("expected ")
    status, _, reply = post(served, {"prompt": "a", "model": "gpt"})
    assert (status, reply["error"]["code"]) == (404, "model_not_found")
    assert post(served, b"", "/v2")[0] == 404
    assert post(served, b"", "/v1/completions", "GET")[0] == 405
    status, _, reply = post(served, b"a" * (9 << 20))
    assert (status, "at most 8388608 bytes" in reply["error"]["message"]) == (413, True)
    status, headers, reply = post(served, {"prompt": ["a"] * 13})  # never: no client is to retry
    assert (status, "Retry-After" in headers) == (400, False)
    assert "at most 12 sequences at once, got 13" in reply["error"]["message"]


def stream_from(port, body) -> socket.socket:
    """The connection of a client that has asked for many tokens."""
    client = socket.create_connection(("127.0.0.1", port), timeout=60)
    body = json.dumps(body | {"stream": True})
    head = f"POST /v1/completions HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n"
    client.sendall(f"{head}{body}".encode())
    return client


def read_all(client: socket.socket) -> str:
    return b"".join(iter(lambda: client.recv(1 << 16), b"")).decode()


def test_a_client_that_leaves_ends_its_generation(served):
    before = gauges(served)['requests_total{reason="cancelled"}']
    clients = [stream_from(served.port, {"prompt": "a", "max_tokens": 3000}) for _ in range(6)]
    for client in clients[:4]:  # two more wait for a row
        assert client.recv(100).startswith(b"HTTP/1.1 200")
    for client in clients:
        client.close()
    wait_until(lambda: gauges(served)["running"] == 0)
    found = gauges(served)
    assert found["waiting"] == found["open_replies"] == 0
    assert found['requests_total{reason="cancelled"}'] == before + 6


@pytest.mark.slow
def test_a_signal_lets_what_runs_finish(folder, tmp_path):
    with serving(folder, tmp_path / "log", *OPTIONS) as server:
        body = {"prompt": "a", "max_tokens": 300, "temperature": 0}
        streams = [stream_from(server.port, body) for _ in range(6)]  # of which two wait
        half = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-")
        for stream in streams[:4]:
            assert stream.recv(10)
        wait_until(lambda: gauges(server)["running"] + gauges(server)["waiting"] > 0)
        server.process.send_signal(signal.SIGINT)
        for stream in streams:
            events = re.findall(r"^data: (\{.*)$", read_all(stream), re.MULTILINE)
            text = "".join(json.loads(event)["choices"][0]["text"] for event in events)
            assert text == expected("a", 300)[1]
        assert server.process.wait(30) == 0
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port), timeout=5)
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_an_engine_that_fails_tells_its_clients():
    """Of those that run and those that wait, and later ones; the server stops."""
    engine = Engine(make_model(vocab_size=256, eos_token_id=None), Bytes(), Limits(rows=1))
    stopped = threading.Event()
    steps = engine._batch.step

    def fails(rows):
        if len(found) == 3:
            raise MemoryError("no more")
        found.append(rows)
        steps(rows)

    found, engine._batch.step = [], fails
    with client_of(engine, stopped.set) as client:
        body = {"prompt": ["a", "b"], "max_tokens": 50}
        reply = client.post("/v1/completions", json=body)
        assert (reply.status_code, reply.json()["error"]["type"]) == (500, "server_error")
        assert stopped.wait(10)
        assert client.get("/health").status_code == 503
        assert client.post("/v1/completions", json=body).status_code == 503
    assert not engine.busy


async def ask(options, receive, send) -> Engine:
    """One request to an application, past the server; its engine afterwards."""
    from gla_ext.serve.http import Application

    engine = Engine(make_model(vocab_size=256, eos_token_id=None), Bytes(), Limits(rows=1))
    application = Application(engine, options)
    app = application.starlette()
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    async with application._lifespan(app):
        await app(scope | {"query_string": b""}, receive, send)
    return engine


def test_a_body_that_does_not_come_is_refused():
    from gla_ext.serve.http import Options

    sent = []

    async def receive():
        await asyncio.sleep(30)

    async def send(message):
        sent.append(message)

    asyncio.run(ask(Options(read_seconds=0.05), receive, send))
    assert sent[0]["status"] == 408
    assert b"expected a body within 0.05 s" in sent[1]["body"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_takes_nothing_is_given_up(stream):
    from gla_ext.serve.http import Options

    body = {"prompt": "a", "max_tokens": 4000 if stream else 4, "stream": stream}
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive():
        if messages:
            return messages.pop()
        await asyncio.sleep(30)

    async def send(message):
        if message["type"] == "http.response.body":
            await asyncio.sleep(30)

    engine = asyncio.run(asyncio.wait_for(ask(Options(write_seconds=0.05), receive, send), 10))
    assert engine.metrics.reasons() == {"cancelled" if stream else "length": 1}
    assert not engine.busy


def test_the_engine_is_warm_before_clients_hear_of_it(monkeypatch, capsys):
    import uvicorn

    from gla_ext.serve.http import serve

    order, reuses = [], []
    engine = Engine(make_model(vocab_size=256), Bytes(), Limits(rows=2))

    def run(self, sockets):
        order.append("run")
        reuses.extend(x.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR) for x in sockets)

    monkeypatch.setattr(
        engine, "warm_up", lambda: order.append(("warm_up", capsys.readouterr().out))
    )
    monkeypatch.setattr(uvicorn.Server, "run", run)
    serve(engine, port=0)
    assert order == [("warm_up", ""), "run"]
    assert reuses and all(reuses)  # a killed server starts again at its port
    assert capsys.readouterr().out.startswith("Serving gla on http://127.0.0.1:")
