"""Decoding on the recurrent state, and sampling."""

import math

import pytest
import torch
from common import assert_close
from models import make_ids, make_model

from gla_ext.cache import GLACache
from gla_ext.generate import sample


def test_stepwise_decoding_equals_the_full_forward():
    model, ids = make_model(torch.float64), make_ids(T=40)
    cache = GLACache()
    pieces = [model(ids[:, :10], past_key_values=cache, use_cache=True).logits]
    pieces += [
        model(ids[:, t : t + 1], past_key_values=cache, use_cache=True).logits
        for t in range(10, 40)
    ]
    assert_close(torch.cat(pieces, 1), model(ids).logits, 1e-12)
    assert cache.get_seq_length() == 40


def test_use_cache_makes_a_cache():
    model, ids = make_model(torch.float64), make_ids()
    cache = model(ids[:, :30], use_cache=True).past_key_values
    rest = model(ids[:, 30:], past_key_values=cache).logits
    assert_close(rest, model(ids).logits[:, 30:], 1e-12)


@pytest.fixture
def spied_model():
    """A model and the list of the token counts and logits of its calls."""
    model, calls = make_model(torch.float64), []
    model.register_forward_hook(
        lambda module, args, output: calls.append((args[0].shape[1], output.logits))
    )
    return model, calls


def test_generate_takes_one_step_a_token(spied_model):
    model, calls = spied_model
    ids = make_ids(T=10)
    tokens = model.generate(ids, 12, temperature=0)
    assert [count for count, _ in calls] == [10] + [1] * 11
    logits = torch.cat([logits for _, logits in calls], 1)
    full = make_model(torch.float64)(tokens).logits
    assert_close(logits, full[:, 9:-1], 1e-12)
    assert torch.equal(tokens[:, :10], ids)
    assert torch.equal(tokens[:, 10:], full[:, 9:-1].argmax(-1))


def test_generate_nothing():
    model, ids = make_model(), make_ids(T=3)
    assert torch.equal(model.generate(ids, 0), ids)


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-4}])
def test_greedy_by_other_names(options):
    model, ids = make_model(torch.float64), make_ids(T=5)
    greedy = model.generate(ids, 10, temperature=0)
    assert torch.equal(model.generate(ids, 10, **options), greedy)


def test_generate_follows_its_generator():
    model, ids = make_model(), make_ids(T=5)
    draws = [
        model.generate(ids, 20, generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)
    ]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_generate_with_left_padding():
    model, ids = make_model(torch.float64), make_ids(B=1, T=6)
    alone = model.generate(ids, 8, temperature=0)
    padded = torch.cat([make_ids(B=1, T=4, seed=9), ids], 1)
    mask = torch.tensor([[0] * 4 + [1] * 6])
    assert torch.equal(model.generate(padded, 8, 0, attention_mask=mask)[:, 4:], alone)


def test_generate_stops_at_eos():
    model, ids = make_model(torch.float64), make_ids(B=2, T=6)
    greedy = model.generate(ids, 20, temperature=0)
    row = greedy[0, 6:].tolist()
    eos = row[4]
    first = row.index(eos)
    for b in range(2):
        tokens = model.generate(ids[b : b + 1], 20, temperature=0, eos_token_id=eos)[0, 6:].tolist()
        wanted = greedy[b, 6:].tolist()
        assert tokens == (wanted[: wanted.index(eos) + 1] if eos in wanted else wanted)
    both = model.generate(ids, 20, temperature=0, eos_token_id=eos)
    assert (both[0, 6 + first :] == eos).all()


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 2}, [1, 3]),
        ({"top_p": 0.75}, [1, 3]),
        ({"top_p": 0.4}, [3]),
        ({"top_k": 3, "top_p": 0.9}, [1, 2, 3]),
    ],
)
def test_sample_frequencies(options, allowed):
    p = torch.tensor([0.05, 0.3, 0.15, 0.5])
    rows = p.log().repeat(20000, 1)
    drawn = sample(rows, generator=torch.Generator().manual_seed(0), **options)
    assert drawn.shape == (20000, 1)
    frequencies = drawn.flatten().bincount(minlength=4) / 20000
    kept = torch.zeros(4)
    kept[allowed] = p[allowed]
    assert (frequencies - kept / kept.sum()).abs().max() < 0.02


def test_temperature_sharpens():
    rows = torch.tensor([[1.0, 2.0]]).repeat(20000, 1)
    drawn = sample(rows, temperature=0.5, generator=torch.Generator().manual_seed(0))
    assert drawn.double().mean().item() == pytest.approx(1 / (1 + math.exp(-2)), abs=0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_ids": torch.zeros(2, 0, dtype=torch.long)}, r"\[B, at least 1\], got \[2, 0\]"),
        ({"input_ids": torch.zeros(3, dtype=torch.long)}, r"\[B, at least 1\], got \[3\]"),
        ({"max_new_tokens": -1}, "max_new_tokens to be at least 0, got -1"),
        ({"temperature": -0.5}, "temperature to be at least 0, got -0.5"),
        ({"temperature": math.nan}, "temperature to be at least 0, got nan"),
        ({"top_k": 0}, "top_k to be at least 1, got 0"),
        ({"top_p": 0.0}, r"top_p to be in \(0, 1\], got 0.0"),
        ({"top_p": 1.5}, r"top_p to be in \(0, 1\], got 1.5"),
        ({"attention_mask": torch.tensor([[1, 1, 0]])}, "padded on the left, got"),
        ({"attention_mask": torch.ones(3)}, r"attention_mask to have shape \[1, 3\], got \[3\]"),
    ],
)
def test_generate_errors(options, message):
    arguments = {"input_ids": make_ids(B=1, T=3), "max_new_tokens": 1} | options
    with pytest.raises(ValueError, match=message):
        make_model().generate(**arguments)


def test_decoding_step_compiles_whole():
    model, ids = make_model(torch.float64), make_ids(T=12)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        cache = model(ids[:, :6], use_cache=True).past_key_values
        steps = [
            compiled(ids[:, t : t + 1], past_key_values=cache, use_cache=True).logits
            for t in range(6, 12)
        ]
        assert_close(torch.cat(steps, 1), model(ids).logits[:, 6:], 1e-12)
