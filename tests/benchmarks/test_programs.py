"""The programs of benchmarks/: each starts, and what has to be right comes before what is timed."""

import argparse
import importlib
import json
import sys

import bench_builds
import check_gpu
import pytest
import torch
from shared import gate

PROGRAMS = ["check_gpu", "bench_fla", "bench_training", "bench_decode", "bench_serve"]
PROGRAMS += ["speed_history", "bench_scale", "bench_cpu", "bench_builds", "stress_serve"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_starts(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as stop:
        importlib.import_module(name).main()
    assert not stop.value.code
    shown = capsys.readouterr().out
    assert shown.startswith("usage: ")
    if name == "check_gpu":
        assert all(part in shown for part in check_gpu.PARTS)


NEED_A_GPU = ["bench_fla", "bench_training", "bench_decode", "bench_serve", "bench_naive"]
NEED_A_GPU += ["bench_vllm", "bench_builds", "bench_scale", "speed_history"]


@pytest.mark.parametrize("name", NEED_A_GPU)
def test_without_a_gpu_it_says_so(name, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.distributed, "is_torchelastic_launched", lambda: True)
    builds = [f"new={tmp_path}"] if name == "bench_builds" else []
    (tmp_path / "gla_ext").mkdir()
    (tmp_path / "gla_ext" / "_C.cpython-312-x86_64-linux-gnu.so").touch()
    monkeypatch.setattr(sys, "argv", [f"benchmarks/{name}.py", *builds])
    with pytest.raises(SystemExit, match=f"{name}.py: expected a CUDA GPU, found none"):
        importlib.import_module(name).main()


def test_a_benchmark_of_many_ranks_wants_its_launcher(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_scale.py"])
    with pytest.raises(SystemExit):
        importlib.import_module("bench_scale").main()
    assert "expected torch.distributed.run to start it" in capsys.readouterr().err


def test_builds(tmp_path):
    (tmp_path / "gla_ext").mkdir()
    (tmp_path / "gla_ext" / "_C.cpython-312-x86_64-linux-gnu.so").touch()
    for rest, environment in [("", {}), (",A=1", {"A": "1"}), (",A=b=c,B=", {"A": "b=c", "B": ""})]:
        build = bench_builds.parse_build(f"new={tmp_path}{rest}")
        assert build == bench_builds.Build("new", tmp_path, environment)
    for text in ["", "new", "=x", "new=", "new={},A", "new={},=1", "new={}/gla_ext"]:
        with pytest.raises(argparse.ArgumentTypeError, match="expected "):
            bench_builds.parse_build(text.format(tmp_path))


def test_wrong_results_raise():
    x = torch.arange(4.0)
    gate.require_close({"o": x}, {"o": x}, 0.01, "layer")
    for wrong in (x + 1, torch.full_like(x, torch.nan)):
        with pytest.raises(gate.WrongResults, match="layer: o is off by"):
            gate.require_close({"o": wrong}, {"o": x}, 0.01, "layer")


def test_a_run_with_wrong_results_is_not_shown(tmp_path, monkeypatch, capsys):
    results = {"wrong": ["dq is off by 1.0e-01"], "environment": {}, "copy_bytes_per_s": 1e12}
    (tmp_path / "in.json").write_text(json.dumps(results | {"shapes": {}}))
    files = ["--read", str(tmp_path / "in.json"), "--markdown", str(tmp_path / "page.md")]
    monkeypatch.setattr(sys, "argv", ["check_gpu.py", *files])
    assert check_gpu.main() == 1
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == "dq is off by 1.0e-01"
    assert len(rest) == 1
    assert not (tmp_path / "page.md").exists()
