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
esac
"""


def fake_tools(folder: Path, *, too_old=0, no_venv=0, include=None, no_compiler=0) -> str:
    """A PATH whose python3.13 does not run, as pyenv's shims may not, and whose python3 does."""
    tools = folder / "bin"
    tools.mkdir(parents=True)
    (folder / "Python.h").touch()
    answers = {"too_old": too_old, "no_venv": no_venv, "include": include or folder}
    for name, text in {
        "python3.13": "#!/bin/sh\nexit 127\n",
        "python3": FAKE_PYTHON.format(log=folder / "python.log", **answers),
        "c++": f"#!/bin/sh\nexit {no_compiler}\n",
    }.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    return str(tools)


def preflight(path: str, *arguments: str) -> subprocess.CompletedProcess:
    return run("/bin/sh", str(ROOT / ".ci" / "preflight"), *arguments, PATH=path, CXX="c++")


def test_preflight_takes_the_first_python_that_runs(tmp_path):
    path = fake_tools(tmp_path)
    result = preflight(path)
    assert result.stdout == f"{path}/python3\n", result.stderr
    assert preflight(path, "python3").returncode == 0


@pytest.mark.parametrize(
    ("missing", "asked", "sentence"),
    [
        ({"too_old": 1}, [], "^Python 3.11 or newer is missing .*package: python3"),
        ({"no_venv": 1}, [], "venv module is missing for .*package: python3-venv"),
        ({"include": "nowhere"}, [], "C headers are missing for .*package: python3-dev"),
        ({"no_compiler": 1}, [], r"^A C\+\+ compiler is missing: .*package: g\+\+"),
        ({}, ["python3.13"], "^PYTHON=python3.13 is not a working Python 3.11 or newer"),
    ],
)
def test_preflight_names_what_is_missing(tmp_path, missing, asked, sentence):
    result = preflight(fake_tools(tmp_path, **missing), *asked)
    assert result.returncode == 1
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert re.search(sentence, result.stderr), result.stderr


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
        unset = dict.fromkeys(("FORCE_CUDA", "TORCH_CUDA_ARCH_LIST", "GLA_EXT_CUDA_ARCHS"), "")
        return run("make", *arguments, cwd=self.tree, PATH=self.path, CXX="c++", **unset)

    def __call__(self, *arguments: str) -> str:
        """What Python was called for, other than questions about itself."""
        result = self.run(*arguments)
        assert result.returncode == 0, result.stderr
        calls = self.log.read_text().splitlines()
        return "\n".join(call for call in calls if call.startswith("-m "))


@pytest.fixture
def make(tmp_path):
    if shutil.which("make") is None:
        pytest.skip("needs make")
    return Make(tmp_path)


def test_make_builds_once_and_again_for_another_torch_python_or_environment(make, tmp_path):
    """There is one gla_ext/_C for all environments."""
    venv, torch, ours, other = "-m venv .venv", "install torch", "--editable .", "-m venv .venv-b"
    newer, again = "TORCH=torch>=2.15,<3", f"PYTHON={tmp_path}/bin/python3"
    for arguments, does in [
        ([], {venv, torch, ours}),
        ([], set()),
        (["touch"], {ours}),
        ([newer], {torch, ours}),
        ([newer], set()),
        ([again], {venv, torch, ours}),
        ([again, "VENV=.venv-b"], {venv, other, torch, ours}),
        ([again, "VENV=.venv-b"], set()),
        ([again], {ours}),
        (["FORCE_CUDA=1", again], {ours}),
        ([again], set()),  # as it was asked for
        (["PYTHON="], set()),  # the environment that is there
        (["FORCE_CUDA=0", again], {ours}),
    ]:
        if arguments == ["touch"]:
            (make.tree / "csrc" / "module.cpp").touch()
            arguments = []
        calls = make(*arguments)
        found = {what for what in (venv, torch, ours, other) if what in calls}
        assert found == does, (arguments, calls)
        assert (newer[6:] in calls) == (torch in does and newer in arguments)


def test_make_refuses_an_environment_that_it_did_not_make(make):
    theirs = make.tree / ".venv" / "bin" / "python"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("the user's")
    result = make.run("build")
    assert result.returncode != 0
    assert "'make VENV=.venv-gla'" in result.stderr.splitlines()[0]
    assert make.log.read_text() == ""
    assert "-m venv .venv-gla" in make("build", "VENV=.venv-gla")
    assert theirs.read_text() == "the user's"


@pytest.mark.parametrize("stamp", [None, ".python-unfinished"])
def test_make_takes_an_empty_folder_and_clears_its_own(make, stamp):
    """Also one in which it was interrupted."""
    folder = make.tree / ".venv"
    folder.mkdir()
    if stamp is not None:
        (folder / stamp).touch()
        (folder / "lib").mkdir()
    assert "-m venv .venv" in make()
    assert not (folder / "lib").exists()
    assert [path.name for path in folder.glob(".python-*")] not in ([], [stamp])
    assert make() == ""


def test_what_make_runs(make):
    """And it stops with the sentence of what is missing."""
    for arguments, line in [
        (("train", "TRAIN_ARGS=--steps 3"), "\n.venv/bin/python -m gla_ext.train --steps 3\n"),
        (("train", "NPROC=2"), "\n.venv/bin/torchrun --nproc-per-node 2 -m gla_ext.train \n"),
        (("wheel", "TORCH=torch>=2.12,<2.13"), " .ci/build_wheel.py 'torch>=2.12,<2.13'\n"),
    ]:
        assert line in make.run("--dry-run", *arguments).stdout
    minors = re.findall(r"torch==(2\.\d+)\.\d+ ", make.run("--dry-run", "wheels").stdout)
    assert minors == ["2.11", "2.12", "2.13", "2.14", "2.15"]
    calls = make("docs")
    assert calls.count(" install ") == calls.count("-r .venv/docs.txt") == 1
    assert calls.splitlines()[-1] == "-m mkdocs build --quiet --strict"
    result = make.run("build", "VENV=.venv-b", "PYTHON=/nowhere/python")
    assert result.returncode != 0
    assert "PYTHON=/nowhere/python is not a working Python 3.11 or newer" in result.stderr


def test_make_help_has_one_entry_for_every_target_and_variable():
    if shutil.which("make") is None:
        pytest.skip("needs make")
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    targets = re.search(r"^\.PHONY:(.*)$", text, re.MULTILINE)[1].split()
    variables = [f"{name}=" for name in re.findall(r"^(\w+) \?=", text, re.MULTILINE)]
    result = run("make", "help")
    assert result.returncode == 0, result.stderr
    entries = re.findall(r"^(\S+) {2,}\S", result.stdout, re.MULTILINE)
    assert sorted(entries) == sorted([*targets, *variables])
