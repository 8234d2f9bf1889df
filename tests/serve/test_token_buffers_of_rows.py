"""An engine that keeps the newest tokens beside the states gives each sequence its tokens.

With FEWEST rows in a step it uses the buffers, with fewer it writes the states.
"""

import random

import pytest
import torch
from changing import optimizer_step
from dispatch import Calls
from engines import SMALL, deltas, greedy, is_empty, prompt, run, run_and_cancel
from models import MODEL_EVERY, make_model

from gla_ext.cache import _tokens
from gla_ext.ops import batch_invariant
from gla_ext.serve import Engine, Limits, Request

FEWEST = 3
LIMITS = SMALL | {"rows": 6, "cache_bytes": 1 << 20}
OPTIONS = {
    "plain": {},
    "convolutions, shared heads": MODEL_EVERY,
    "recurrent": {"attn_mode": "fused_recurrent"},
}
by_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
STEP, PLAIN_STEP = "recurrent_gla_buffered_step_", "recurrent_gla_step_"


@pytest.fixture(autouse=True)
def some_steps(buffers, monkeypatch):
    monkeypatch.setattr(_tokens, "FEWEST_ROWS", FEWEST)


def buffers_of(engine):
    return engine._batch.cache._cache.buffers


def make(device="cpu", **options):
    dtype = torch.float64 if device == "cpu" else torch.float32
    return make_model(dtype, eos_token_id=None, **options).to(device)


@by_options
def test_sequences_of_many_lengths(options, device):
    """Steps get larger and smaller while sequences start, end, and share beginnings."""
    model, chosen = make(device, **options), random.Random(0)
    engine = Engine(model, limits=Limits(**LIMITS), cuda_graph=False)
    beginnings, tokens, requests = [[], prompt(64), prompt(200)], {}, {}

    def submit(count):
        begin, rest = chosen.choice(beginnings), prompt(chosen.randint(1, 90), len(requests))
        request = Request(begin + rest, count, temperature=0)
        (sequence,) = engine.submit(request)
        tokens[sequence], requests[sequence] = [], request

    def step(count):
        for _ in range(count):
            for sequence, delta in engine.step():
                tokens[sequence] += delta.tokens

    with Calls() as calls:
        submit(90), submit(100)  # in the first two rows, while others come and go
        for counts in ((7, 20, 3), (1, 17, 5, 33, 2), (40, 16, 8, 15)):
            step(5)
            for count in counts:
                submit(count)
            step(20)
        while engine.busy:
            step(1)
    for sequence, request in requests.items():
        assert tokens[sequence] == greedy(model, [*request.tokens], request.max_new_tokens)
    assert calls.count(STEP) > 50 and calls.count(PLAIN_STEP) > 20
    assert calls.count("recurrent_gla_commit_") >= 2 * len(buffers_of(engine)._layers)
    assert engine.metrics.count("cached_prompt_tokens_total") > 0
    assert is_empty(engine)


@by_options
def test_rows_whose_last_owner_was_cancelled(options):
    """In the middle of its buffer, or of its prompt."""
    model, chosen = make(**options), random.Random(1)
    engine = Engine(model, limits=Limits(**LIMITS))
    for _ in range(6):
        requests = [
            Request(prompt(chosen.randint(1, 150), n), chosen.randint(1, 40), temperature=0)
            for n in range(8)
        ]
        steps = chosen.randint(1, 20)
        sequences, tokens, left, _ = run_and_cancel(
            engine, requests, steps, lambda among: chosen.sample(among, 3)
        )
        for request, sequence in zip(requests, sequences, strict=True):
            whole = greedy(model, [*request.tokens], request.max_new_tokens)
            assert tokens[sequence] == whole[: len(tokens[sequence])]
            assert sequence in left or len(tokens[sequence]) == len(whole)
        assert is_empty(engine)


