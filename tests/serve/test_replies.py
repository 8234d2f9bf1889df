"""Logits of NaN or inf end a sequence with an error, in every way to ask. And the pieces of a reply
are JSON and have one time."""

import itertools
import json
import logging
import re
import types

import pytest
import torch
from engines import SMALL, deltas, greedy, is_empty, prompt, run
from models import make_model
from served import client_of

from gla_ext.decode import Decoder
from gla_ext.serve import Engine, Limits, Request
from gla_ext.serve.request import Delta, TokenLogprob
from gla_ext.serve.text import Bytes

MESSAGE = "expected the model's logits to be finite, got NaN or inf"
SAID = "the model's logits are not finite"


def spoiled(device="cpu", value=torch.nan, vocab_size=31, tokens=None):
    """A model whose logits are not finite after a token that it draws itself. Returns the model, a
    prompt that leads to this token, and the tokens drawn up to and including it.
    """
    model = make_model(vocab_size=vocab_size, eos_token_id=None).to(device)
    tokens = prompt(9) if tokens is None else tokens
    drawn = greedy(model, tokens, 12)
    bad = next(token for token in drawn[3:] if token not in tokens)
    drawn = drawn[: drawn.index(bad) + 1]
    with torch.no_grad():
        model.model.embeddings.weight[bad] = value
    return model, tokens, drawn


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "options", [{}, {"top_k": 1}, {"temperature": 1e-6, "top_p": 0.5}, {"looks": True}], ids=str
)
def test_generate_says_it(options, value, device):
    """The error names the row; on a GPU steps are in a graph."""
    model, tokens, drawn = spoiled(device, value)
    options = {"temperature": 0 if "top_k" not in options else 1.0} | options
    if options.pop("looks", False):  # at which rows are done
        options["eos_token_id"] = next(n for n in range(31) if n not in drawn)
    (good,) = model.generate([tokens], len(drawn), **options)
    assert good[len(tokens) :].tolist() == drawn
    for prompts, row in (([tokens], 0), ([[1, 2], tokens], 1)):
        with pytest.raises(RuntimeError, match=rf"generate: {MESSAGE}, .* in rows \[.*{row}\]"):
            model.generate(prompts, len(drawn) + 20, **options)


def test_a_stream_has_the_tokens_before(device):
    model, tokens, drawn = spoiled(device)
    found = []
    with pytest.raises(RuntimeError, match=f"generate: {MESSAGE}"):
        for token in model.generate_stream([tokens], 50, temperature=0):
            found.append(token.item())
    assert found == drawn


def test_a_decoder_tells_and_takes_new_prompts(device):
    """Also of rows that are done, which go on passing their last token."""
    model, tokens, drawn = spoiled(device)
    decoder = Decoder(model, 2, temperature=0)
    decoder.prefill([tokens, [1]])
    finite = [decoder.finite.tolist()[0]]
    for _ in range(len(drawn)):
        decoder.step()
        finite.append(decoder.finite.tolist()[0])
    assert finite == [True] * len(drawn) + [False]
    decoder.prefill([[1, 2]], rows=[0])
    assert decoder.finite.tolist()[0]
    ends = Decoder(model, 1, temperature=0, eos_token_id=drawn[-1])
    ends.prefill([tokens])
    for _ in range(len(drawn) + 3):
        ends.step()
    assert ends.done.tolist() == ends.finite.tolist() == [True]
    (row,) = model.generate([tokens], 40, temperature=0, eos_token_id=drawn[-1])
    assert row[len(tokens) :].tolist() == drawn


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0, 1e-6])
def test_an_engine_ends_the_sequence_alone(temperature, value, device, caplog):
    """With the tokens before, a line in the log and a count; its row serves the next one."""
    model, tokens, drawn = spoiled(device, value)
    engine = Engine(model, limits=Limits(**SMALL))
    other = [token for token in prompt(70) if token != drawn[-1]]
    expected = greedy(model, other, 3)
    options = {"temperature": temperature, "logprobs": 2}
    bad, good = engine.submit(Request(tokens, 50, **options), Request(other, 3, **options))
    found, last = {bad: [], good: []}, {}
    with caplog.at_level(logging.ERROR, "gla_ext.serve"):
        for sequence, delta in deltas(engine):
            found[sequence] += delta.tokens
            last[sequence] = delta
    assert found == {bad: drawn, good: expected}
    assert (last[bad].finish_reason, last[bad].error) == ("error", SAID)
    assert (last[good].finish_reason, last[good].error) == ("length", None)
    assert caplog.messages == [f"{SAID} after a prompt of 9 tokens and {len(drawn)} new"]
    assert engine.metrics.count("nonfinite_logits_total") == 1
    assert engine.metrics.reasons() == {"error": 1, "length": 1}
    assert is_empty(engine)
    for _ in range(3):
        assert run(engine, Request(other, 3, temperature=0)) == [(expected, "", "length")]


