"""The tree of packages: what imports what, and the paths of the time when all lay in one folder."""

import ast
import graphlib
import importlib
import pickle
import runpy
import sys
from pathlib import Path

import pytest
import torch
from common import run_python

import gla_ext
from gla_ext._moved import MOVED
from gla_ext.layers.norms import RMSNorm

PACKAGE = Path(gla_ext.__file__).parent

# The public modules of the flat package, all of them.
FLAT = [
    "activations",
    "cache",
    "checkpoint",
    "config",
    "data",
    "decode",
    "devices",
    "export",
    "files",
    "fla",
    "generate",
    "info",
    "inputs",
    "layers",
    "model",
    "multihead",
    "norms",
    "ops",
    "plot",
    "presets",
    "recurrent",
    "reference",
    "run_folder",
    "sampling",
    "selftest",
    "short_conv",
    "swiglu",
    "train",
    "trainer",
]
PRIVATE = [
    "_C",
    "_checks",
    "_chunks",
    "_compat",
    "_cross_entropy",
    "_decode_loop",
    "_fla_activations",
    "_fla_layers",
    "_graphs",
    "_layer_options",
    "_padding",
    "_projections",
    "_prompts",
    "_version",
]

# What was defined in the modules that are packages now.
NAMES = {
    "decode": "KEPT_LOOPS Decoder free_decoders uses_graph",
    "fla": "accelerate_fla is_accelerated restore_fla",
    "layers": "GatedLinearAttention",
    "model": "CausalLMOutput GLABlock GLAConfig GLAForCausalLM GLAMLP GLAModel ModelOutput "
    "check_logits_to_keep count_parameters fuse_projections init_weights next_token_loss "
    "run_blocks",
    "ops": "batch_invariant chunk_gla fused_chunk_gla in_mode_of_now is_batch_invariant "
    "keeps_for_backward",
    "train": "CHECKPOINT Interrupted StopSignals default_device main",
}

# Lowest first: a package imports from those before it, and modules of the top folder.
# Of distributed the others import in functions alone: it is loaded where it is asked for.
ORDER = ("ops", "cache", "layers", "decode", "model", "train", "distributed", "fla", "hf", "serve")
OWN_WAY = {"fla": {"ops", "cache", "layers"}, "hf": {"ops", "cache", "layers", "model"}}
OWN_WAY["serve"] = {"ops", "cache", "layers", "decode", "model", "hf", "train"}


@pytest.mark.parametrize("name", [*FLAT, *PRIVATE])
def test_every_flat_path_is_the_module_of_today(name):
    if name in ("data", "plot", "presets", "train", "trainer"):
        pytest.importorskip("numpy")
    old = f"gla_ext.{name}"
    module = importlib.import_module(old)
    assert module is importlib.import_module(MOVED.get(old, old))
    assert module is getattr(gla_ext, name)
    assert module.__name__ == module.__spec__.name == MOVED.get(old, old)


@pytest.mark.parametrize("package", NAMES)
def test_a_package_has_the_names_of_the_module_that_it_was(package):
    module = importlib.import_module(f"gla_ext.{package}")
    assert set(NAMES[package].split()) <= set(dir(module))


def test_old_paths_are_loaded_when_asked_for():
    """And `python -m` warns of no package that was imported before it ran."""
    pytest.importorskip("numpy")
    code = (
        "import runpy, sys, warnings, gla_ext\n"
        "names = 'decode distributed fla hf model train'.split()\n"
        "packages = tuple(f'gla_ext.{name}' for name in names)\n"
        "print([name for name in sys.modules if name.startswith(packages)])\n"
        "import gla_ext.generate as old, gla_ext.decode.generate as new\n"
        "from gla_ext import config\n"
        "print(old is new, gla_ext.sampling.__name__, config.__name__)\n"
        "print([name for name in sys.modules if name.startswith('gla_ext.train')])\n"
        "warnings.simplefilter('error', RuntimeWarning)\n"
        "sys.argv = ['-', '--help']\n"
        "runpy._run_module_as_main('gla_ext.train')"
    )
    assert run_python(code).splitlines()[:4] == [
        "[]",
        "True gla_ext.decode.sampling gla_ext.model.config",
        "[]",
        "usage: python -m gla_ext.train [-h] [--data DATA] [--out OUT] [--resume]",
    ]


def test_a_name_that_never_was_is_an_error():
    with pytest.raises(AttributeError, match="module 'gla_ext' has no attribute 'sampler'"):
        gla_ext.sampler  # noqa: B018
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'gla_ext\.sampler'"):
        importlib.import_module("gla_ext.sampler")


def test_python_m_of_an_old_path(monkeypatch):
    monkeypatch.delitem(sys.modules, "gla_ext.devices", raising=False)
    found = runpy.run_module("gla_ext.devices", run_name="__main__")
    assert found["__name__"] == "__main__" and callable(found["default_device"])


def test_pickles_by_old_paths(monkeypatch, tmp_path):
    assert pickle.loads(b"cgla_ext.model\nGLAForCausalLM\n.") is gla_ext.model.GLAForCausalLM
    assert pickle.loads(b"cgla_ext.short_conv\nShortConvolution\n.").__name__ == "ShortConvolution"
    norm = RMSNorm(3)
    torch.nn.init.normal_(norm.weight)
    with monkeypatch.context() as patch:
        patch.setattr(RMSNorm, "__module__", "gla_ext.norms")
        patch.setitem(sys.modules, "gla_ext.norms", importlib.import_module("gla_ext.norms"))
        torch.save(norm, tmp_path / "norm.pt")
    assert b"gla_ext.norms" in (tmp_path / "norm.pt").read_bytes()
    again = torch.load(tmp_path / "norm.pt", weights_only=False)
    assert type(again) is RMSNorm and torch.equal(again.weight, norm.weight)


def modules() -> dict[str, Path]:
    """The modules of the package and their files; a package under its own name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("gla_ext", *path.relative_to(PACKAGE).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, known: dict[str, Path]) -> set[str]:
    """The modules of gla_ext that a file names in an import, in functions and for types too, but
    for those of gla_ext.distributed in functions.
    """
    found, tree = set(), ast.parse(path.read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    inside_functions = {
        node for part in ast.walk(tree) if isinstance(part, functions) for node in ast.walk(part)
    }
    for node in ast.walk(tree):
        named = isinstance(node, ast.ImportFrom) and node.module.startswith("gla_ext.distributed")
        if named and node in inside_functions:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: expected absolute imports"
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in known else node.module for name in inside}
    return found & known.keys()


def test_imports_make_no_circle():
    known = modules()
    graph = {name: imports(path, known) for name, path in known.items()}
    del graph["gla_ext"]
    assert len(graph) > 50
    graphlib.TopologicalSorter({k: v - {"gla_ext"} for k, v in graph.items()}).prepare()


def test_packages_stand_on_those_below():
    known = modules()
    for name, path in known.items():
        package = name.split(".")[1] if name.count(".") else ""
        if package not in ORDER:
            continue
        allowed = OWN_WAY.get(package, set(ORDER[: ORDER.index(package)])) | {package}
        used = {other.split(".")[1] for other in imports(path, known) if other.count(".") > 1}
        assert used <= allowed, f"{name} imports from {sorted(used - allowed)}"


def test_folders_are_small_enough_to_be_read():
    for folder in {path.parent for path in modules().values()}:
        files = [path for path in folder.glob("*.py") if path.name != "_build_info.py"]
        assert len(files) <= 15, folder
