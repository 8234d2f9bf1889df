"""What was built: does it fit this torch, does it say what it is, does the stub tell the truth."""

import ast
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from common import run_python
from source_tree import ROOT, copy_tree, run

import gla_ext
from gla_ext import _C, _compat, info
from gla_ext._build_info import BUILD_INFO

REBUILD_HINT = "pip install --no-build-isolation -e ."

FITTING = {
    "torch_version": "2.11.0+cu130",
    "torch_cuda": "13.0",
    "python": "3.12",
    "machine": "x86_64",
}
BUILT = {"torch": "2.11.0+cu130", "cuda": "13.0", "python": "3.12", "machine": "x86_64"}


def test_nobody_is_sent_to_a_package_index():
    """gla_ext is on no index: a command that asks for it there would install somebody else's."""
    asks = re.compile(r"""pip install[^\n`]*[\s'"]gla[_-]ext(?![-./\w])|(?<![\w/])gla[_-]ext\[""")
    assert asks.search("pip install gla_ext") and asks.search("it needs `gla-ext[hf]`")
    files = [ROOT / "README.md"]
    for folder in ("benchmarks", "docs", "examples", "experiments", "gla_ext"):
        files += [x for x in (ROOT / folder).rglob("*") if x.suffix in (".md", ".py", ".toml")]
    assert [str(x) for x in files if asks.search(x.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, None),
        ({"torch_version": "2.11.3+cu130"}, None),
        ({"torch_version": "2.15.0+cu132"}, ["torch 2.11.0+cu130", "torch 2.15.0+cu132"]),
        ({"torch_version": "2.1.0"}, ["torch 2.11.0+cu130", "torch 2.1.0"]),
        ({"torch_cuda": "12.8"}, ["CUDA 13.0", "CUDA 12.8"]),
        ({"torch_cuda": None}, ["CUDA 13.0", "no CUDA"]),
        ({"python": "3.13"}, ["Python 3.12", "Python 3.13"]),
        ({"machine": "aarch64"}, ["x86_64", "aarch64"]),
    ],
)
def test_mismatch_tells_both_sides_and_the_way_out(change, told):
    sentence = _compat.mismatch(BUILT, **FITTING | change)
    if told is None:
        assert sentence is None
    else:
        assert all(text in sentence for text in [*told, "make build", REBUILD_HINT])
        assert "\n" not in sentence
    without_cuda = BUILT | {"cuda": None}
    assert _compat.mismatch(without_cuda, **FITTING | {"torch_cuda": None}) is None


def import_error(tree: Path, **environment: str) -> str:
    """The last line of an import of the gla_ext in that tree.

    An editable install would offer its own gla_ext._C in place of a missing one.
    """
    code = (
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'Editable' not in repr(f)]; "
        "import gla_ext"
    )
    return run(sys.executable, "-c", code, cwd=tree, **environment).stderr.splitlines()[-1]


def copied(tree: Path, **information) -> Path:
    """gla_ext without its extension, and what its build is said to be."""
    copy_tree(tree, "gla_ext")
    text = f"BUILD_INFO = {BUILD_INFO | information!r}\n"
    (tree / "gla_ext" / "_build_info.py").write_text(text)
    return tree


@pytest.mark.slow
def test_another_torch_is_found_before_the_extension_is_loaded(tmp_path):
    copied(tmp_path, torch="2.99.0")
    (tmp_path / "gla_ext" / "_C.py").write_text("raise RuntimeError('loaded')\n")
    last = import_error(tmp_path)
    assert last.startswith("ImportError: gla_ext was built against torch 2.99.0, and torch 2.")


@pytest.mark.slow
def test_a_clone_says_how_to_build_or_what_it_hides(tmp_path):
    """Hidden is what `pip install .` without -e installed, when Python starts in the clone."""
    clone, installed = (copied(tmp_path / name) for name in ("clone", "installed"))
    last = import_error(clone, PYTHONPATH=str(installed))
    assert last.startswith("ImportError: gla_ext is not built yet")
    assert "make build" in last and REBUILD_HINT in last
    shutil.copy2(_C.__file__, installed / "gla_ext")
    last = import_error(clone, PYTHONPATH=str(installed))
    assert last.startswith(f"ImportError: gla_ext is imported from the source folder {clone}")
    assert f"hides the one installed in {installed}:" in last
    assert REBUILD_HINT in last


def test_build_information_agrees():
    built = _C.build_info()
    assert built["cpu_capabilities"] == BUILD_INFO["cpu_capabilities"]
    assert _C.cpu_capability() in built["cpu_capabilities"]
    assert built["cuda"] == BUILD_INFO["cuda"]
    assert built["cuda_archs"] == BUILD_INFO["cuda_archs"]
    assert BUILD_INFO["torch"].startswith(built["torch"])
    assert built["openmp"]


def test_stub_names_what_the_extension_has():
    tree = ast.parse((ROOT / "gla_ext" / "_C.pyi").read_text())
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert set(functions) == {name for name in dir(_C) if not name.startswith("_")}
    arguments = functions["plan"].args
    names = [a.arg for a in arguments.posonlyargs + arguments.args + arguments.kwonlyargs]
    signature = _C.plan.__doc__.splitlines()[0]
    assert all(f"{name}:" in signature for name in names)
    assert signature.count(":") == len(names)


def test_info_lists_operators_with_their_keys():
    table = info.operators()
    forward = {"CPU", "Meta", "Autograd", "AutocastCPU"}
    assert forward <= set(table["gla_ext::chunk_gla_fwd"])
    made_of_others = {name for name, keys in table.items() if "CPU" not in keys}
    names = ("chunk_gla_across_ranks", "joint_projection", "norm_gate_linear", "swiglu_linear")
    assert made_of_others == {f"gla_ext::{name}" for name in names}
    with_kernels = table.keys() - made_of_others - {"gla_ext::linear_cross_entropy_fwd"}
    on_cuda = {name for name in with_kernels if "CUDA" in table[name]}
    assert on_cuda == (with_kernels if BUILD_INFO["cuda"] else set())
    text = info.describe()
    versions = [gla_ext.__version__, BUILD_INFO["commit"], torch.__version__]
    for expected in [*versions, *BUILD_INFO["cpu_capabilities"], *table]:
        assert expected in text


def test_info_says_what_each_gpu_runs(monkeypatch):
    found = [SimpleNamespace(name=name, major=major, minor=0, multi_processor_count=100)
             for name, major in (("H100", 9), ("B200", 10))]  # fmt: skip
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
    monkeypatch.setattr(torch.cuda, "get_device_properties", found.__getitem__)
    assert info.gpus() == "H100, 9.0: fused; B200, 10.0: steps, compiled and never run"


@pytest.mark.slow
def test_packages_are_loaded_when_asked_for():
    """And `python -m` warns of no package that was imported before it ran."""
    pytest.importorskip("numpy")
    code = (
        "import runpy, sys, warnings, gla_ext\n"
        "names = 'decode distributed fla hf model serve train'.split()\n"
        "packages = tuple(f'gla_ext.{name}' for name in names)\n"
        "print([name for name in sys.modules if name.startswith(packages)])\n"
        "warnings.simplefilter('error', RuntimeWarning)\n"
        "sys.argv = ['-', '--help']\n"
        "runpy._run_module_as_main('gla_ext.train')"
    )
    loaded, usage, *_ = run_python(code).splitlines()
    assert loaded == "[]" and usage.startswith("usage: python -m gla_ext.train [-h] [--preset {")
