"""`benchmarks/speed_history.py` on calls that take as long as they say: needs no GPU, no clock."""

import itertools
import json
import sys
import time

import pytest
import speed_history
import torch
from shared.timing import Timing

import gla_ext

CARD = "NVIDIA H100 80GB HBM3"
MS = {"operator": 0.5, "step": 143.0}


@pytest.fixture
def calls(monkeypatch):
    """Calls that turn the clock on by their times, the third of five bursts by more."""
    now = [0.0]

    def call(ms):
        now[0] += 1e-3 * ms

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return {name: lambda ms=ms: call(ms) for name, ms in MS.items()}


def line(version, card=CARD, **ms):
    times = {name: Timing(x, 0.9 * x, 1.1 * x, 5) for name, x in (MS | ms).items()}
    return speed_history.entry(times, card) | {"version": version}


def test_times_are_of_one_call(calls):
    waits = []
    found = speed_history.sustained(calls, lambda: waits.append(1), seconds=1.0, rounds=5)
    assert {name: x.median for name, x in found.items()} == pytest.approx(MS)
    assert len(waits) == len(calls) * (2 + 1 + 5)  # to count, to warm up, and the rounds


def test_the_median_of_the_turns_counts(calls):
    turns = itertools.count()

    def disturbed():
        calls["operator"]()
        if next(turns) % 4000 < 1000:
            calls["operator"]()

    found = speed_history.sustained({"operator": disturbed}, lambda: None, seconds=0.5)
    assert found["operator"].median == pytest.approx(0.5)
    assert found["operator"].p80 > 0.5


def test_a_line_for_a_version_and_a_card(tmp_path):
    path = tmp_path / "history.jsonl"
    assert speed_history.read(path) == []
    lines = [line("0.2.0"), line("0.3.0", card="NVIDIA H200"), line("0.3.0"), line("0.3.0", step=1)]
    for x in lines:
        speed_history.add(path, x)
    assert speed_history.read(path) == [lines[0], lines[1], lines[3]]
    assert all(json.loads(x)["ms"] for x in path.read_text().splitlines())
    assert speed_history.before(lines, line("0.3.0")) == lines[0]
    assert speed_history.before(lines[2:], line("0.3.0")) == lines[3]
    assert speed_history.before(lines, line("0.4.0")) == lines[3]
    assert speed_history.before(lines, line("0.4.0", card="NVIDIA B200")) is None


@pytest.mark.parametrize(("ms", "slower"), [(145.0, False), (148.0, True), (100.0, False)])
def test_the_verdict(tmp_path, monkeypatch, capsys, ms, slower):
    times = {name: Timing(x, x, x, 5) for name, x in (MS | {"step": ms, "new": 1.0}).items()}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: CARD)
    monkeypatch.setattr(speed_history, "operator_calls", dict)
    monkeypatch.setattr(speed_history, "model_calls", dict)
    monkeypatch.setattr(speed_history, "sustained", lambda calls, wait: times)
    path = tmp_path / "history.jsonl"
    monkeypatch.setattr(sys, "argv", ["speed_history.py", "--add", "--history", str(path)])
    assert speed_history.main() == 0
    assert "no line of NVIDIA H100" in capsys.readouterr().out
    path.write_text(json.dumps(line("0.0.1")) + "\n")
    assert speed_history.main() == int(slower)
    *_, last = capsys.readouterr().out.splitlines()
    assert last == ("Over 3% slower: step." if slower else "None of 2 is over 3% slower.")
    assert [x["version"] for x in speed_history.read(path)] == ["0.0.1", gla_ext.__version__]


def test_wrong_results_are_not_timed(monkeypatch):
    def wrong():
        raise speed_history.gate.WrongResults("dq is off by 1.0e-01")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(speed_history, "operator_calls", wrong)
    monkeypatch.setattr(sys, "argv", ["speed_history.py"])
    with pytest.raises(SystemExit, match=r"dq is off by 1.0e-01\nWrong results: nothing is timed"):
        speed_history.main()
