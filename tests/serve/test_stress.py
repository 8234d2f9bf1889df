"""Clients of mixed behaviour: benchmarks/stress_serve.py with few of them."""

import pytest

pytest.importorskip("uvicorn")


@pytest.mark.slow
def test_nobody_loses_tokens_and_nothing_is_left(tmp_path):
    from stress_serve import BEHAVIOURS, LEFT, stress

    report = stress(tmp_path / "model", 66)
    assert report.clients.wrong == []
    assert report.logged == 0
    assert sum(report.clients.done.values()) == 66
    assert len(report.clients.done) == len(set(BEHAVIOURS))
    assert len(report.clients.seconds) == 30
    assert {report.gauges[name] for name in LEFT} == {0.0}
    assert report.gauges["checkpoint_bytes"] <= 1 << 20
    assert report.memory[-1] - report.memory[0] < 64 << 20
    assert report.seconds < 30
