"""The comparison of builds, without a GPU."""

import argparse
import sys

import bench_builds
import pytest

SHAPE = "2x64x1x8x8"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "gla_ext").mkdir()
    (tmp_path / "gla_ext" / "_C.cpython-312-x86_64-linux-gnu.so").touch()
    return tmp_path


@pytest.mark.parametrize(
    "rest, environment", [("", {}), (",A=1", {"A": "1"}), (",A=b=c,B=", {"A": "b=c", "B": ""})]
)
def test_builds(folder, rest, environment):
    build = bench_builds.parse_build(f"new={folder}{rest}")
    assert build == bench_builds.Build("new", folder, environment)


@pytest.mark.parametrize(
    "text", ["", "new", "=x", "new=", "new={},A", "new={},=1", "new={}/gla_ext"]
)
def test_what_is_no_build(folder, text):
    with pytest.raises(argparse.ArgumentTypeError, match="expected "):
        bench_builds.parse_build(text.format(folder))


def test_builds_take_turns(folder, monkeypatch, capsys):
    turns = []

    def measure_apart(build, shapes, gates):
        assert (shapes, gates) == ([SHAPE], 0.25)
        turns.append((build.name, build.environment))
        return {SHAPE: (2.0, 8.0) if build.environment else (len(turns), 16.0)}

    monkeypatch.setattr(bench_builds, "measure_apart", measure_apart)
    options = ["--shapes", SHAPE, "--gates", "0.25", "--rounds", "3"]
    monkeypatch.setattr(sys, "argv", ["", f"new={folder}", f"old={folder},A=1", *options])
    bench_builds.main()
    assert turns == [("new", {}), ("old", {"A": "1"})] * 3
    assert capsys.readouterr().out.splitlines()[1:] == [
        f"## {SHAPE}",
        "",
        "| build | of the first | ms in each round |",
        "|---|--:|---|",
        "| new | 1.000 / 1.000 | 1.0000 / 16.0000, 3.0000 / 16.0000, 5.0000 / 16.0000 |",
        "| old | 0.667 / 0.500 | 2.0000 / 8.0000, 2.0000 / 8.0000, 2.0000 / 8.0000 |",
    ]


@pytest.mark.parametrize("builds", [[], ["a", "a"]])
def test_builds_have_names_of_their_own(folder, monkeypatch, capsys, builds):
    monkeypatch.setattr(sys, "argv", ["", *(f"{name}={folder}" for name in builds)])
    with pytest.raises(SystemExit):
        bench_builds.main()
    assert "expected builds of different names" in capsys.readouterr().err


def test_a_process_that_fails_ends_it(folder):
    """Here for want of an extension that loads."""
    build = bench_builds.Build("new", folder, {})
    with pytest.raises(SystemExit, match="new: exit code 1"):
        bench_builds.measure_apart(build, [SHAPE], 16)
