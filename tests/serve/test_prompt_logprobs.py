"""Log-probabilities of prompts: those of the model in one pass, however prompts are cut and packed,
with a bound on how many logits there are at a time."""

import contextlib

import pytest
import torch
from engines import SMALL, deltas, greedy, is_empty, prompt, run
from models import make_model

from gla_ext.ops import batch_invariant
from gla_ext.serve import Engine, Limits, Request, batch

V = 31
LENGTHS = (1, 2, 64, 65, 129, 300, 33, 7)


@torch.no_grad()
def expected(model, tokens) -> torch.Tensor:
    """Log-probabilities [T - 1, V] of the tokens after the first."""
    return model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)


def scores(engine, *requests):
    """What the deltas of each request have of its prompt; only the first has something."""
    sequences = engine.submit(*requests)
    found = {sequence: [] for sequence in sequences}
    for sequence, delta in deltas(engine):
        found[sequence].append([*delta.prompt_logprobs])
    assert all(later == [] for _, *rest in found.values() for later in rest)
    return [first for first, *_ in found.values()]


@pytest.fixture
def pieces(monkeypatch):
    """The number of tokens whose logits there are at a time."""
    found = []
    monkeypatch.setattr(batch, "SCORED_BYTES", 4 * V * 128)
    read = batch.log_probabilities
    monkeypatch.setattr(
        batch, "log_probabilities", lambda x, *args: [found.append(len(x)), read(x, *args)][1]
    )
    return found


CASES = [({}, False), ({}, True), ({"use_short_conv": True}, False)]
CASES += [({"attn_mode": "fused_recurrent"}, False), ({"attn_mode": "fused_recurrent"}, True)]


@pytest.mark.parametrize(("options", "invariant"), CASES)
def test_they_are_those_of_the_model(options, invariant, pieces):
    """Of many prompts, beside others that want none; the texts do not change, and what the prompts
    share is read again."""
    model = make_model(torch.float64, eos_token_id=None, **options)
    with batch_invariant() if invariant else contextlib.nullcontext():
        engine = Engine(model, limits=Limits(**SMALL, cache_bytes=1 << 20))
    requests, plain = [], []
    for n in LENGTHS:
        requests.append(Request(prompt(n), n % 3, temperature=0, prompt_logprobs=n % 4))
        plain.append(Request(prompt(n), 3, temperature=0))
    texts = [(greedy(model, prompt(n), 3), "", "length") for n in LENGTHS]
    for _ in range(2):
        found = scores(engine, *requests, *plain)[: len(requests)]
        for n, scored in zip(LENGTHS, found, strict=True):
            wanted = expected(model, prompt(n))
            assert [x.token for x in scored] == prompt(n)[1:]
            for x, row in zip(scored, wanted, strict=True):
                assert x.logprob == pytest.approx(row[x.token].item(), abs=1e-5)
                best, ids = row.topk(n % 4)
                assert list(x.best) == ids.tolist()
                assert list(x.best.values()) == pytest.approx(best.tolist(), abs=1e-5)
        assert is_empty(engine)
        assert run(engine, *plain) == texts
    for n, (tokens, _, reason) in zip(LENGTHS, run(engine, *requests), strict=True):
        assert (tokens, reason) == (greedy(model, prompt(n), n % 3), "length")
    assert max(pieces) == 128 and len(pieces) > 6


def test_cut_alike_whatever_else_is_read(pieces):
    """In batch_invariant a prompt has the same bits beside others."""
    with batch_invariant():
        engine = Engine(make_model(eos_token_id=None), limits=Limits(**SMALL))
    request = Request(prompt(300), 0, prompt_logprobs=2)
    (alone,) = scores(engine, request)
    others = [Request(prompt(n), 20, prompt_logprobs=n % 2 or None) for n in (50, 200)]
    assert scores(engine, request, *others)[0] == alone


def test_beside_graphs(captures):
    """A scored prompt is read without one, and others by theirs."""
    model = make_model(torch.float64, eos_token_id=None)
    engine = Engine(model, limits=Limits(**SMALL))
    engine.warm_up()
    requests = [Request(prompt(n), 3, temperature=0) for n in (70, 5)]
    scored = Request(prompt(100), 3, temperature=0, prompt_logprobs=0)
    before = len(captures[1])
    found = scores(engine, *requests, scored)[2]
    assert len(captures[1]) > before
    values = [
        row[x.token].item() for row, x in zip(expected(model, prompt(100)), found, strict=True)
    ]
    assert [x.logprob for x in found] == pytest.approx(values, abs=1e-5)
    texts = [tokens for tokens, _, _ in run(engine, *requests, scored)]
    assert texts == [greedy(model, prompt(n), 3) for n in (70, 5, 100)]


def test_prompts_alone(device):
    """With no token to draw they are read, for the prefix cache too."""
    model = make_model(eos_token_id=None).to(device)
    engine = Engine(model, limits=Limits(**SMALL))
    assert run(engine, *[Request(prompt(200), 0)] * 5) == [([], "", "length")] * 5
    assert engine.metrics.count("generated_tokens_total") == 0
    assert len(engine.prefixes) == 3
    ((_, last),) = [x for x in deltas_of(engine, Request(prompt(200), 0, prompt_logprobs=0))]
    assert len(last.prompt_logprobs) == 199 and last.finish_reason == "length"
    assert is_empty(engine)


def deltas_of(engine, request):
    engine.submit(request)
    return deltas(engine)


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("place", [0, 100, 199])
def test_what_is_not_finite_ends_the_sequence(place, count):
    """Wherever in the prompt; others go on."""
    model = make_model(vocab_size=256, eos_token_id=None)
    with torch.no_grad():
        model.model.embeddings.weight[255] = torch.nan
    engine = Engine(model, limits=Limits(**SMALL))
    tokens = prompt(200)
    bad = Request([*tokens[:place], 255, *tokens[place + 1 :]], count, prompt_logprobs=1)
    good = Request(tokens, count, temperature=0, prompt_logprobs=1)
    (_, _, reason), (new, _, other) = run(engine, bad, good)
    assert (reason, other, len(new)) == ("error", "length", count)
    assert engine.metrics.count("nonfinite_logits_total") == 1
    assert is_empty(engine)
