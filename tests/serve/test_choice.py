"""How an engine draws tokens, and that `generate` draws them alike."""

import itertools

import torch

from gla_ext.decode import Sampling
from gla_ext.decode import sampling as of_generate
from gla_ext.serve.choice import choose


def reference(logits, temperature, top_k, top_p):
    """The probability of each token, in fp64 on the CPU, token by token."""
    ordered = sorted(enumerate(logits.double().cpu().tolist()), key=lambda pair: -pair[1])
    logits = torch.tensor([logit for _, logit in ordered[:top_k]], dtype=torch.float64)
    expected, before = torch.zeros(len(ordered), dtype=torch.float64), 0.0
    for (token, _), p in zip(ordered, (logits / temperature).softmax(0).tolist(), strict=False):
        if before < top_p:
            expected[token] = p
        before += p
    return expected / expected.sum()


def test_filters_are_those_of_generate(device):
    """All combinations in one batch of the engine, and each alone as `generate` draws it: the same
    tokens, of the same probabilities. top_p is taken of the sum of the top_k.
    """
    V, draws = 100, 2000
    generator = torch.Generator().manual_seed(0)
    hottest = Sampling(temperature=float("inf")).divisor
    falling, drawn = torch.linspace(2, 0, V), torch.randn(V, generator=generator) * 3
    kinds = list(
        itertools.product((0.3, 1.0, 2.5), (None, 1, 10, 99, 200), (None, 1e-9, 0.5, 0.9, 1.0))
    )
    uniform = ((torch.arange(draws) + 0.5) / draws).to(device)
    for logits in (falling, drawn[torch.randperm(V, generator=generator)]):
        rows = logits.to(device).expand(len(kinds) * draws, V).contiguous()
        warm, top_k, top_p = (
            torch.tensor(column, device=device).repeat_interleave(draws)
            for column in (
                [temperature for temperature, _, _ in kinds],
                [V if k is None else min(k, V) for _, k, _ in kinds],
                [1.0 if p is None else p for _, _, p in kinds],
            )
        )
        for temperature in (0.0, 1e-30, 0.3, 1.0, 2.5, hottest):  # without filters
            same = torch.full((draws,), temperature, device=device)
            tokens, _ = choose(rows[:draws], uniform, same)
            expected = reference(logits, max(temperature, 1e-30), V, 1.0)
            found = tokens.bincount(minlength=V).cpu() / draws
            torch.testing.assert_close(found.double(), expected, atol=1.01 / draws, rtol=0)
        tokens, _ = choose(rows, uniform.repeat(len(kinds)), warm, top_k, top_p)
        for kind, found in zip(kinds, tokens.view(-1, draws), strict=True):
            temperature, k, p = kind
            expected = reference(logits, temperature, k or V, p or 1.0)
            frequencies = found.bincount(minlength=V).cpu() / draws
            torch.testing.assert_close(frequencies.double(), expected, atol=1.01 / draws, rtol=0)
            chances, places, _ = of_generate.distribution(rows[:1], *kind)
            if places is not None:
                chances = torch.zeros_like(rows[:1]).scatter(1, places, chances)
            chances = chances[0].double().cpu()
            torch.testing.assert_close(chances / chances.sum(), expected, atol=1e-6, rtol=1e-5)
            assert torch.equal(chances > 0, expected > 0)
            noise = torch.ones(draws, min(k or V, V), device=device).exponential_()
            alike, _ = of_generate.choose(rows[:draws], noise, *kind)
            assert (expected[alike.cpu()] > 0).all()


def test_the_largest_logit_tells_what_is_not_finite(device):
    inf, nan = torch.inf, torch.nan
    rows = [[0.0, 1, -inf, 2], [0, nan, 1, 2], [0, inf, 1, 2], [-inf] * 4, [-inf, nan, inf, 0]]
    logits = torch.tensor(rows, device=device)
    options = [torch.full((5,), x, device=device) for x in (0.5, 1.0)]
    filters = [torch.full((5,), 3, device=device), torch.full((5,), 0.9, device=device)]
    noise = torch.ones(5, 4, device=device)
    for tokens, largest in (
        choose(logits, *options),
        choose(logits, *options, *filters),
        of_generate.choose(logits, None, 1.0),
        of_generate.choose(logits, noise, 1.0),
        of_generate.choose(logits, noise[:, :3], 1.0, 3, 0.9),
        of_generate.choose(logits, noise, 1.0, None, 0.9),
    ):
        assert largest.isfinite().tolist() == [True, False, False, False, False]
        assert tokens.min() >= 0 and tokens.max() < 4
