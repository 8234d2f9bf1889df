"""A bias, penalties and min_p of an engine's requests: the tokens are those that a loop without an
engine draws, whatever else is in the batch."""

import itertools

import pytest
import torch
from engines import SMALL, prompt, run
from models import make_model
from served import client_of

from gla_ext.serve import Engine, Limits, Request
from gla_ext.serve.choice import Adjustments, Draw, choose
from gla_ext.serve.text import Bytes

V = 31
KINDS = [
    {"repetition_penalty": 3.0},
    {"repetition_penalty": 0.5},
    {"presence_penalty": 1.5},
    {"presence_penalty": -0.7},
    {"frequency_penalty": 0.4},
    {"frequency_penalty": -0.2},
    {"logit_bias": {3: 2.5, 30: -100, 7: 1}},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.1,
     "logit_bias": {5: 4.0}},
]  # fmt: skip


def adjusted(logits, tokens, new, options):
    """Logits as vLLM defines them: the bias, then repetition, frequency and presence."""
    logits = logits.clone()
    for token, value in options.get("logit_bias", {}).items():
        logits[token] += value
    repetition = options.get("repetition_penalty", 1.0)
    for token in {*tokens, *new}:
        logits[token] = (
            logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
        )
    for token in set(new):
        logits[token] -= options.get("frequency_penalty", 0) * new.count(token)
        logits[token] -= options.get("presence_penalty", 0)
    return logits


@torch.no_grad()
def expected(model, tokens, count, options):
    """Greedily, each token from the logits of all tokens before it."""
    new = []
    for _ in range(count):
        logits = model(torch.tensor([[*tokens, *new]], device=model.lm_head.weight.device)).logits
        new.append(adjusted(logits[0, -1].double().cpu(), tokens, new, options).argmax().item())
    return new


def test_penalties_are_those_of_a_loop(device):
    """All kinds at once, and in rows that others have had."""
    model = make_model(torch.float64 if device == "cpu" else torch.float32, eos_token_id=None)
    with torch.no_grad():
        model.lm_head.weight *= 4  # so that penalties change some tokens and not all
    model = model.to(device)
    engine = Engine(model, limits=Limits(**SMALL))
    cases = [(prompt(5 + n), options) for n, options in enumerate([*KINDS, {}])]
    wanted = [expected(model, tokens, 40, options) for tokens, options in cases]
    plain = [expected(model, tokens, 40, {}) for tokens, _ in cases]
    assert [a != b for a, b in zip(wanted, plain, strict=True)] == [True] * len(KINDS) + [False]
    for order in (cases, cases[::-1]):
        requests = [Request(tokens, 40, temperature=0, **options) for tokens, options in order]
        found = [tokens for tokens, _, _ in run(engine, *requests)]
        assert found == (wanted if order is cases else wanted[::-1])


def test_a_request_without_them_makes_and_changes_nothing():
    model = make_model(eos_token_id=None)
    engine = Engine(model, limits=Limits(**SMALL))
    requests = [
        Request(prompt(9), 12, temperature=t, seed=3, top_k=k) for t in (0, 1.0) for k in (None, 5)
    ]
    before = run(engine, *requests)
    adjustments = engine._batch._adjustments
    assert adjustments._bias is adjustments._had is None
    both = run(engine, *requests[:2], Request(prompt(9), 12, presence_penalty=2.0), *requests[2:])
    assert [*both[:2], *both[3:]] == before
    assert adjustments._bias is None
    assert adjustments._had.dtype == torch.int32 and adjustments._had.shape == (3, V)


def test_min_p(device):
    """Tokens below min_p times the largest probability never come, the others as often as their
    probability says; top_k and top_p then choose among these."""
    draws = 2000
    generator = torch.Generator().manual_seed(0)
    uniform = ((torch.arange(draws) + 0.5) / draws).to(device)
    logits = torch.randn(100, generator=generator) * 3
    kinds = list(
        itertools.product((0.0, 0.01, 0.3, 1.0), (None, 3, 40), (1.0, 0.6), (0.5, 1.0, 2.0))
    )
    rows = logits.to(device).expand(len(kinds) * draws, 100).contiguous()
    min_p, top_k, top_p, warm = (
        torch.tensor(column, device=device).repeat_interleave(draws)
        for column in zip(*((m, k or 100, p, t) for m, k, p, t in kinds), strict=True)
    )
    tokens, _ = choose(rows, uniform.repeat(len(kinds)), warm, top_k, top_p, min_p)
    for (m, k, p, t), found in zip(kinds, tokens.view(-1, draws), strict=True):
        chances = (logits.double() / t).softmax(0)
        chances, order = (chances * (chances >= m * chances.max())).sort(descending=True)
        chances[k or 100 :] = 0
        chances /= chances.sum()
        chances[chances.cumsum(0) - chances >= p] = 0
        chances = torch.zeros(100, dtype=torch.double).scatter(0, order, chances / chances.sum())
        frequencies = found.bincount(minlength=100).cpu().double() / draws
        torch.testing.assert_close(frequencies, chances, atol=1.01 / draws, rtol=0)


