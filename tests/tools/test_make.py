"""make, and the check of the machine that goes before it."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from source_tree import ROOT, copy_tree, run

FAKE_PYTHON = """#!/bin/sh
echo "$*" >> {log}
case "$*" in
  *"-m venv"*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  *version_info*) exit {too_old} ;;
  *ensurepip*) exit {no_venv} ;;
  *sys.executable*) echo "$0" ;;
  *get_path*) echo {include} ;;
  *pytest*) echo "$MKL_CBWR" "$ATEN_CPU_CAPABILITY" ;;
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


class Make:
    """make in a copy of the tree, with tools that only write down what they were called for."""

    def __init__(self, folder: Path):
        files = ["Makefile", "setup.py", "pyproject.toml", "gla_ext/_version.py"]
        folders = [".ci", "csrc", "examples", "tests/cpp", "tests/emulator"]
        self.tree = copy_tree(folder / "tree", *files, *folders)
        self.path = f"{fake_tools(folder)}:{os.environ['PATH']}"
        self.log = folder / "python.log"

    def run(self, *arguments: str) -> subprocess.CompletedProcess:
        self.log.write_text("")
        arguments = ("PYTHON=python3", *arguments)
        return run("make", *arguments, cwd=self.tree, PATH=self.path, CXX="c++")

    def __call__(self, *arguments: str) -> str:
        """What Python was called for, other than questions about itself."""
        result = self.run(*arguments)
        assert result.returncode == 0, result.stderr
        calls = self.log.read_text().splitlines()
        return "\n".join(call for call in calls if call.startswith("-m "))


@pytest.fixture
def make(tmp_path):
    return Make(tmp_path)


@needs_make
def test_make_builds_once_and_again_for_another_torch_or_python(make, tmp_path):
    first = make()
    assert "-m venv .venv" in first
    assert "install torch==2.11.0 " in first
    assert "--editable ." in first
    assert make() == ""
    (make.tree / "csrc" / "module.cpp").touch()
    assert make().count("install") == 1
    other = make("TORCH=torch>=2.15,<3")
    assert "-m venv" not in other
    assert "install torch>=2.15,<3 " in other
    assert "--editable ." in other
    assert make("TORCH=torch>=2.15,<3") == ""
    again = make(f"PYTHON={tmp_path}/bin/python3")
    assert "-m venv .venv" in again
    assert "--editable ." in again


@needs_make
def test_make_builds_again_after_another_environment_did(make):
    """There is one gla_ext/_C for all environments."""
    assert "--editable ." in make()
    assert "-m venv .venv-other" in make("VENV=.venv-other")
    assert make("VENV=.venv-other") == ""
    again = make()
    assert "--editable ." in again
    assert "install torch" not in again


@needs_make
@pytest.mark.parametrize("target", ["build", "docs", "lint"])
def test_make_refuses_an_environment_that_it_did_not_make(make, target):
    theirs = make.tree / ".venv" / "bin" / "python"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("the user's")
    result = make.run(target)
    assert result.returncode != 0
    assert "'make VENV=.venv-gla'" in result.stderr.splitlines()[0]
    assert make.log.read_text() == ""
    assert theirs.read_text() == "the user's"
    assert "-m venv .venv-gla" in make("build", "VENV=.venv-gla")
    assert theirs.read_text() == "the user's"


@needs_make
@pytest.mark.parametrize("stamp", [None, ".python-1234", ".python-unfinished"])
def test_make_takes_an_empty_folder_and_clears_its_own(make, stamp):
    """Also one of an earlier Makefile, and one in which it was interrupted."""
    folder = make.tree / ".venv"
    (folder / "lib").mkdir(parents=True)
    if stamp is None:
        (folder / "lib").rmdir()
    else:
        (folder / stamp).touch()
    assert "-m venv .venv" in make()
    assert not (folder / "lib").exists()
    assert [path.name for path in folder.glob(".python-*")] not in ([], [stamp])
    assert make() == ""


@needs_make
def test_make_train_on_one_process_and_on_several(make):
    for processes, program in (("", "python"), ("2", "torchrun --nproc-per-node 2")):
        arguments = ("train", f"NPROC={processes}", "TRAIN_ARGS=--steps 3")
        result = make.run("--dry-run", *arguments)
        assert f"\n.venv/bin/{program} -m gla_ext.train --steps 3\n" in result.stdout


@needs_make
def test_make_test_cpus_runs_the_tests_under_each_setting(make, monkeypatch):
    for name in ("MKL_CBWR", "ATEN_CPU_CAPABILITY"):
        monkeypatch.delenv(name, raising=False)
    make()
    lines = make.run("test-cpus", "PYTEST_ARGS=tests/layers").stdout.splitlines()
    settings = ["MKL_CBWR=COMPATIBLE", "ATEN_CPU_CAPABILITY=avx2", "ATEN_CPU_CAPABILITY=default"]
    assert lines[::2] == settings
    assert [line.split()[0] for line in lines[1::2]] == ["COMPATIBLE", "avx2", "default"]


@needs_make
def test_make_docs_installs_neither_torch_nor_the_extension(make):
    calls = make("docs")
    assert calls.count(" install ") == calls.count("-r .venv/docs.txt") == 1
    assert calls.splitlines()[-1] == "-m mkdocs build --quiet --strict"


@needs_make
def test_make_help_has_one_entry_for_every_target_and_variable():
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    targets = re.search(r"^\.PHONY:(.*)$", text, re.MULTILINE)[1].split()
    variables = [f"{name}=" for name in re.findall(r"^(\w+) \?=", text, re.MULTILINE)]
    result = run("make", "help")
    assert result.returncode == 0, result.stderr
    entries = re.findall(r"^(\S+) {2,}\S", result.stdout, re.MULTILINE)
    assert sorted(entries) == sorted([*targets, *variables])