class Fewer(Bytes):
    """Knows fewer tokens than the model, as where a vocabulary was filled up to a round number."""

    def __init__(self, unknown):
        self.unknown = unknown

    def decode(self, tokens):
        if self.unknown in tokens:
            raise IndexError("piece id is out of range")
        return super().decode(tokens)


def test_a_tokenizer_that_fails_ends_the_sequence_alone(caplog):
    tokens = Bytes().encode("a")
    model = make_model(vocab_size=256, eos_token_id=None)
    drawn = greedy(model, tokens, 12)
    place = next(n for n in range(3, 12) if drawn[n] not in drawn[:n] + tokens)
    good = Bytes().encode("other")
    expected = greedy(model, good, 3)
    assert drawn[place] not in expected
    engine = Engine(model, Fewer(drawn[place]), Limits(**SMALL))
    requests = (Request(tokens, 50, temperature=0), Request(good, 3, temperature=0))
    (found, _, reason), (new, _, other) = run(engine, *requests)
    assert (found, reason) == (drawn[:place], "error") and (new, other) == (expected, "length")
    said = "the tokenizer failed with IndexError('piece id is out of range')"
    assert caplog.messages == [f"{said} after a prompt of 2 tokens and {place + 1} new"]
    assert engine.metrics.count("nonfinite_logits_total") == 0 and is_empty(engine)
    pytest.importorskip("starlette")
    with client_of(engine) as client:
        for logprobs in (None, 1):
            body = {"prompt": "a", "temperature": 0, "max_tokens": 50, "logprobs": logprobs}
            reply = client.post("/v1/completions", json=body)
            assert (reply.status_code, reply.json()["error"]["message"]) == (500, said)
        body = {"prompt": "other", "temperature": 0, "max_tokens": 3}
        assert client.post("/v1/completions", json=body).status_code == 200


def test_a_prompt_that_a_tokenizer_cannot_echo():
    """The reply is an error, also where its stream has begun."""
    pytest.importorskip("starlette")
    engine = Engine(make_model(vocab_size=256, eos_token_id=None), Fewer(66), Limits(rows=1))
    body = {"prompt": [66] + [65] * 30, "max_tokens": 2, "logit_bias": {"65": 100}}
    said = "the tokenizer failed with IndexError('piece id is out of range')"
    with client_of(engine) as client:
        assert client.post("/v1/completions", json=body).status_code == 200
        body["echo"] = True
        reply = client.post("/v1/completions", json=body)
        assert (reply.status_code, reply.json()["error"]["message"]) == (500, said)
        lines = client.post("/v1/completions", json=body | {"stream": True}).text.split("\n\n")
        assert json.loads(lines[-3][6:])["error"]["message"] == said
        assert lines[-2:] == ["data: [DONE]", ""]
        assert counted(client)["open_replies"] == 0


def test_an_unknown_token_has_a_name():
    """It may be among the most probable ones, and not be drawn."""
    choices = pytest.importorskip("gla_ext.serve.http.choices")
    names = choices.Names(Fewer(66))
    assert [names[token] for token in (65, 66, 67)] == ["A", "token_id:66", "C"]


def test_a_prompt_that_spoils_the_logits(device):
    """Not those of prompts that pass packed with it."""
    model, _, drawn = spoiled(device)
    other = [token for token in prompt(70) if token != drawn[-1]]
    expected = (greedy(model, other, 3), "", "length")
    engine = Engine(model, limits=Limits(**SMALL))
    good, bad = Request(other, 3, temperature=0), Request([1, drawn[-1], 2], 5)
    found = run(engine, good, bad, good)
    assert found == [expected, ([], "", "error"), expected]


@pytest.fixture(scope="module")
def client():
    pytest.importorskip("starlette")
    model, tokens, drawn = spoiled(vocab_size=256, tokens=Bytes().encode("a"))
    engine = Engine(model, Bytes(), Limits(rows=2))
    with client_of(engine) as client:
        yield client, {"prompt": tokens, "temperature": 0, "max_tokens": 40}, len(drawn)


