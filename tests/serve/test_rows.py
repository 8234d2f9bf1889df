"""The engine and the layers' memory: it goes by `RowCache` alone."""

import contextlib
import types
from collections import Counter

import pytest
import torch
from engines import SMALL, greedy, is_empty, prompt, run
from models import make_model

from gla_ext.ops import batch_invariant
from gla_ext.serve import Engine, Limits, Request, batch
from gla_ext.serve.rows import RowCache, StateRows

NAMES = [name for name in vars(RowCache) if not name.startswith("_")]


@pytest.fixture
def calls(monkeypatch):
    """What is called of a memory that has what `RowCache` names and nothing else."""
    calls = []

    def rows(*args):
        inner = StateRows(*args)

        def recorded(name):
            def call(*args):
                calls.append((name, *args))
                return getattr(inner, name)(*args)

            return call

        return types.SimpleNamespace(**{name: recorded(name) for name in NAMES})

    monkeypatch.setattr(batch, "StateRows", rows)
    return calls


CASES = [({}, False), ({}, True), ({"use_short_conv": True}, False)]
CASES += [({"attn_mode": "fused_recurrent"}, False)]


@pytest.mark.parametrize(("options", "invariant"), CASES)
def test_the_interface_is_enough(calls, options, invariant):
    """Each sequence begins in its row, which is dropped once; checkpoints are in other rows."""
    model = make_model(torch.float64, eos_token_id=None, **options)
    prompts = [prompt(n) for n in (70, 1, 140, 64)]
    with batch_invariant() if invariant else contextlib.nullcontext():
        engine = Engine(model, limits=Limits(**SMALL, cache_bytes=1 << 20))
        expected = [(greedy(model, p, 3), "", "length") for p in prompts]
        for _ in range(2):
            assert run(engine, *(Request(p, 3, temperature=0) for p in prompts)) == expected
    (left,) = engine.submit(Request(prompt(200), 50))
    engine.step()
    engine.cancel(left)
    engine.step()
    assert is_empty(engine)
    assert engine.metrics.count("cached_prompt_tokens_total") > 0
    dropped = Counter(row for name, row, *_ in calls if name == "drop")
    assert dropped.total() == 2 * len(prompts) + 1
    assert set(dropped) == set(range(SMALL["rows"]))
    kept = {row for name, *rest in calls if name == "keep" for row in rest[1:]}
    for name, *rest in calls:
        if name == "read":
            assert set(rest[0].rows.tolist()) <= set(dropped)
            kept |= set(rest[0].checkpoints.tolist()) - {-1}
    assert kept and kept.isdisjoint(dropped)
