"""The shell blocks of the pages: two commands run, and of every command, in the prose too, make's
targets and variables, modules and files are there."""

import re
import shlex
import sys

import pytest
from source_tree import ROOT, run

PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "examples" / "README.md",
    *sorted((ROOT / ".github").glob("*.md")),
]
BLOCK = re.compile(r"^```(?:sh|bash)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OTHER_BLOCK = re.compile(r"^```(?!sh$|bash$)\w+\n.*?^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:[A-Z_]+=\S+ )*(?:make|python) [^`]*)`")
MAKEFILE = (ROOT / "Makefile").read_text().replace("\\\n", " ")
TARGETS = re.search(r"^\.PHONY:(.*)$", MAKEFILE, re.MULTILINE)[1].split()
VARIABLES = re.findall(r"^(\w+) \?=", MAKEFILE, re.MULTILINE)


def commands() -> set[str]:
    """Every command of the shell blocks and of the prose, without comments."""
    found = set()
    for page in PAGES:
        text = page.read_text()
        found.update(INLINE.findall(BLOCK.sub("", text)))
        for block in BLOCK.findall(OTHER_BLOCK.sub("", text)):
            for line in block.splitlines():
                found.update(part.strip() for part in line.split("  #")[0].split("&&"))
    return found - {""}


@pytest.mark.slow
@pytest.mark.parametrize("program", ["experiments.report", "gla_ext.info"])
def test_a_command_runs(program, tmp_path):
    """`python -m gla_ext.selftest` does in test_selftest.py."""
    assert any(command.startswith(f"python -m {program}") for command in commands())
    result = run(
        sys.executable, "-m", program, cwd=tmp_path, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1"
    )
    assert result.returncode == 0, result.stderr


def missing(command: str) -> list[str]:
    """What a command names and the tree does not have."""
    words = shlex.split(command)
    while re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    program, *arguments = words
    if program == "make":
        pairs = [word.partition("=") for word in arguments]
        return [name for name, sets, _ in pairs if name not in (VARIABLES if sets else TARGETS)]
    files = []
    if program == "python" and arguments[0] == "-m":
        module = arguments[1].replace(".", "/")
        if module not in ("pip", "torch/distributed/run"):
            package = (ROOT / module).is_dir()
            files = [f"{module}/__main__.py" if package else f"{module}.py"]
        files += [word for word in arguments[2:] if word.endswith(".py")]
    elif program == "python":
        files = arguments[:1]
    elif program == "cmake" and "-S" in arguments:
        files = [f"{arguments[arguments.index('-S') + 1]}/CMakeLists.txt"]
    return [file for file in files if not (ROOT / file).is_file()]


def test_what_a_command_names_is_there():
    found = commands()
    assert len(found) > 40
    assert {command: missing(command) for command in found if missing(command)} == {}
