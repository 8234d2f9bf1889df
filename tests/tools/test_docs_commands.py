"""The shell blocks of the pages: what can run does, and the rest names what is there.

A command that is not run is in NOT_RUN with the reason. Of each, make's targets and variables are
checked, its files, and check_gpu.py's options; of commands in the prose too, but for the options.
"""

import re
import shlex
import sys
from functools import cache

import pytest
from source_tree import ROOT, run

PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "examples" / "README.md",
]
BLOCK = re.compile(r"^```(?:sh|bash)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:[A-Z_]+=\S+ )*(?:make|python) [^`]*)`")

DOWNLOADS = "sets up an environment first, which downloads torch"
BUILDS = "compiles the extension"
NEEDS_GPU = "times kernels on a GPU"
NEEDS_TEXT = "needs the experiments' text, which the first of these packs from elsewhere"
TRAINS = "trains for minutes; tests/distributed runs it"

NOT_RUN = {
    "make train": DOWNLOADS,
    "make test": DOWNLOADS,
    "pip install --no-build-isolation -e .": BUILDS,
    "cmake -S . -B build": BUILDS,
    "cmake --build build": BUILDS,
    "cmake --install build --prefix build/prefix": "installs what was built",
    "cmake -S tests/cpp/consumer -B build/consumer -DCMAKE_PREFIX_PATH=$PWD/build/prefix": BUILDS,
    "cmake --build build/consumer": BUILDS,
    "build/consumer/consumer": "ctest builds and runs this program",
    "python benchmarks/check_gpu.py --only speed memory": NEEDS_GPU,
    "python benchmarks/check_gpu.py --only others gates": NEEDS_GPU,
    "python benchmarks/check_gpu.py --only attention": NEEDS_GPU,
    "python benchmarks/check_gpu.py --only layer operators --compile": NEEDS_GPU,
    "python benchmarks/check_gpu.py --only plot --markdown page.md": NEEDS_GPU,
    "python benchmarks/check_gpu.py --only generate recurrent": NEEDS_GPU,
    "python benchmarks/bench_serve.py": NEEDS_GPU,
    "python benchmarks/stress_serve.py": "takes a minute; tests/serve runs it with few clients",
    "pip install --no-build-isolation -e '.[serve]'": BUILDS,
    "python -m gla_ext.serve runs/example": "serves until a signal; tests/serve runs it",
    "python benchmarks/bench_training.py": NEEDS_GPU,
    "python benchmarks/bench_builds.py new=. old=../before": NEEDS_GPU,
    "python benchmarks/bench_training.py --builds now=. before=../before --profile "
    "--seconds 2 --rows eager autocast compiled": NEEDS_GPU,
    "python benchmarks/bench_training.py --builds now=. before=../before --seconds 2 --rows eager "
    '"eager 8" "linear loss 8" autocast "1.3 B"': NEEDS_GPU,
    'python benchmarks/bench_training.py --seconds 2 --rows eager "eager 8192" "eager 32768" '
    'compiled FLA "Transformer++ FA2" "1.3 B"': NEEDS_GPU,
    "TRITON_CACHE_DIR=cache python benchmarks/bench_fla.py": NEEDS_GPU,
    "torchrun --nproc-per-node 2 -m gla_ext.train --out runs/two": TRAINS,
    "make train NPROC=2": TRAINS,
    "torchrun --nproc-per-node 2 examples/train_distributed.py": TRAINS,
    "torchrun --nproc-per-node 2 examples/train_distributed.py --device cpu": TRAINS,
    "torchrun --nproc-per-node 2 examples/train_distributed.py --tensor-parallel 2": TRAINS,
    "python -m experiments.text --out runs/text --train-megabytes 150": NEEDS_TEXT,
    "pack=runs/text/text-small.tar.xz": NEEDS_TEXT,
    "python -m experiments.run --text $pack --list": NEEDS_TEXT,
    "python -m experiments.run --text $pack --minutes 25": NEEDS_TEXT,
}


def commands() -> list[str]:
    """Every command of the shell blocks, without comments, in the order of the pages."""
    found = []
    for page in PAGES:
        for block in BLOCK.findall(blocks_only(page.read_text())):
            for line in block.splitlines():
                parts = line.split("  #")[0].split("&&")
                found += [part.strip() for part in parts if part.strip()]
    assert found
    return list(dict.fromkeys(found))


def blocks_only(text: str) -> str:
    """The text without blocks of other languages, whose end looks like the start of a shell's."""
    return re.sub(r"^```(?!sh$|bash$)\w+\n.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


@cache
def options(program: str) -> str:
    result = run(sys.executable, *shlex.split(program), "--help", PYTHONPATH=str(ROOT))
    assert result.returncode == 0, result.stderr
    return result.stdout


COMMANDS = commands()
RUN = [command for command in COMMANDS if command not in NOT_RUN]


def test_what_is_not_run_is_in_the_pages():
    assert set(NOT_RUN) <= set(COMMANDS)
    assert all(NOT_RUN.values())


@pytest.mark.parametrize("command", RUN)
def test_a_command_runs(command, tmp_path):
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [sys.executable if word == "python" else word for word in shlex.split(command)]
    result = run(*words, cwd=tmp_path, **environment)
    assert result.returncode == 0, result.stderr


def words_of(command: str) -> list[str]:
    """A command's words after its settings of the environment."""
    words = shlex.split(command)
    while re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    return words


MAKEFILE = (ROOT / "Makefile").read_text().replace("\\\n", " ")
TARGETS = re.search(r"^\.PHONY:(.*)$", MAKEFILE, re.MULTILINE)[1].split()
VARIABLES = re.findall(r"^(\w+) \?=", MAKEFILE, re.MULTILINE)
PROSE = [x for page in PAGES for x in INLINE.findall(BLOCK.sub("", page.read_text()))]


@pytest.mark.parametrize("command", list(dict.fromkeys([*COMMANDS, *PROSE])))
def test_what_a_command_names_is_there(command):
    program, *arguments = words_of(command)
    if program == "make":
        for word in arguments:
            name, setting, _ = word.partition("=")
            assert name in (VARIABLES if setting else TARGETS), word
    elif program == "python" and arguments[0] == "-m":
        module = ROOT / arguments[1].replace(".", "/")
        there = module.with_suffix(".py").is_file() or (module / "__main__.py").is_file()
        assert there or arguments[1] in ("pip", "torch.distributed.run")
        for script in (word for word in arguments[2:] if word.endswith(".py")):
            assert (ROOT / script).is_file()
    elif program == "python":
        assert (ROOT / arguments[0]).is_file()
    elif program == "cmake" and "-S" in arguments:
        assert (ROOT / arguments[arguments.index("-S") + 1] / "CMakeLists.txt").is_file()


@pytest.mark.parametrize("command", [c for c in COMMANDS if "check_gpu.py" in c])
def test_the_options_of_check_gpu_are_there(command):
    arguments = words_of(command)[2:]
    text = options("benchmarks/check_gpu.py")
    for word in arguments:
        if word.startswith("--"):
            assert re.search(rf"{re.escape(word)}\b", text), word
    if "--only" in arguments:
        chosen = arguments[arguments.index("--only") + 1 :]
        for word in (x for x in chosen if not x.startswith("--") and not x.endswith(".md")):
            assert re.search(rf"\b{word}\b", text), word
