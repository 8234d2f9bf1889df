"""What `benchmarks/check_gpu.py` times is checked before; this needs no GPU."""

import dataclasses

import pytest
import torch
from large import large_inputs
from parts import bench_operators
from shared import bench_cases, gate, inputs


def few_rows(row):
    """The same row with few rows of its leaves, and few tokens of its sequences."""
    first, *rest = row.sizes[0]
    few = (3, 40, *rest[1:]) if len(rest) == 2 else (64, *rest)
    sizes = (few if x == row.sizes[0] else (64, *x[1:]) if x[0] == first else x for x in row.sizes)
    return dataclasses.replace(row, sizes=tuple(sizes))


@pytest.mark.parametrize("name", bench_operators.rows())
def test_operators_are_checked(name, monkeypatch):
    monkeypatch.setattr(bench_operators, "CHECKED", 2**12)
    row = few_rows(bench_operators.rows()[name])
    leaves = row.draw("cpu")
    bench_operators.check(name, row, {"gla_ext": row.ours, "torch": row.plain}, leaves)

    def wrong(*leaves):
        return tuple(1.1 * y for y in bench_operators.outputs(row.ours, leaves))

    with pytest.raises(gate.WrongResults, match="wrong: output 0 is off by"):
        bench_operators.check(name, row, {"wrong": wrong}, leaves)


def test_one_gate_a_head_is_checked(monkeypatch):
    """Against the same gate spread over the channels."""
    case = bench_cases.OTHERS["8x2048x16x128x128, one gate a head"]
    small = dataclasses.replace(case, B=2, T=70, H=2, K=16, V=24)
    monkeypatch.setattr(
        bench_cases.bench,
        "draw",
        lambda shape, gate, lengths: large_inputs(*shape, gate=gate, lengths=lengths, device="cpu"),
    )
    x = small.draw()
    assert x.g.shape == (2, 70, 2) and x.g.dtype == torch.float32
    assert gate.check_inputs(x, "here") == []
    ours = inputs.ours
    monkeypatch.setattr(inputs, "ours", lambda x: ours(x) | {"dg": 2 * ours(x)["dg"]})
    assert all("dg is off by" in line for line in gate.check_inputs(x, "here"))
