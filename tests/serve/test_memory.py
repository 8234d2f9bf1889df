"""What requests and replies may keep in memory, all of them together."""

import asyncio
import contextlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from engines import SMALL, deltas, prompt
from models import make_model
from served import client_of

from gla_ext.serve import Engine, Limits, Request
from gla_ext.serve.text import Bytes

requests = pytest.importorskip("starlette.requests")
from gla_ext.serve.http import application, fields, protocol, reply  # noqa: E402

V = 256


def make_engine(**limits) -> Engine:
    model = make_model(vocab_size=V, eos_token_id=None)
    return Engine(model, Bytes(), Limits(**SMALL | limits))


@contextlib.contextmanager
def halted(engine, monkeypatch):
    """Inside, the engine makes no step and so ends no sequence. The value is set to end this."""
    gate, step = threading.Event(), engine.step
    monkeypatch.setattr(engine, "step", lambda: [gate.wait(), step()][1])
    with ThreadPoolExecutor() as pool:
        try:
            yield gate, pool
        finally:
            gate.set()


def wait_for(engine, count):
    while engine.waiting < count:
        threading.Event().wait(0.01)


@pytest.mark.parametrize("count", [0, 3, 20])
def test_log_probabilities_of_a_prompt(count):
    """They take 8 bytes for each of the most probable tokens, and keep nothing else alive: neither
    the tensors of those read with them nor more than was wanted.
    """
    engine = make_engine()
    sequence, *_ = engine.submit(
        Request(prompt(100), 0, prompt_logprobs=count), Request(prompt(20), 0, prompt_logprobs=20)
    )
    (found,) = [delta.prompt_logprobs for x, delta in deltas(engine) if x is sequence]
    assert len(found) == 99
    assert sum(x.untyped_storage().nbytes() for x in found._found) == 100 * (8 + 4 + 4 + 8 * count)
    assert [*found[10:20]] == [*found][10:20] == [found[n] for n in range(10, 20)]
    assert found[-1] == [*found][-1] and len(found[-1].best) == count
    with pytest.raises(IndexError):
        found[99]


BODY = {"prompt": [5] * 10, "max_tokens": 4, "ignore_eos": True}


@pytest.mark.parametrize(
    ("options", "choices", "kept"),
    [
        ({"logprobs": 0}, 1, 4),
        ({"logprobs": 2}, 1, 4 * 3),
        ({"echo": True, "logprobs": 0, "n": 3}, 3, 3 * (10 + 4)),
        ({"echo": True, "logprobs": 5, "prompt": [[5] * 10, [6] * 7]}, 2, 6 * (17 + 8)),
    ],
)
def test_a_bound_on_all_replies(options, choices, kept, monkeypatch):
    """They count until they end, however that is."""
    engine, body = make_engine(), BODY | options
    with client_of(engine) as client, halted(engine, monkeypatch) as (gate, pool):

        def post(body):
            return client.post("/v1/completions", json=body)

        monkeypatch.setattr(application, "MOST_KEPT", kept - 1)
        refused = post(body)
        message = f"at most {kept - 1} log-probabilities, got up to {kept}"
        assert refused.status_code == 400 and message in refused.json()["error"]["message"]
        monkeypatch.setattr(application, "MOST_KEPT", 2 * kept + 3)
        replies = [pool.submit(post, body | {"stream": stream}) for stream in (False, True)]
        wait_for(engine, 2 * choices)
        refused = post(body)
        message = f"at most 3 more log-probabilities beside other replies, got {kept}"
        assert refused.status_code == 429 and message in refused.json()["error"]["message"]
        assert refused.headers["Retry-After"] == "1"
        gate.set()
        assert [x.result().status_code for x in replies] == [200, 200]
        monkeypatch.setattr(application, "MOST_KEPT", kept)
        assert post(body).status_code == 200
        bad = body | {"prompt": [V]}  # refused by the engine
        assert [post(x).status_code for x in (bad, body)] == [400, 200]


def test_replies_without_them_do_not_count(monkeypatch):
    monkeypatch.setattr(application, "MOST_KEPT", 0)
    with client_of(make_engine()) as client:
        for echo in (False, True):
            reply = client.post("/v1/completions", json=BODY | {"echo": echo, "n": 3})
            assert reply.status_code == 200


