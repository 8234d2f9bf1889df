"""`benchmarks/bench_decode.py` at tiny sizes; this needs no GPU."""

import bench_decode
import pytest
import torch
from models import TINY
from shared.gate import WrongResults

from gla_ext.model import step
from gla_ext.ops import decode

SIZES = bench_decode.Sizes(TINY | {"hidden_size": 64}, prompt=5, steps=2, samples=2)


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(step, "DEVICES", ("cpu",))
    monkeypatch.setattr(bench_decode, "CHECKED_BATCHES", (1, 3))


@pytest.mark.usefixtures("on_cpu")
def test_both_ways_are_checked(capsys):
    bench_decode.check(SIZES, "cpu")
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"{name}, B {B}: logits and tokens agree" for B in (1, 3) for name in bench_decode.WAYS
    ]


@pytest.mark.usefixtures("on_cpu")
def test_a_wrong_kernel_is_seen(monkeypatch):
    right = decode.linear_residual
    monkeypatch.setattr(decode, "linear_residual", lambda *args: right(*args) * 1.3)
    with pytest.raises(WrongResults, match="decoding with gla_ext, B 1, T 5: logits is off"):
        bench_decode.check(SIZES, "cpu")


def test_limit():
    model = bench_decode.build(SIZES.model, "cpu")
    ours = bench_decode.Ours(model, 2)
    ours.first(torch.zeros(2, 5, dtype=torch.long))
    states = 2 * 2 * 2 * 16 * 32 * 4  # rows, layers, heads of K x V
    parameters = sum(p.numel() for p in model.parameters()) - 31 * 64
    assert bench_decode.limit_seconds(model, ours, 10.0) == (2 * parameters + 2 * states) / 10
