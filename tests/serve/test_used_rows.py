"""A sequence that starts finds nothing of its row's last owner, with a prompt of one token too."""

import pytest
import torch
from engines import SMALL, deltas, is_empty, prompt
from models import make_model

from gla_ext.ops import batch_invariant
from gla_ext.serve import Engine, Limits, Request

GROUPS = {  # lengths of prompts that come together, and of one that has come before
    "one": ([1], None),
    "packed": ([1, 1, 1], None),
    "beside longer ones": ([1, 70, 1], None),
    "one token after a known beginning": ([129, 1], 129),
}
LIMITS = Limits(**SMALL, cache_bytes=1 << 20)
OPTIONS = {
    "plain": {},
    "convolutions": {"use_short_conv": True},
    "convolutions, recurrent": {"use_short_conv": True, "attn_mode": "fused_recurrent"},
}


def logprobs(engine, lengths) -> list[list[tuple[int, float]]]:
    """Greedy tokens of prompts that come together, and their log-probabilities."""
    requests = [
        Request(prompt(n, n + i), 6, temperature=0, logprobs=0) for i, n in enumerate(lengths)
    ]
    found = {sequence: [] for sequence in engine.submit(*requests)}
    for sequence, delta in deltas(engine):
        found[sequence] += [(x.token, x.logprob) for x in delta.logprobs]
    return list(found.values())


def leave(engine):
    """Every row had an owner that ended, one cancelled while it decoded, and one cancelled in its
    prompt. NaN now stands where their states were.
    """
    logprobs(engine, [40, 1, 100])
    for count, steps in ((64, 4), (500, 1)):
        owners = engine.submit(*(Request(prompt(count, n), 50) for n in range(SMALL["rows"])))
        for _ in range(steps):
            engine.step()
        assert engine.running == SMALL["rows"]
        for owner in owners:
            engine.cancel(owner)
        engine.step()
    assert is_empty(engine)
    for x in engine._batch.cache._cache.tensors():
        x[: SMALL["rows"]] = torch.nan


def assert_same(used, fresh, lengths):
    for ours, theirs in zip(logprobs(used, lengths), logprobs(fresh, lengths), strict=True):
        assert [token for token, _ in ours] == [token for token, _ in theirs]
        ours, theirs = (torch.tensor([x for _, x in pairs]) for pairs in (ours, theirs))
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


# Groups, options, batch_invariant and the dtype of states.
CASES = [(group, options, False, None) for group in GROUPS for options in OPTIONS]
CASES += [
    ("one", "plain", True, torch.bfloat16),
    ("packed", "convolutions, recurrent", False, torch.bfloat16),
    ("beside longer ones", "convolutions", True, None),
    ("one token after a known beginning", "convolutions", True, torch.bfloat16),
]


@pytest.mark.parametrize(("group", "options", "invariant", "state_dtype"), CASES)
def test_a_used_row(group, options, invariant, state_dtype, device):
    lengths, known = GROUPS[group]
    model = make_model(torch.float32, eos_token_id=None, **OPTIONS[options]).to(device)
    with batch_invariant(invariant):
        used, fresh = (Engine(model, None, LIMITS, False, state_dtype) for _ in range(2))
    if known is not None:
        logprobs(used, [known])
        logprobs(fresh, [known])
    leave(used)
    cached = used.metrics.count("cached_prompt_tokens_total")
    assert_same(used, fresh, lengths)
    found = used.metrics.count("cached_prompt_tokens_total") - cached
    assert found == (0 if known is None else 128)


@pytest.mark.cuda
@pytest.mark.parametrize("lengths", [[1], [1, 1, 1]], ids=str)
@pytest.mark.parametrize("use_short_conv", [False, True])
@pytest.mark.parametrize("graphs", [False, True])
def test_by_the_kernels_of_a_token(lengths, use_short_conv, graphs):
    """In bf16 a prompt of one token alone takes these kernels; in graphs it is filled up."""
    options = {"hidden_size": 64, "intermediate_size": 64, "use_short_conv": use_short_conv}
    model = make_model(torch.bfloat16, eos_token_id=None, **options).cuda()
    used, fresh = (Engine(model, None, LIMITS, graphs) for _ in range(2))
    used.warm_up()
    fresh.warm_up()
    leave(used)
    assert_same(used, fresh, lengths)
