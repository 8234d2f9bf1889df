"""Prompts with their log-probabilities over HTTP: `echo`."""

import json

import pytest
import torch
from models import make_model
from served import client_of

from gla_ext.serve import Engine, Limits
from gla_ext.serve.text import Bytes, Detokenizer

pytest.importorskip("starlette")
PROMPTS = ["def f(x):", "\N{SNOWMAN}", "", "yes, " * 50]


@pytest.fixture(scope="module")
def model():
    """In fp64, since log-probabilities in fp32 are up to 7.5e-5 off on some CPUs."""
    return make_model(torch.float64, vocab_size=256, eos_token_id=None)


@pytest.fixture(scope="module")
def client(model):
    with client_of(Engine(model, Bytes(), Limits(rows=3, checkpoint_tokens=64))) as client:
        yield client


def choices_of(client, **body) -> list[dict]:
    """The choices of a reply, or of a stream put together, which are the same."""
    reply = client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    whole = reply.json()["choices"]
    text = client.post("/v1/completions", json=body | {"stream": True}).text
    events = [json.loads(line[6:]) for line in text.split("\n\n") if line and "[DONE]" not in line]
    for choice in whole:
        parts = [x for event in events for x in event["choices"] if x["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for name in choice["logprobs"] or ():
            assert [x for part in parts for x in part["logprobs"][name]] == choice["logprobs"][name]
    return whole


@torch.no_grad()
def expected(model, tokens):
    logits = model(torch.tensor([tokens])).logits[0]
    return logits.log_softmax(-1)


@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("as_tokens", [False, True])
def test_log_probabilities(client, model, as_tokens, count):
    prompts = [Bytes().encode(prompt) for prompt in PROMPTS]
    given = prompts if as_tokens else PROMPTS
    options = {"max_tokens": count, "temperature": 0, "echo": True, "logprobs": 2}
    found = choices_of(client, prompt=given, **options)
    plain = choices_of(client, prompt=given, **options | {"echo": False})
    for prompt, tokens, choice, new in zip(PROMPTS, prompts, found, plain, strict=True):
        before = "\0" * as_tokens + prompt
        assert choice["text"] == before + new["text"]
        shown = choice["logprobs"]
        assert [shown[name][0] for name in ("token_logprobs", "top_logprobs")] == [None, None]
        after, drawn = {name: x[len(tokens) :] for name, x in shown.items()}, new["logprobs"]
        assert after["tokens"] == drawn["tokens"]
        assert after["token_logprobs"] == pytest.approx(drawn["token_logprobs"], abs=1e-5)
        assert [*map(set, after["top_logprobs"])] == [*map(set, drawn["top_logprobs"])]
        offsets = [len(before) + offset for offset in drawn["text_offset"]]
        assert after["text_offset"] == offsets
        rows = expected(model, tokens)[:-1]
        values = [row[token].item() for row, token in zip(rows, tokens[1:], strict=True)]
        assert shown["token_logprobs"][1 : len(tokens)] == pytest.approx(values, abs=1e-5)
        for row, best in zip(rows, shown["top_logprobs"][1 : len(tokens)], strict=True):
            assert sorted(best.values())[-2:] == pytest.approx(
                row.topk(2)[0].tolist()[::-1], abs=1e-5
            )
        if prompt.isascii():
            places = zip(shown["tokens"], shown["text_offset"], strict=True)
            places = [*places][len(tokens) - len(prompt) : len(tokens)]
            assert [(choice["text"][offset], name) for name, offset in places] == [
                (letter, letter) for letter in prompt
            ]


def test_the_end_token_has_an_entry(model):
    """As many as were drawn, which lm-eval takes off the end of the lists."""
    tokens = Bytes().encode("ab")
    values = expected(model, tokens)
    drawn = values[-1].argmax().item()
    ends = make_model(torch.float64, vocab_size=256, eos_token_id=drawn)
    with client_of(Engine(ends, Bytes(), Limits(rows=1))) as client:
        body = {"prompt": "ab", "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
        (choice,) = choices_of(client, **body)
    assert (choice["text"], choice["finish_reason"]) == ("ab", "stop")
    wanted = [values[0, tokens[1]].item(), values[1, tokens[2]].item(), values[2, drawn].item()]
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(wanted, abs=1e-5)


def test_text_alone(client):
    body = {"prompt": "ab", "max_tokens": 4, "temperature": 0}
    (plain,) = choices_of(client, **body)
    first, second = choices_of(client, **body, echo=True, n=2)
    assert first["text"] == second["text"] == "ab" + plain["text"]
    assert first["logprobs"] is None
    (nothing,) = choices_of(client, prompt="ab", max_tokens=0)
    assert (nothing["text"], nothing["finish_reason"]) == ("", "length")


def test_choices_share_what_they_echo(client, monkeypatch):
    """The tokens of a long prompt are decoded once, not for each choice."""
    pushed, push = [], Detokenizer.push
    monkeypatch.setattr(Detokenizer, "push", lambda *args: [pushed.append(args), push(*args)][1])
    prompts = ["yes, " * 50, "no, " * 40]
    found = choices_of(client, prompt=prompts, n=8, max_tokens=0, echo=True, logprobs=0)
    assert [choice["text"] for choice in found] == [text for text in prompts for _ in range(8)]
    assert len(pushed) == 2 * sum(len(Bytes().encode(text)) for text in prompts)  # whole, streamed


def test_without_a_tokenizer(model):
    with client_of(Engine(model, limits=Limits(rows=1))) as client:
        options = {"prompt": [5, 6, 7], "max_tokens": 1, "echo": True, "logprobs": 0}
        (choice,) = choices_of(client, **options, temperature=0)
    assert choice["text"] == "" and choice["logprobs"]["text_offset"] == [0] * 4
    assert choice["logprobs"]["tokens"][:3] == ["token_id:5", "token_id:6", "token_id:7"]
