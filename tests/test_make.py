"""make, and the check of the machine that goes before it."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from source_tree import ROOT, copy_tree, run

FAKE_PYTHON = """#!/bin/sh
echo "$*" >> {log}
case "$*" in
  *"-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
  *version_info*) exit {too_old} ;;
  *ensurepip*) exit {no_venv} ;;
  *sys.executable*) echo "$0" ;;
  *get_path*) echo {include} ;;
esac
"""


def fake_tools(folder: Path, *, too_old=0, no_venv=0, no_headers=False, no_compiler=0) -> str:
    """A PATH whose python3.13 does not run, as pyenv's shims may not, and whose python3 does."""
    bin_folder = folder / "bin"
    bin_folder.mkdir(parents=True)
    (folder / "Python.h").touch()
    include = folder / "nowhere" if no_headers else folder
    log = folder / "python.log"
    python = FAKE_PYTHON.format(log=log, too_old=too_old, no_venv=no_venv, include=include)
    scripts = {
        "python3.13": "#!/bin/sh\nexit 127\n",
        "python3": python,
        "c++": f"#!/bin/sh\nexit {no_compiler}\n",
    }
    for name, text in scripts.items():
        (bin_folder / name).write_text(text)
        (bin_folder / name).chmod(0o755)
    return str(bin_folder)


def preflight(path: str, *arguments: str) -> subprocess.CompletedProcess:
    return run("/bin/sh", str(ROOT / ".ci" / "preflight"), *arguments, PATH=path, CXX="c++")


def test_preflight_takes_the_first_python_that_runs(tmp_path):
    path = fake_tools(tmp_path)
    result = preflight(path)
    assert result.stdout == f"{path}/python3\n", result.stderr
    assert preflight(path, "python3").returncode == 0


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        ({"too_old": 1}, "Python 3.11 or newer is missing (Debian package: python3)."),
        ({"no_venv": 1}, "venv module is missing for .* (Debian package: python3-venv)."),
        ({"no_headers": True}, "C headers are missing for .* (Debian package: python3-dev)."),
        ({"no_compiler": 1}, "A C++ compiler is missing: .* (Debian package: g++)."),
    ],
)
def test_preflight_names_what_is_missing(tmp_path, missing, sentence):
    result = preflight(fake_tools(tmp_path, **missing))
    start, _, end = sentence.partition(".*")
    assert result.returncode == 1
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert start in result.stderr
    assert end in result.stderr


def test_preflight_names_a_python_that_was_asked_for(tmp_path):
    result = preflight(fake_tools(tmp_path), "python3.13")
    assert "PYTHON=python3.13 is not a working Python 3.11 or newer" in result.stderr


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


@needs_make
def test_make_stops_with_the_sentence(tmp_path):
    copy_tree(tmp_path, "Makefile", ".ci", "pyproject.toml", "csrc", "tests/cpp", "examples")
    result = run("make", "build", "PYTHON=/nowhere/python", cwd=tmp_path)
    assert result.returncode != 0
    assert "PYTHON=/nowhere/python is not a working Python 3.11 or newer" in result.stderr


@needs_make
def test_make_builds_once_and_again_for_another_torch_or_python(tmp_path):
    names = ["Makefile", ".ci", "setup.py", "pyproject.toml", "csrc", "tests/cpp", "examples"]
    tree = copy_tree(tmp_path / "tree", *names)
    copy_tree(tree, "gla_ext/_version.py")
    path = f"{fake_tools(tmp_path)}:{os.environ['PATH']}"
    log = tmp_path / "python.log"

    def make(*arguments: str) -> str:
        """What the fake Python was called for, other than questions about itself."""
        log.write_text("")
        result = run("make", "build", "PYTHON=python3", *arguments, cwd=tree, PATH=path, CXX="c++")
        assert result.returncode == 0, result.stderr
        return "\n".join(line for line in log.read_text().splitlines() if line.startswith("-m "))

    first = make()
    assert "-m venv --clear .venv" in first
    assert "install torch==2.11.0 " in first
    assert "--editable ." in first
    assert make() == ""
    (tree / "csrc" / "ops.cpp").touch()
    assert make().count("install") == 1
    other = make("TORCH=torch>=2.15,<3")
    assert "-m venv" not in other
    assert "install torch>=2.15,<3 " in other
    assert "--editable ." in other
    assert make("TORCH=torch>=2.15,<3") == ""
    again = make(f"PYTHON={tmp_path}/bin/python3")
    assert "-m venv --clear .venv" in again
    assert "--editable ." in again


@needs_make
def test_make_docs_installs_neither_torch_nor_the_extension(tmp_path):
    tree = copy_tree(tmp_path / "tree", "Makefile", ".ci", "pyproject.toml", "csrc", "tests/cpp")
    path = f"{fake_tools(tmp_path)}:{os.environ['PATH']}"
    result = run("make", "docs", "PYTHON=python3", cwd=tree, PATH=path, CXX="c++")
    assert result.returncode == 0, result.stderr
    log = (tmp_path / "python.log").read_text()
    assert log.count(" install ") == log.count("-r .venv/docs.txt") == 1
    assert log.splitlines()[-1] == "-m mkdocs build --quiet --strict"