def counted(client) -> dict[str, int]:
    found = re.findall(r"gla_ext_(\S+) (\d+)\n", client.get("/metrics").text)
    return {name: int(x) for name, x in found}


def test_a_reply_is_an_error(client):
    client, body, _ = client
    before = counted(client)
    reply = client.post("/v1/completions", json=body | {"logprobs": 1})
    assert reply.status_code == 500
    error = {"message": SAID, "type": "server_error", "param": None, "code": None}
    assert reply.json() == {"error": error}
    after = counted(client)
    for name in ("nonfinite_logits_total", 'requests_total{reason="error"}'):
        assert after[name] == before[name] + 1
    name = 'completion_responses_total{status="500"}'
    assert (before.get(name, 0), after[name]) == (0, 1)
    assert 'completion_responses_total{status="200"}' not in after
    assert client.get("/health").status_code == 200


def test_a_stream_ends_with_an_error(client):
    client, body, count = client
    reply = client.post("/v1/completions", json=body | {"stream": True, "logprobs": 1})
    assert reply.status_code == 200
    *pieces, last, done = [line[6:] for line in reply.text.split("\n\n") if line]
    assert done == "[DONE]"
    assert json.loads(last)["error"]["message"] == SAID
    tokens = [x for piece in pieces for x in json.loads(piece)["choices"][0]["logprobs"]["tokens"]]
    assert len(tokens) == count


def strictly(text: str):
    """JSON as it is defined: without NaN and Infinity."""

    def refuse(name):
        raise AssertionError(name)

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_that_cannot_come(stream):
    """Their log-probability is -inf, which is no JSON."""
    pytest.importorskip("starlette")
    model = make_model(vocab_size=256, eos_token_id=None)
    never = torch.zeros(256).index_fill_(0, torch.arange(3, 256), -torch.inf)
    model.lm_head.register_forward_hook(lambda module, args, output: output + never)
    engine = Engine(model, Bytes(), Limits(rows=1))
    body = {"prompt": "a", "logprobs": 5, "max_tokens": 4, "stream": stream}
    with client_of(engine) as client:
        reply = client.post("/v1/completions", json=body)
    assert reply.status_code == 200
    texts = [line[6:] for line in reply.text.split("\n\n")][:-2] if stream else [reply.text]
    found = [x for text in texts for x in strictly(text)["choices"][0]["logprobs"]["top_logprobs"]]
    assert len(found) == 4
    for best in found:
        assert sorted(value == -9999 for value in best.values()) == [False] * 3 + [True] * 2


def test_tokens_of_one_text_have_one_entry():
    """That of the drawn one, else of the most probable; a client sees no ids."""
    choices = pytest.importorskip("gla_ext.serve.http.choices")

    class Alike:
        def decode(self, tokens):
            return "ab"[tokens[0] == 4]

    best = {1: -1.0, 4: -2.0, 3: -3.0, 2: -4.0}
    for token, most, expected in (
        (3, best, {"a": -3.0, "b": -2.0}),
        (4, best, {"b": -2.0, "a": -1.0}),
        (4, {1: -1.0}, {"b": -2.0, "a": -1.0}),  # none of the most probable: one more than asked
        (4, {}, {"b": -2.0}),
    ):
        delta = Delta("", [token], [TokenLogprob(token, best[token], most)])
        choice = choices.TextChoice(0, choices.Names(Alike()), True)
        choice.add(delta)
        shown = json.loads("".join(choice.take(whole=True)))["logprobs"]
        assert shown["top_logprobs"] == [expected]
        assert shown["token_logprobs"] == [expected[shown["tokens"][0]]]


def test_the_pieces_of_a_stream_have_one_time(monkeypatch):
    """Whatever the clock says meanwhile."""
    clock = types.SimpleNamespace(time=itertools.count(5).__next__)
    monkeypatch.setattr("gla_ext.serve.http.choices.time", clock)
    engine = Engine(make_model(vocab_size=256, eos_token_id=None), Bytes(), Limits(rows=1))
    with client_of(engine) as client:
        body = {"prompt": "a", "max_tokens": 20, "stream": True, "ignore_eos": True}
        text = client.post("/v1/completions", json=body).text
    created = [json.loads(x)["created"] for x in re.findall(r"^data: (\{.*)$", text, re.MULTILINE)]
    assert len(created) > 1 and len(set(created)) == 1