@pytest.mark.parametrize("keep_running", [False, True])
def test_a_model_that_changes(keep_running, monkeypatch):
    """Sequences that go on do so from whole states of the old model, as without buffers."""
    found = []
    for fewest in (FEWEST, 100):
        monkeypatch.setattr(_tokens, "FEWEST_ROWS", fewest)
        model = make()
        engine = Engine(model, limits=Limits(**LIMITS))
        requests = [Request(prompt(n), 40, temperature=0) for n in (5, 70, 130, 9)]
        tokens = {sequence: [] for sequence in engine.submit(*requests)}
        for _ in range(12):
            for sequence, delta in engine.step():
                tokens[sequence] += delta.tokens
        optimizer_step(model)
        engine.refresh(keep_running)
        if fewest == FEWEST:
            assert not buffers_of(engine).counts.any()
        for sequence, delta in deltas(engine):
            tokens[sequence] += delta.tokens
        found.append([*tokens.values()])
        assert is_empty(engine)
    assert found[0] == found[1]
    assert all((len(tokens) == 40) == keep_running for tokens in found[0])


@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16])
def test_memory(state_dtype):
    """Rows of sequences have buffers, those of checkpoints have none."""
    model = make_model(torch.bfloat16, eos_token_id=None)
    engine = Engine(model, limits=Limits(**LIMITS), state_dtype=state_dtype)
    size = 4 if state_dtype is None else 2
    assert engine._batch.row_nbytes == 2 * 2 * 4 * 8 * size
    assert len(engine._batch.checkpoints) == LIMITS["cache_bytes"] // engine._batch.row_nbytes
    assert buffers_of(engine).nbytes == LIMITS["rows"] * 2 * _tokens.LENGTH * 2 * (4 + 8 + 4) * 2
    (tokens, *_), *_ = run(engine, *[Request(prompt(70), 40, temperature=0)] * 4)
    assert len(tokens) == 40
    run(engine, Request(prompt(3), 3))
    states = engine._batch.cache._cache.tensors()
    assert all(x.dtype == (state_dtype or torch.float32) for x in states)
    assert all(x[: LIMITS["rows"]].isfinite().all() for x in states)


def test_an_engine_of_few_rows_and_one_of_fixed_bits_have_none():
    model = make()
    assert buffers_of(Engine(model, limits=Limits(**SMALL | {"rows": FEWEST - 1}))) is None
    with batch_invariant():
        assert buffers_of(Engine(model, limits=Limits(**LIMITS))) is None


def test_graphs(captures, monkeypatch):
    """A graph of each size, with buffers or without. Autocast, which may change between steps, has
    graphs of its own, and the states are whole before.
    """
    model = make_model(torch.float32, eos_token_id=None)
    requests = [Request(prompt(n), 50, temperature=0) for n in (1, 70, 3, 20, 5)]
    expected = [(greedy(model, [*r.tokens], 50), "", "length") for r in requests]
    filled = Engine(model, limits=Limits(**LIMITS))
    filled.warm_up()
    kinds = {(1, False), (2, False), (4, True), (6, True)}
    assert set(filled._batch._graphs._graphs) == kinds
    assert run(filled, *requests) == expected
    assert buffers_of(filled).filled
    filled.submit(*requests)
    for n in range(20):
        with torch.autocast("cpu", torch.bfloat16, enabled=n in (12, 13)):
            filled.step()
        if n == 13:
            assert not buffers_of(filled).counts.any()
    assert set(filled._batch._graphs._graphs) == kinds | {(6, False)}
    assert len([*deltas(filled)]) > 0 and is_empty(filled)


@pytest.mark.cuda
def test_cuda_graphs_of_many_rows(monkeypatch):
    """By the rule itself: steps of up to 64 rows, while sequences start and end."""
    monkeypatch.undo()
    model = make("cuda", use_short_conv=True)
    requests = [
        Request(prompt(1 + 7 * n % 100, n), 5 + 11 * n % 60, temperature=n % 2, seed=n)
        for n in range(90)
    ]
    found = []
    for cuda_graph, fewest in ((False, 1000), (False, 33), (True, 33)):
        monkeypatch.setattr(_tokens, "FEWEST_ROWS", fewest)
        limits = Limits(**LIMITS | {"rows": 64, "waiting": 90})
        steady = Engine(model, limits=limits, cuda_graph=cuda_graph)
        assert (buffers_of(steady) is None) == (fewest == 1000)
        found.append([run(steady, *requests) for _ in range(2)])
        assert is_empty(steady)
    assert found[0] == found[1] == found[2]
