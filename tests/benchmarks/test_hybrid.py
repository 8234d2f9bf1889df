"""`benchmarks/bench_hybrid.py` at tiny sizes; this needs no GPU."""

import gc

import bench_hybrid
import pytest
import torch
from models import TINY
from parts import bench_model
from shared.gate import WrongResults

SIZES = bench_hybrid.Sizes(
    TINY | {"hidden_size": 64, "num_hidden_layers": 7},
    lengths=(16, 32),
    tokens=32,
    prompts=(5, 260),
    steps=2,
    samples=2,
    checked=40,
)


@pytest.fixture
def no_cuda(monkeypatch):
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2**30)
    monkeypatch.setattr(gc, "collect", lambda: 0)  # slow among the objects of other tests
    monkeypatch.setattr(bench_model, "WARMUP", 1)
    monkeypatch.setattr(bench_model, "STEPS", 2)
    monkeypatch.setattr(bench_hybrid, "WINDOW", 16)
    monkeypatch.setattr(bench_hybrid, "HEADS", 4)


def test_rows(no_cuda):
    rows = bench_hybrid.measure(SIZES, "cpu", None)
    assert list(rows) == ["GLA", "hybrid, window 16", "hybrid, all tokens", "Transformer"]
    assert all(len(set(row)) == 1 + 2 * 2 + 2 * 3 for row in rows.values())
    states = {name: float(row["260: MiB of states"]) for name, row in rows.items()}
    assert rows["GLA"]["5: MiB of states"] == rows["GLA"]["260: MiB of states"]
    assert states["Transformer"] > states["hybrid, all tokens"]
    lines = bench_hybrid.table(rows).splitlines()
    assert len(lines) == 6
    assert len({line.count("|") for line in lines}) == 1


def test_which_blocks_have_attention():
    kinds = bench_hybrid.kinds(bench_hybrid.SIZES)
    assert kinds["hybrid, all tokens"]["attn"]["layers"] == [5, 11, 17, 23]
    assert kinds["Transformer"]["attn"]["layers"] == list(range(24))
    assert bench_hybrid.few_layers(kinds["hybrid, all tokens"])["attn"]["layers"] == [1]


def test_wrong_results_are_not_timed(no_cuda, monkeypatch):
    from gla_ext.layers import attention

    monkeypatch.setattr(attention, "attend_last", lambda q, k, v, lengths: q)
    with pytest.raises(WrongResults, match="decoding, hybrid, window 16: logits is off"):
        bench_hybrid.measure(SIZES, "cpu", None)