def test_choices_share_their_prompt():
    asked = protocol.read(json.dumps({"prompt": [[5] * 9, [6]], "n": 100, "seed": 1}).encode(), "")
    requests = asked.requests(asked.prompts)
    assert len({id(request.tokens) for request in requests}) == 2
    assert [request.seed for request in requests] == [*range(1, 101)] * 2


def test_no_body_is_kept_without_room(monkeypatch):
    """Nor is it parsed."""
    engine = make_engine(rows=1, waiting=1)
    path, chat = "/v1/completions", "/v1/chat/completions"
    with client_of(engine) as client, halted(engine, monkeypatch) as (gate, pool):
        first = pool.submit(client.post, path, json=BODY | {"n": 2})
        wait_for(engine, 2)
        with monkeypatch.context() as patch:
            patch.setattr(protocol, "read", pytest.fail)
            patch.setattr(protocol, "read_chat", pytest.fail)
            for name in (path, chat):
                refused = client.post(name, content=b"a" * (1 << 20))
                assert refused.status_code == 429
                assert "at most 0 more sequences" in refused.json()["error"]["message"]
        gate.set()
        assert first.result().status_code == 200


def test_a_bound_on_all_bodies():
    """Of the bytes that have come: slow clients keep nobody out."""
    app = application.Application(make_engine(rows=1, waiting=0), application.Options(body_bytes=8))

    async def read(*blocks) -> bytes:
        blocks = [*blocks]

        async def receive():
            if blocks[0] is None:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": blocks.pop(0), "more_body": bool(blocks)}

        request = requests.Request({"type": "http", "method": "POST", "headers": []}, receive)
        async with app._body(request) as body:
            return bytes(body)

    async def all_of_it():
        most = application.MOST_BODIES
        slow = [asyncio.ensure_future(read(b"1234567", None)) for _ in range(most)]
        await asyncio.sleep(0.01)
        assert app._bodies == 7 * most
        assert await read(*[b"1"] * 8) == b"1" * 8
        slow += [asyncio.ensure_future(read(b"12345678", None)) for _ in range(2)]
        await asyncio.sleep(0.01)
        with pytest.raises(
            fields.RefusedError, match=f"at most {8 * most} bytes of bodies"
        ) as error:
            await read(b"1")
        assert error.value.status == 429 and app._bodies == 8 * most
        for task in slow:
            task.cancel()
        await asyncio.wait(slow)
        assert app._bodies == 0 and await read(b"1") == b"1"

    asyncio.run(all_of_it())


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_a_long_body_is_read_in_a_thread(route, monkeypatch):
    threads, loads = [], json.loads

    def read(text):
        threads.append(threading.current_thread().name)
        return loads(text)

    monkeypatch.setattr(fields.json, "loads", read)
    with client_of(make_engine()) as client:
        for size in (10, 10_000):
            content = b'{"prompt": 5, "messages": 5, "user": "%s"}' % (b"a" * size)
            assert client.post(f"/v1/{route}", content=content).status_code == 400
    short, long = threads
    assert long.startswith("asyncio_") and not short.startswith("asyncio_")


def test_no_request_is_made_without_room(monkeypatch):
    engine = make_engine(rows=1, waiting=1)
    monkeypatch.setattr(protocol, "Request", pytest.fail)
    monkeypatch.setattr(Bytes, "encode", pytest.fail)
    with client_of(engine) as client:
        refused = client.post("/v1/completions", json={"prompt": "a" * 1000, "n": 256})
    assert refused.status_code == 400
    assert "at most 2 sequences at once, got 256" in refused.json()["error"]["message"]


def test_a_long_reply_is_made_in_blocks(monkeypatch):
    """Which have the same JSON; only a reply of one block has its length before it."""
    engine = make_engine()
    body = {"prompt": "once upon a time", "echo": True, "logprobs": 3, "temperature": 0, "n": 2}
    with client_of(engine) as client:
        whole = client.post("/v1/completions", json=body)
        monkeypatch.setattr(reply, "BLOCK", 50)
        cut = client.post("/v1/completions", json=body)
        text = client.post("/v1/completions", json=body | {"stream": True}).text
    assert "content-length" in whole.headers and "content-length" not in cut.headers
    assert cut.json()["choices"] == whole.json()["choices"]
    events = [json.loads(line[6:]) for line in text.split("\n\n")[:-2]]
    for choice in whole.json()["choices"]:
        parts = [x for event in events for x in event["choices"] if x["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for name, wanted in choice["logprobs"].items():
            assert [x for part in parts for x in part["logprobs"][name]] == wanted