def test_a_row_does_not_depend_on_the_min_p_of_another():
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0)).expand(200, 2, 50)
    uniform = torch.linspace(0, 0.999, 200)
    for place in range(200):
        args = (logits[place], uniform[place].expand(2), torch.ones(2))
        alone, _ = choose(*args)
        beside, _ = choose(*args, None, None, torch.tensor([0.0, 0.9]))
        assert alone[0] == beside[0]


def test_log_probabilities_are_those_of_the_model():
    """Before what the request changes."""
    model = make_model(torch.float64, eos_token_id=None)
    engine = Engine(model, limits=Limits(**SMALL))
    request = Request(prompt(9), 1, temperature=0, logit_bias={4: 100}, logprobs=0)
    (sequence,) = engine.submit(request)
    ((_, delta),) = engine.step()
    logits = model(torch.tensor([prompt(9)])).logits[0, -1]
    assert delta.tokens == [4] and sequence.finished
    assert delta.logprobs[0].logprob == pytest.approx(logits.log_softmax(0)[4].item(), abs=1e-5)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"min_p": -0.1}, ValueError, "min_p from 0 to 1, got -0.1"),
        ({"min_p": "a"}, TypeError, "min_p to be a number, got 'a'"),
        ({"repetition_penalty": 0}, ValueError, "repetition_penalty from 0.01 to 100, got 0"),
        ({"presence_penalty": 2.1}, ValueError, "presence_penalty from -2 to 2, got 2.1"),
        ({"frequency_penalty": torch.nan}, ValueError, "frequency_penalty from -2 to 2, got nan"),
        ({"logit_bias": {1: 101}}, ValueError, "logit_bias from -100 to 100, got 101"),
        ({"logit_bias": {"1": 1}}, TypeError, "tokens of logit_bias to be ints, got '1'"),
        ({"end_tokens": ["a"]}, TypeError, "tokens of end_tokens to be ints, got 'a'"),
        ({"logit_bias": dict.fromkeys(range(1025), 1)}, ValueError, "at most 1024 tokens, got 1"),
    ],
)
def test_what_cannot_be_asked_for(options, error, message):
    with pytest.raises(error, match=message):
        Request([1], **options)


def test_a_bias_of_no_token():
    with pytest.raises(
        ValueError, match=f"expected tokens of logit_bias from 0 to {V - 1}, got {V}"
    ):
        Engine(make_model(), limits=Limits(**SMALL)).submit(Request([1], logit_bias={V: 1}))


def test_what_a_row_had(device):
    """Counts of the tokens drawn, and whether the prompt has one."""
    adjustments = Adjustments(2, V, torch.device(device))
    request = Request([1, 2, 2], frequency_penalty=1.0)
    adjustments.begin(1, request)
    draws = {1: Draw.of(request, 0.0)}
    for _ in range(3):
        adjustments.drew(torch.tensor([4, 2], device=device), draws)
    assert adjustments._had[1].tolist() == [0, 1, 7] + [0] * 28
    logits = adjustments.apply(torch.zeros(2, V, device=device), draws)
    assert logits.tolist() == [[0.0] * V, [0.0, 0.0, -3.0] + [0.0] * 28]


def test_over_http():
    pytest.importorskip("starlette")
    model = make_model(vocab_size=256, eos_token_id=None)
    body = {"prompt": "a", "max_completion_tokens": 8, "temperature": 0, "metadata": {"a": "b"}}
    with client_of(Engine(model, Bytes(), Limits(rows=2))) as client:

        def post(**fields):
            return client.post("/v1/completions", json=body | fields)

        assert post(logit_bias={"65": 100}).json()["choices"][0]["text"] == "A" * 8
        options = {"logit_bias": {"65": 100, "66": 97}, "frequency_penalty": 2, "min_p": 0.1}
        assert set(post(**options).json()["choices"][0]["text"]) == {"A", "B"}
        nothing = {"logit_bias": {}, "presence_penalty": 0, "min_p": 0, "suffix": "", "top_k": None}
        for top_k in (None, 0, -1):
            reply = post(**nothing | {"top_k": top_k}, max_tokens=8)
            assert reply.json()["choices"] == post().json()["choices"]
        for fields, message in (
            ({"logit_bias": {"a": 1}}, "expected logit_bias to be an object of numbers, whose nam"),
            ({"logit_bias": {"1": "a"}}, "expected logit_bias to be an object of numbers"),
            ({"logit_bias": {"256": 1}}, "expected tokens of logit_bias from 0 to 255, got 256"),
            ({"metadata": 1}, "expected metadata to be an object, got 1"),
            ({"presence_penalty": -3}, "expected presence_penalty from -2 to 2, got -3"),
            ({"max_tokens": 7}, "expected max_tokens and max_completion_tokens to be the same"),
        ):
            reply = post(**fields)
            assert reply.status_code == 400 and message in reply.text
