"""The layer as an AOTInductor package, from Python and from a C++ program without Python.

Both are those of examples/: `aot_inductor.py` and `run_package.cpp`.
"""

import shlex
from pathlib import Path

import pytest
import torch
from common import assert_close
from models import EVERY, make_layer
from source_tree import ROOT, load_module, run

from gla_ext.model import GLAMLP

RUNNER = ROOT / "build" / "run_package"
if not RUNNER.exists():
    WHY_NOT = "make ctest builds build/run_package"
elif RUNNER.stat().st_mtime < Path(torch.__file__).stat().st_mtime:
    WHY_NOT = "build/run_package was built before this torch came: make ctest"
else:
    WHY_NOT = ""

aot_inductor = load_module("examples/aot_inductor.py")


class Block(aot_inductor.Segment):
    """The layer, and on its output an MLP: each operator is in the one package that is compiled."""

    def __init__(self, layer):
        super().__init__(layer)
        self.mlp = GLAMLP(layer.hidden_size, 16)

    def forward(self, x, mask, state, *conv_state):
        y, *states = super().forward(x, mask, state, *conv_state)
        return self.mlp(y), *states


@pytest.fixture(scope="module")
def segment():
    return Block(make_layer(torch.float32, layer_idx=0, **EVERY)).eval()


@pytest.fixture(scope="module")
def package(segment, tmp_path_factory):
    return aot_inductor.package(segment, tmp_path_factory.mktemp("package") / "layer.pt2")


@pytest.fixture
def cases(segment):
    return aot_inductor.make_cases(segment)


def assert_same_results(function, cases):
    for case in cases:
        for got, wanted in zip(function(*case["inputs"]), case["expected"], strict=True):
            assert_close(got, wanted, case["bound"])


@pytest.mark.slow
def test_from_python(package, cases):
    assert_same_results(torch._inductor.aoti_load_package(package), cases)


@pytest.mark.slow
@pytest.mark.skipif(WHY_NOT != "", reason=WHY_NOT)
def test_from_cpp(package, cases, tmp_path):
    def results():
        torch.save(cases, tmp_path / "cases.pt")
        # As the command that the example prints.
        path = {"LD_LIBRARY_PATH": str(aot_inductor.LIBRARIES)}
        return run(str(RUNNER), package, str(tmp_path / "cases.pt"), **path)

    result = results()
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines().count("ok") == len(cases)
    cases[1]["expected"][0][0, 5] += 1  # and it does compare
    result = results()
    assert result.returncode == 1
    assert result.stdout.splitlines().count("FAILED") == 1


@pytest.mark.parametrize("options", [[], ["--short-conv"]], ids=["default", "short-conv"])
def test_what_the_example_writes(options, tmp_path, monkeypatch, capsys):
    """Up to inductor, which the tests above wait for once."""
    programs = []

    def keep(program, package_path):
        programs.append(program)
        return package_path

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", keep)
    aot_inductor.main([str(tmp_path), "--hidden-size", "24", "--heads", "3", *options])
    (exported,) = programs
    cases = torch.load(tmp_path / "cases.pt")
    assert [len(case["inputs"]) for case in cases] == 3 * [6 if options else 3]
    assert_same_results(exported.module(), cases)
    environment, *command = shlex.split(capsys.readouterr().out)
    assert environment == f"LD_LIBRARY_PATH={aot_inductor.LIBRARIES}"
    assert (aot_inductor.LIBRARIES / "libtorch.so").exists()
    names = ["build/run_package", str(tmp_path / "layer.pt2"), str(tmp_path / "cases.pt")]
    assert command == names
