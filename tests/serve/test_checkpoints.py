"""Rows of checkpoints: what prompts leave there on their way, and start from.

Equal bits (see common.py): the same calls of one prompt at a time.
"""

import random

import pytest
import torch
from engines import SMALL, greedy, is_empty, prompt, run, run_and_cancel
from models import make_model

from gla_ext.cache import GLACache, StaticGLACache
from gla_ext.cache._rows import Gathered
from gla_ext.ops import batch_invariant
from gla_ext.serve import Engine, Limits, Request

CONVOLVED = {"use_short_conv": True}
RECURRENT = {"attn_mode": "fused_recurrent"}
FAR = {"use_short_conv": True, "conv_size": 70}


def make_engine(model, **options) -> Engine:
    return Engine(model, limits=Limits(**(SMALL | {"cache_bytes": 1 << 20} | options)))


def spy_on_calls(model, monkeypatch) -> list[int]:
    """The numbers of tokens, all prompts together, that pass the model from now on."""
    counts, forward = [], model.forward

    def call(input_ids, *args, **kwargs):
        counts.append(input_ids.numel())
        return forward(input_ids, *args, **kwargs)

    monkeypatch.setattr(model, "forward", call)
    return counts


def check_rows(engine, prompts) -> int:
    """Checkpoints are what the model has of their beginning alone; returns how many there are."""
    every, found = engine.prefixes.every, 0
    buffers = engine._cache._cache.tensors()
    for tokens in prompts:
        keys = engine.prefixes.keys(Request(tokens).tokens)
        for n, key in enumerate(keys):
            if (row := engine.prefixes._kept.get(key)) is None:
                continue
            cache, found = StaticGLACache(1), found + 1
            with torch.no_grad(), cache.prefill():
                ids = torch.tensor([tokens[: (n + 1) * every]], device=buffers[0].device)
                engine.model(ids, past_key_values=cache, use_cache=True)
            for buffer, expected in zip(buffers, cache.tensors(), strict=True):
                torch.testing.assert_close(buffer[row], expected[0], rtol=1e-4, atol=1e-5)
                if buffer.dtype == torch.float64:
                    torch.testing.assert_close(buffer[row], expected[0], rtol=1e-9, atol=1e-12)
    return found


