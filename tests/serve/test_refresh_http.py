"""`POST /v1/refresh`, and what clients see of a model that changed."""

import json
import threading

import pytest
from changing import LIMITS, optimizer_step
from models import make_model
from served import client_of

from gla_ext.serve import Engine, Request
from gla_ext.serve.text import Bytes

for package in ("starlette", "httpx"):
    pytest.importorskip(package)
from gla_ext.serve.http.choices import Echo, Names, TextChoice  # noqa: E402


@pytest.fixture
def engine():
    return Engine(make_model(vocab_size=256, eos_token_id=None), Bytes(), LIMITS)


def test_the_route_is_there_if_it_is_allowed(engine):
    with client_of(engine) as client:
        refused, unknown = (client.post(f"/v1/{name}") for name in ("refresh", "other"))
        assert refused.status_code == unknown.status_code == 404
        assert refused.json()["error"]["message"].endswith("/metrics, /, got '/v1/refresh'")
    with client_of(engine, allow_refresh=True) as client:
        assert client.get("/v1/refresh").status_code == 405


def test_a_model_that_changed_answers_again(engine):
    """Status 503 until the refresh; then replies are of the new model."""
    body = {"prompt": "once upon a time " * 20, "max_tokens": 8, "temperature": 0}
    with client_of(engine, allow_refresh=True) as client:
        ask = lambda: client.post("/v1/completions", json=body)  # noqa: E731
        before = ask().json()["choices"][0]["text"]
        optimizer_step(engine.model)
        reply = ask()
        assert (reply.status_code, reply.headers["Retry-After"]) == (503, "1")
        assert reply.json()["error"]["type"] == "server_error"
        assert "model.embeddings.weight written since" in reply.json()["error"]["message"]
        reply = client.post("/v1/refresh")
        assert (reply.status_code, reply.json()) == (200, {"status": "ok"})
        reply = ask().json()
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        now = reply["choices"][0]["text"]
        other = Engine(engine.model, Bytes(), LIMITS)
    with client_of(other) as client:
        assert ask().json()["choices"][0]["text"] == now != before


@pytest.mark.parametrize("keep_running", [None, False, True])
def test_running_completions(engine, keep_running):
    """They end with finish_reason 'refresh' and what they had, or go on."""
    step, third, refreshed = engine._batch.step, threading.Event(), threading.Event()
    steps, order, clear = [], [], engine.prefixes.clear
    engine.prefixes.clear = lambda: (order.append("refresh"), clear())

    def slow_step(rows):
        steps.append(rows)
        order.append("step")
        if len(steps) == 3:
            third.set()
        step(rows)
        if len(steps) > 3:
            refreshed.wait(30)

    engine._batch.step = slow_step
    body = {"prompt": "a", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    options = {} if keep_running is None else {"keep_running": keep_running}
    with client_of(engine, allow_refresh=True) as client:
        found = []
        asks = threading.Thread(
            target=lambda: found.append(client.post("/v1/completions", json=body).json())
        )
        asks.start()
        assert third.wait(30)
        says = threading.Thread(
            target=lambda: found.append(client.post("/v1/refresh", content=json.dumps(options)))
        )
        says.start()
        while not (engine._is_next.locked() or not says.is_alive()):
            pass
        refreshed.set()
        says.join(30)
        asks.join(30)
    assert "refresh" in order[3:5]  # as soon as a step is over
    (reply,) = (x for x in found if isinstance(x, dict))
    choice, new = reply["choices"][0], reply["usage"]["completion_tokens"]
    if keep_running:
        assert (choice["finish_reason"], new) == ("length", 12)
    else:
        assert choice["finish_reason"] == "refresh"
        assert 3 <= new < 12


def test_an_echo_whose_prompt_is_being_read(engine):
    """It ends with its text, and without the log-probabilities that are not known."""
    engine.submit(Request([1], 12))  # beside which prompts are read in pieces
    engine.step()
    text = "once upon a time " * 20
    tokens = Bytes().encode(text)
    (sequence,) = engine.submit(Request(tokens, logprobs=0, prompt_logprobs=0))
    engine.step()
    assert 0 < sequence.passed < len(tokens)
    engine.refresh()
    delta = dict(engine.step())[sequence]
    echo = Echo(Bytes(), text, sequence.request.tokens, skip_special=True)
    choice = TextChoice(0, Names(Bytes()), True, echo)
    choice.add(delta)
    choice = json.loads("".join(choice.take(whole=True)))
    assert (choice["text"], choice["finish_reason"]) == (text, "refresh")
    assert choice["logprobs"]["token_logprobs"] == [None]


def test_what_is_refused(engine):
    with client_of(engine, allow_refresh=True) as client:
        for body, message in (
            ("{", "expected JSON"),
            ("[]", "expected a JSON object, got list"),
            ('{"keep": true}', "expected names among keep_running, got keep"),
            ('{"keep_running": 1}', "expected keep_running to be true or false, got 1"),
        ):
            reply = client.post("/v1/refresh", content=body)
            assert reply.status_code == 400
            assert reply.json()["error"]["message"].startswith(message)
        engine.model.train()
        reply = client.post("/v1/refresh")
        assert reply.status_code == 409
        assert "a model in eval mode" in reply.json()["error"]["message"]


def test_an_engine_that_has_failed(engine, monkeypatch):
    monkeypatch.setattr(engine, "step", lambda: 1 // 0)
    with client_of(engine, allow_refresh=True) as client:
        for path, body in (("completions", {"prompt": "a"}), ("refresh", {})):
            reply = client.post(f"/v1/{path}", json=body)
        assert reply.status_code == client.get("/health").status_code == 503
        assert reply.json()["error"]["message"] == "the engine has failed: ZeroDivisionError"
