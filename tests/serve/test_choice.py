"""How an engine draws tokens."""

import torch

from gla_ext.decode import Sampling
from gla_ext.serve.choice import choose


def test_tokens_are_drawn_from_the_distribution(device):
    torch.manual_seed(0)
    logits = torch.randn(1, 9, device=device) * 2
    uniform = (torch.arange(4000, device=device) + 0.5) / 4000

    def frequencies(temperature, top_k=None, top_p=None):
        B, options = len(uniform), {}
        if top_k or top_p:
            options["top_k"] = torch.full((B,), top_k or 9, device=device)
            options["top_p"] = torch.full((B,), top_p or 1.0, device=device)
        warm = torch.full((B,), temperature, device=device)
        tokens = choose(logits.expand(B, 9).contiguous(), uniform, warm, **options)
        return tokens.bincount(minlength=9) / B

    p = (logits[0] / 0.8).softmax(0)
    torch.testing.assert_close(frequencies(0.8), p, atol=1e-3, rtol=0)
    torch.testing.assert_close(frequencies(0.8, top_k=9), p, atol=1e-3, rtol=0)
    kept = torch.where(p >= p.topk(3).values[-1], p, 0)
    torch.testing.assert_close(frequencies(0.8, top_k=3), kept / kept.sum(), atol=1e-3, rtol=0)
    ordered, places = p.sort(descending=True)
    stays = ordered.cumsum(0) - ordered < 0.8
    nucleus = torch.zeros_like(p).scatter(0, places, ordered * stays)
    expected = nucleus / nucleus.sum()
    torch.testing.assert_close(frequencies(0.8, top_p=0.8), expected, atol=1e-3, rtol=0)
    assert frequencies(0.0)[logits.argmax()] == 1
    assert frequencies(1e-30)[logits.argmax()] == 1
    huge = Sampling(temperature=float("inf")).divisor
    uniform_p = torch.full((9,), 1 / 9, device=device)
    torch.testing.assert_close(frequencies(huge), uniform_p, atol=1e-3, rtol=0)