@pytest.mark.parametrize(
    ("options", "every"),
    [({}, 64), (CONVOLVED, 64), (CONVOLVED, 192), (RECURRENT, 192), (FAR, 128)],
    ids=str,
)
def test_rows_are_the_states_of_sequences_that_end_there(options, every, device):
    """Whole or in pieces, alone or packed, beside what decodes."""
    dtype = torch.float64 if device == "cpu" else torch.float32
    model = make_model(dtype, eos_token_id=None, **options).to(device)
    prompts = [prompt(n) for n in (700, 385, 64, 193, 300, 1000)]
    requests = [Request(p, 6, temperature=0) for p in prompts]
    engine = make_engine(model, checkpoint_tokens=every, rows=4, cache_bytes=4 << 20)
    expected = [(greedy(model, p, 6), "", "length") for p in prompts]
    assert run(engine, Request([1], 30, temperature=0), *requests)[1:] == expected
    count = sum((len(p) - 1) // every for p in prompts)
    assert check_rows(engine, prompts) == len(engine.prefixes) == count
    kept = {key: row for key, row in engine.prefixes._kept.items()}
    assert run(engine, *requests) == expected
    assert engine.metrics.count("cached_prompt_tokens_total") == count * every
    assert kept == engine.prefixes._kept
    assert check_rows(engine, prompts) == count  # those that went on have left them as they were
    assert is_empty(engine)


@pytest.mark.parametrize("options", [{}, CONVOLVED], ids=str)
def test_a_start_from_a_checkpoint_copies_no_state(options, monkeypatch):
    model = make_model(torch.float64, eos_token_id=None, **options)
    engine = make_engine(model)
    counts = spy_on_calls(model, monkeypatch)
    first = prompt(300)
    run(engine, Request(first, 1))
    assert counts == [300] and len(engine.prefixes) == 4
    before = [x.clone() for x in engine._cache._cache.tensors()]
    found = Gathered.__getitem__

    def gather(self, key):
        assert key == "conv_state"
        return found(self, key)

    monkeypatch.setattr(Gathered, "__getitem__", gather)
    monkeypatch.setattr(torch, "_foreach_copy_", None)
    expected = greedy(model, first[:290], 4)
    counts.clear()
    assert run(engine, Request(first[:290], 4, temperature=0)) == [(expected, "", "length")]
    assert counts == [290 - 256, 1, 1, 1]
    assert engine.metrics.count("cached_prompt_tokens_total") == 256
    rows = engine._batch.checkpoints[:4]
    for now, then in zip(engine._cache._cache.tensors(), before, strict=True):
        assert torch.equal(now[rows.start : rows.stop], then[rows.start : rows.stop])


@pytest.mark.parametrize("options", [{}, CONVOLVED, RECURRENT], ids=str)
def test_invariant_rows_have_the_bits_of_a_sequence_that_ends_there(options, monkeypatch):
    """In pieces of n tokens, whatever else passes."""
    model = make_model(eos_token_id=None, **options)
    with batch_invariant():
        engine = make_engine(model, checkpoint_tokens=128)
        tokens = prompt(400)
        counts = spy_on_calls(model, monkeypatch)
        run(engine, Request(tokens, 1), Request(prompt(70), 1))
        assert counts == [128, 70, 128, 128, 16]
        cache = GLACache()
        for n, key in enumerate(engine.prefixes.keys(Request(tokens).tokens)):
            row, ids = engine.prefixes._kept[key], torch.tensor([tokens[128 * n : 128 * (n + 1)]])
            with torch.no_grad():
                model(ids, past_key_values=cache, use_cache=True)
            expected = StaticGLACache(1)
            expected.load(cache)
            for x, y in zip(engine._cache._cache.tensors(), expected.tensors(), strict=True):
                assert torch.equal(x[row], y[0])


def test_prompts_that_come_together_share_their_beginning(monkeypatch):
    """The first makes it, the others wait for that, and no other prompt does."""
    model = make_model(torch.float64, eos_token_id=None)
    engine = make_engine(model, rows=5, checkpoint_tokens=128)
    shared = prompt(256)
    prompts = [shared + prompt(n) for n in (30, 40, 50)] + [prompt(99)]
    expected = [(greedy(model, p, 5), "", "length") for p in prompts]
    counts = spy_on_calls(model, monkeypatch)
    assert run(engine, *(Request(p, 5, temperature=0) for p in prompts)) == expected
    assert counts[:2] == [256 + 30 + 99, 40 + 50]
    assert engine.metrics.count("cached_prompt_tokens_total") == 2 * 256
    assert engine.metrics.count("prompt_tokens_total") == sum(map(len, prompts))


@pytest.mark.parametrize("options", [{}, CONVOLVED], ids=str)
def test_prompts_in_pieces_share_what_each_has_made(options, monkeypatch):
    """Of alike prompts, each goes on from where the one that is furthest has come to."""
    model = make_model(torch.float64, eos_token_id=None, **options)
    engine = make_engine(model, rows=4)
    engine.submit(Request([1], 400, temperature=0))
    engine.step()  # so that prompts pass in pieces
    expected = greedy(model, prompt(1000), 5)
    counts = spy_on_calls(model, monkeypatch)
    generations = engine.submit(*[Request(prompt(1000), 5, temperature=0)] * 3)
    tokens = {generation: [] for generation in generations}
    while not all(generation.finished for generation in generations):
        for generation, delta in engine.step():
            if generation in tokens:
                tokens[generation] += delta.tokens
    assert [*tokens.values()] == [expected] * 3
    # The beginning of 960 once, and the 40 after it for each.
    assert sum(count for count in counts if count > 4) == 960 + 3 * 40
    cached = [generation.cached for generation in generations]
    assert sum(cached) == 2 * 960 and min(cached) > 0
    assert engine.metrics.count("cached_prompt_tokens_total") == 2 * 960
    assert engine.metrics.count("prompt_tokens_total") == 3001


@pytest.mark.parametrize("options", [{}, CONVOLVED], ids=str)
def test_few_rows_and_cancellation_leak_none(options):
    """Rows of checkpoints are given up and taken again, midway too; tokens stay right."""
    model = make_model(torch.float64, eos_token_id=None, **options)
    probe = make_engine(model)
    engine = make_engine(model, cache_bytes=5 * probe._batch.row_nbytes)
    assert len(engine._batch.checkpoints) == 5
    chosen = random.Random(0)
    beginnings = [prompt(n) for n in (200, 130, 700)]
    for _ in range(8):
        asked = [chosen.choice(beginnings) + prompt(chosen.randint(1, 300)) for _ in range(5)]
        requests = [Request(p, 4, temperature=0) for p in asked]
        generations, tokens, left, reasons = run_and_cancel(
            engine, requests, chosen.randint(0, 3), lambda among: chosen.sample(among, 2)
        )
        for generation, p in zip(generations, asked, strict=True):
            if generation not in left:
                assert tokens[generation] == greedy(model, p, 4)
            elif generation in reasons:  # it had not ended before
                assert reasons[generation] == "cancelled"
        assert is_empty(engine)
        prefixes = engine.prefixes
        rows = [*prefixes._kept.values(), *prefixes._free]
        assert sorted(rows) == list(engine._batch.checkpoints[: len(rows)])
        assert not prefixes._coming and not prefixes._found
    assert len(prefixes) == 5 and prefixes.evictions > 5
    assert prefixes.nbytes == 5 * engine._batch.row_nbytes
    assert check_rows(engine, asked) > 0
