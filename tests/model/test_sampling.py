"""Drawing a token from logits.

Equal bits (see common.py): the same calls.
"""

import math

import numpy as np
import pytest
import torch

from gla_ext.decode.sampling import Sampling, choose, sample

P = torch.tensor([0.05, 0.3, 0.15, 0.5])


def frequencies(options, n=20000) -> torch.Tensor:
    rows = P.log().repeat(n, 1)
    drawn = sample(rows, generator=torch.Generator().manual_seed(0), **options)
    assert drawn.shape == (n, 1)
    assert drawn.dtype == torch.int64
    return drawn.flatten().bincount(minlength=4) / n


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 3, "top_p": 0.8}, [1, 3]),  # 0.5 and 0.3 of 0.95 are 0.84
    ],
)
def test_frequencies(options, allowed):
    found, expected = frequencies(options), torch.zeros(4)
    expected[allowed] = P[allowed] / P[allowed].sum()
    assert not found[expected == 0].any()
    # Pearson's chi-square with at most 3 degrees of freedom: 16.3 is exceeded once in 1,000.
    kept = expected > 0
    assert 20000 * ((found - expected)[kept] ** 2 / expected[kept]).sum() < 16.3


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 1e-300},
        {"temperature": 1e-30},
        {"top_k": 1},
        {"top_p": 1e-6},
    ],
)
def test_the_most_probable_token(options):
    rows = torch.randn(50, 31, generator=torch.Generator().manual_seed(0))
    assert torch.equal(sample(rows, **options), rows.argmax(-1, keepdim=True))


def test_noise_of_zero_draws_no_token_of_probability_zero():
    logits = torch.tensor([[0.0, -torch.inf, 0.0], [0.0, 0.0, -torch.inf]])
    noise = torch.tensor([[1.0, 0.0, 0.5], [1.0, 2.0, 0.0]])
    assert choose(logits, noise, 1.0)[0].tolist() == [2, 0]
    assert choose(logits[:1], torch.tensor([[0.0, 0.0, 1.0]]), 1.0)[0].tolist() == [0]


@pytest.mark.parametrize("temperature", [math.inf, 1e300, 3.5e38])
@pytest.mark.parametrize("options", [{}, {"top_k": 4}, {"top_p": 0.99}], ids=str)
def test_a_temperature_without_bound_draws_alike_what_is_possible(temperature, options):
    rows = torch.tensor([3.0, -torch.inf, -2.0, 50.0, -torch.inf]).repeat(20000, 1)
    generator = torch.Generator().manual_seed(0)
    drawn = (
        sample(rows, temperature, generator=generator, **options).flatten().bincount(minlength=5)
    )
    assert not drawn[[1, 4]].any()
    # Pearson's chi-square with 2 degrees of freedom: 13.8 is exceeded once in 1,000.
    assert (drawn[[0, 2, 3]] - 20000 / 3).square().sum() / (20000 / 3) < 13.8


def test_options_as_tensors():
    rows = torch.randn(50, 31, generator=torch.Generator().manual_seed(0))
    noise = torch.empty(50, 31).exponential_(generator=torch.Generator().manual_seed(1))
    numbers, _ = choose(rows, noise, 0.75, None, 0.5)
    tensors, _ = choose(rows, noise, torch.tensor(0.75), None, torch.tensor(0.5))
    assert torch.equal(numbers, tensors)
    assert not torch.equal(numbers, choose(rows, noise, 0.75)[0])


@pytest.mark.parametrize(
    ("number", "count"), [(np.float32, np.int64), (torch.tensor, torch.tensor)]
)
def test_options_of_numpy_and_torch(number, count):
    options = {"temperature": number(0.5), "top_k": count(2), "top_p": number(0.99)}
    assert not frequencies(options, 100)[[0, 2]].any()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"temperature": None}, TypeError, "temperature to be a number, got None"),
        ({"temperature": "0.5"}, TypeError, "temperature to be a number, got '0.5'"),
        ({"top_k": 5.0}, TypeError, "top_k to be an int or None, got 5.0"),
        ({"top_k": True}, TypeError, "top_k to be an int or None, got True"),
        ({"top_p": "0.5"}, TypeError, "top_p to be a number or None, got '0.5'"),
        ({"temperature": -0.5}, ValueError, "temperature to be at least 0, got -0.5"),
        ({"temperature": math.nan}, ValueError, "temperature to be at least 0, got nan"),
        ({"top_k": 0}, ValueError, "top_k to be at least 1, got 0"),
        ({"top_p": 0.0}, ValueError, r"top_p to be in \(0, 1\], got 0.0"),
        ({"top_p": 1.5}, ValueError, r"top_p to be in \(0, 1\], got 1.5"),
    ],
)
def test_wrong_options(options, error, message):
    with pytest.raises(error, match=f"generate: expected {message}"):
        Sampling(**options)
