"""How far decoding drifts on states in 16 bits, as the page on numerics says; where they stop."""

import pytest
import torch
from torch.nn.functional import logsigmoid

from gla_ext import chunk_gla_, recurrent_gla_step_

TOKENS = 300
GATES = {  # by how long a state remembers: gates of normal numbers, and a mean of keys and values
    "20 tokens": (lambda x: logsigmoid(x) / 16, 0),
    "500 tokens": (lambda x: logsigmoid(x + 4) / 16, 0),
    "100,000 tokens": (lambda x: torch.full_like(x, -1e-5), 0),
    "all tokens": (torch.zeros_like, 0),
    "all tokens, which push one way": (torch.zeros_like, 1),
}


def decode(tokens, state):
    """The outputs of tokens, one a call."""
    calls = zip(*(t.split(1, dim=1) for t in tokens), strict=True)
    return torch.cat([recurrent_gla_step_(*x, state=state) for x in calls], 1)


@pytest.mark.parametrize(("make", "mean"), GATES.values(), ids=GATES)
def test_drift(make, mean):
    """Errors are of the order that the page has after 100 and 1,000 tokens."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, gk = (torch.randn(4, TOKENS, 2, 64, generator=generator) for _ in range(4))
    tokens = [t.bfloat16().float() for t in (q, k + mean, v + mean)] + [make(gk)]
    truth = decode([t.double() for t in tokens], torch.zeros(4, 2, 64, 64, dtype=torch.float64))
    errors = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        wrong = decode(tokens, torch.zeros(4, 2, 64, 64, dtype=dtype)) - truth
        errors.append([(wrong[:, n].norm() / truth[:, n].norm()).item() for n in (100, -1)])
    for fp32, bf16, fp16 in zip(*errors, strict=True):
        assert 0 < fp32 < 2e-5
        assert 3e-4 < fp16 < 6e-3
        assert 2e-3 < bf16 < 5e-2
        assert 3 < bf16 / fp16 < 16  # three bits fewer


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 256), (torch.float16, 2048)])
def test_where_a_state_stops(device, dtype, most):
    """Without gates each token adds 1 to an element, until the sum is 256 in bf16 or 2,048 in fp16.
    There the next 1 is rounded away. The tokens of one call are rounded once, at its end.
    """
    one = torch.ones(1, 1, 1, 1, device=device)
    pool = torch.full_like(one, most - 3).to(dtype)
    values = []
    for _ in range(6):
        recurrent_gla_step_(one, one, one, state=pool)
        values.append(pool.item())
    assert values == [most - 2, most - 1, most, most, most, most]
    tokens = one.expand(1, 64, 1, 1)
    chunk_gla_(tokens, tokens, tokens, None, state=pool)
    assert pool.item() == most + 64
