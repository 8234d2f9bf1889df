"""What was built: does it fit this torch, does it say what it is, does the stub tell the truth."""

import ast
import re
import shutil
import sys
from pathlib import Path

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


def test_a_fitting_build_has_no_mismatch():
    assert _compat.mismatch(BUILT, **FITTING) is None
    assert _compat.mismatch(BUILT, **FITTING | {"torch_version": "2.11.3+cu130"}) is None
    assert _compat.mismatch(BUILT | {"cuda": None}, **FITTING | {"torch_cuda": None}) is None


@pytest.mark.parametrize(
    ("change", "told"),
    [
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
    assert all(text in sentence for text in [*told, "make build", REBUILD_HINT])
    assert "\n" not in sentence


def test_another_torch_is_an_import_error(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    with pytest.raises(ImportError, match=r"built against torch 2\.\d+.*torch 2\.99\.0"):
        _compat.check_build()


def test_another_torch_is_found_before_the_extension_is_loaded(tmp_path):
    copy_tree(tmp_path, "gla_ext")
    info_text = f"BUILD_INFO = {BUILD_INFO | {'torch': '2.99.0'}!r}\n"
    (tmp_path / "gla_ext" / "_build_info.py").write_text(info_text)
    (tmp_path / "gla_ext" / "_C.py").write_text("raise RuntimeError('loaded')\n")
    result = run(sys.executable, "-c", "import gla_ext", cwd=tmp_path)
    assert result.stderr.splitlines()[-1].startswith("ImportError: gla_ext was built against torch")


def test_unbuilt_source_tree_says_how_to_build(tmp_path):
    copy_tree(tmp_path, "gla_ext")
    # An editable install of this tree would offer its own gla_ext._C in place of the missing one.
    code = (
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'Editable' not in repr(f)]; "
        "import gla_ext"
    )
    result = run(sys.executable, "-c", code, cwd=tmp_path)
    last = result.stderr.splitlines()[-1]
    assert last.startswith("ImportError: gla_ext is not built yet")
    assert "make build" in last
    assert REBUILD_HINT in last


def test_a_clone_that_hides_the_installed_package_says_so(tmp_path):
    """As after `pip install .` without -e, when Python starts in the clone."""
    clone = copy_tree(tmp_path / "clone", "gla_ext")
    installed = copy_tree(tmp_path / "installed", "gla_ext")
    shutil.copy2(_C.__file__, installed / "gla_ext")
    for tree in (clone, installed):
        (tree / "gla_ext" / "_build_info.py").write_text(f"BUILD_INFO = {BUILD_INFO!r}\n")
    code = (
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'Editable' not in repr(f)]; "
        "import gla_ext"
    )
    result = run(sys.executable, "-c", code, cwd=clone, PYTHONPATH=str(installed))
    last = result.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: gla_ext is imported from the source folder {clone}")
    assert f"hides the one installed in {installed}:" in last
    assert REBUILD_HINT in last


def test_only_a_package_with_an_extension_is_hidden(tmp_path):
    package = tmp_path / "clone" / "gla_ext"
    other = tmp_path / "installed" / "gla_ext"
    other.mkdir(parents=True)
    (other / "_C.pyi").touch()
    search_path = [str(package.parent), str(other.parent), str(tmp_path / "nowhere")]
    assert _compat.shadowed(package, search_path) is None
    (other / Path(_C.__file__).name).touch()
    assert str(other.parent) in _compat.shadowed(package, search_path)
    assert _compat.shadowed(other, search_path) is None


def test_build_information_agrees():
    built = _C.build_info()
    assert built["cpu_capabilities"] == BUILD_INFO["cpu_capabilities"]
    assert _C.cpu_capability() in built["cpu_capabilities"]
    assert built["cuda"] == BUILD_INFO["cuda"]
    assert built["cuda_archs"] == BUILD_INFO["cuda_archs"]
    assert BUILD_INFO["torch"].startswith(built["torch"])
    assert built["openmp"]


@pytest.mark.parametrize("asked", ["DEFAULT", "AVX2"])
def test_capability_follows_torch(asked):
    if asked not in BUILD_INFO["cpu_capabilities"]:
        pytest.skip(f"{asked} is not built for {BUILD_INFO['machine']}")
    code = (
        "import torch, gla_ext; "
        "print(gla_ext._C.cpu_capability(), torch.backends.cpu.get_cpu_capability())"
    )
    result = run(sys.executable, "-c", code, ATEN_CPU_CAPABILITY=asked.lower())
    assert result.stdout.split() == [asked, asked], result.stderr


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
    assert {"CPU", "Meta", "Autograd", "AutocastCPU"} <= set(table["gla_ext::chunk_gla_fwd"])
    assert {"CPU", "Meta", "Autograd"} <= set(table["gla_ext::chunk_gla_bwd"])
    assert {"CPU", "Meta"} <= set(table["gla_ext::_gate_cumsum"])
    with_cuda = BUILD_INFO["cuda"] is not None
    made_of_others = [name for name, keys in table.items() if "CPU" not in keys]
    assert sorted(made_of_others) == [
        "gla_ext::chunk_gla_across_ranks",
        "gla_ext::joint_projection",
        "gla_ext::norm_gate_linear",
        "gla_ext::swiglu_linear",
    ]
    everywhere = {*made_of_others, "gla_ext::linear_cross_entropy_fwd"}  # the same code
    for name in table.keys() - everywhere:
        assert ("CUDA" in table[name]) == with_cuda
    text = info.describe()
    versions = [gla_ext.__version__, BUILD_INFO["commit"], torch.__version__]
    for expected in [*versions, *BUILD_INFO["cpu_capabilities"], *table]:
        assert expected in text


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
    usage = "usage: python -m gla_ext.train [-h] [--data DATA] [--out OUT] [--resume]"
    assert run_python(code).splitlines()[:2] == ["[]", usage]
