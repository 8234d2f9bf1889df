"""How the tree is cut: an operator has one room, few files ask what mode a call is in, and arrows
between packages point one way. `python -m pytest -s tests/tools/test_house.py` prints the tables.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import io
import re
import subprocess
import tokenize
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (".py", ".pyi", ".cpp", ".h", ".cu", ".cuh")


@functools.cache
def tracked(*folders: str) -> list[str]:
    command = ["git", "-C", str(ROOT), "ls-files", *folders]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip("not a git checkout")
    return [f for f in found.stdout.split() if f.endswith(SOURCES) and (ROOT / f).exists()]


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@functools.cache
def tree(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


@functools.cache
def modules() -> dict[str, str]:
    """The modules of gla_ext and their files."""
    return {module_of(path): path for path in tracked("gla_ext") if path.endswith(".py")}


@functools.cache
def code(path: str) -> str:
    """A file without its comments and the strings of its messages, which have blanks."""
    text = (ROOT / path).read_text()
    if not path.endswith((".py", ".pyi")):
        return re.sub(r'"(\\.|[^"\\\n])* (\\.|[^"\\\n])*"', '""', re.sub(r"//.*", "", text))
    words = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT and (
            token.type != tokenize.STRING or " " not in token.string.strip()
        ):
            words.append(token.string)
    return " ".join(words)


# Rooms: an operator's folder in csrc and its file in gla_ext/ops. With the folders of chunk_gla's
# kernels, and how many files outside may say its name.
ROOMS = {
    "chunk_gla": (["csrc/chunk_gla", "csrc/cpu", "csrc/cuda"], ["chunk.py", "pool.py"], 14),
    "recurrent_gla": (["csrc/recurrent_gla"], ["recurrent.py", "buffered.py"], 7),
    "short_convolution": (["csrc/short_convolution"], ["short_convolution.py"], 8),
    "rms_norm": (["csrc/rms_norm"], ["rms_norm.py"], 6),
    "swiglu": (["csrc/swiglu"], ["swiglu.py"], 7),
    "cross_entropy": (["csrc/cross_entropy"], ["cross_entropy.py"], 5),
    "gate_projection": (["csrc/gate_projection"], ["gate_projection.py"], 4),
    "joint_projection": (["csrc/joint_projection"], ["joint_projection.py"], 1),
    "decode": (["csrc/decode"], ["decode.py"], 1),
}
DEFINES = re.compile(r'"([a-z][a-z0-9_]*)(?:\.out)?\((?:Tensor|[a-z]+) ?')


def names_of(op: str, folder: str) -> set[str]:
    """The operator's name, those of its schemas, and these without "_fwd" and the like."""
    names = set() if op == "decode" else {op}
    for path in tracked(folder):
        if path.endswith((".cpp", ".h")):
            names |= set(DEFINES.findall((ROOT / path).read_text()))
    return names | {re.sub(r"_(fwd|bwd)?_?$", "", name) for name in names}


def strangers(op: str) -> list[str]:
    """Files outside the operator's room whose code says its name as a word."""
    folders, files, _ = ROOMS[op]
    own = tuple(f"{folder}/" for folder in folders)
    own += tuple(f"gla_ext/ops/{name}" for name in files)
    words = re.compile(rf"\b({'|'.join(sorted(names_of(op, folders[0])))})\b")
    outside = [path for path in tracked("csrc", "gla_ext") if not path.startswith(own)]
    return [path for path in outside if words.search(code(path))]


@pytest.mark.parametrize("op", ROOMS)
def test_an_operator_has_one_room(op):
    found = strangers(op)
    print(f"\n{op}: {len(found)} files outside its room: {' '.join(found)}")
    assert len(found) <= ROOMS[op][2], found


# The door: questions of what mode a call is in. A function whose answer is one is a question too,
# and is counted where it is called.
QUESTIONS = {
    # compiling, recorded
    "is_compiling", "is_dynamo_compiling", "is_exporting", "is_tracing", "_is_tracing",
    "is_recorded", "can_be_read", "is_one", "statically_known_true",
    # sharded, and other subclasses
    "is_sharded", "DTensor", "is_traceable_wrapper_subclass", "is_of_unknown_class",
    # transforms, forward mode, dispatch modes
    "_are_functorch_transforms_active", "have_no_rule", "has_tangent", "in_forward_mode",
    "_current_level", "_len_torch_dispatch_stack", "_get_dispatch_mode",
    # ONNX
    "is_in_onnx_export", "is_recorded_for_onnx",
}  # fmt: skip
ASKS_OF_A_TYPE = ("isinstance", "issubclass", "map", "type")


def per_file(lines_of: Callable[[ast.Module], list[int]]) -> dict[str, list[int]]:
    """The lines that are found in the modules of gla_ext, which are printed."""
    found = {path: lines_of(tree(path)) for path in modules().values()}
    found = {path: lines for path, lines in found.items() if lines}
    for path, lines in found.items():
        print(f"{path}: {lines}")
    return found


def questions(module: ast.Module) -> list[int]:
    """Lines that ask: calls of a question, and of what asks whether a type is one."""
    lines = []
    for node in ast.walk(module):
        if not isinstance(node, ast.Call):
            continue
        asked = [node.func]
        if isinstance(node.func, ast.Name) and node.func.id in ASKS_OF_A_TYPE:
            asked += node.args
        names = (getattr(n, "attr", getattr(n, "id", "")) for n in asked)
        lines += [node.lineno] * sum(name in QUESTIONS for name in names)
    return lines


def test_one_door_asks_what_mode_a_call_is_in():
    found = per_file(questions)
    assert len(found) <= 3, found
    assert sum(map(len, found.values())) <= 35, found


MODES = {"cp_context", "batch_invariant", "is_batch_invariant"}


def branches(module: ast.Module) -> list[int]:
    """Lines that branch on a context or on batch-invariant mode."""
    lines = set()
    for node in ast.walk(module):
        tests = []
        if isinstance(node, (ast.If, ast.IfExp, ast.While)):
            tests = [node.test]
        elif isinstance(node, ast.Compare) and any(
            isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops
        ):
            tests = [node]
        for test in tests:
            names = {getattr(n, "attr", getattr(n, "id", "")) for n in ast.walk(test)}
            if names & MODES:
                lines.add(node.lineno)
    return sorted(lines)


def test_few_files_branch_on_a_context_or_on_batch_invariance():
    found = per_file(branches)
    assert len(found) <= 5, found


# Arrows.
CORE = {"ops", "layers", "model", "cache", "decode", "distributed"}
GUESTS = {"train", "serve", "fla", "hf", "vllm"}


def package_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


@functools.cache
def imports(path: str) -> list[tuple[str, bool, int]]:
    """What a file imports of gla_ext: the module, whether inside a function, and the line."""
    inside = {
        id(node)
        for function in ast.walk(tree(path))
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for node in ast.walk(function)
    }
    found = []
    for node in ast.walk(tree(path)):
        named = []
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: expected absolute imports"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            named = {name if name in modules() else node.module for name in inner}
        ours = [m for m in named if m.split(".")[0] == "gla_ext"]
        found += [(m, id(node) in inside, node.lineno) for m in ours]
    return found


def arrows() -> list[tuple[str, str, bool, str]]:
    """Every import of gla_ext: from which package, of which module, inside a function, where."""
    found = []
    for path in modules().values():
        parts = Path(path).parts
        package = parts[1] if len(parts) > 2 else ""
        found += [
            (package, module, inside, f"{path}:{line}") for module, inside, line in imports(path)
        ]
    return found


def test_the_core_imports_no_guest_and_guests_only_hf_of_each_other():
    wrong = []
    for package, module, _, where in arrows():
        to = package_of(module)
        upward = package in CORE and to in GUESTS
        sideways = package in GUESTS and to in GUESTS - {package, "hf"}
        if upward or sideways:
            wrong.append((where, module))
    assert not wrong, wrong


def test_few_imports_hide_in_functions():
    hidden = [(where, module) for _, module, inside, where in arrows() if inside]
    print(*hidden, sep="\n")
    assert len(hidden) <= 4, hidden


def test_packages_import_each_other_in_no_circle():
    """As their files are loaded: imports in functions do not count."""
    edges = {(a, package_of(m)) for a, m, inside, _ in arrows() if not inside}
    packages = CORE | GUESTS
    graph = {a: {y for x, y in edges if x == a != y and y in packages} for a in packages}
    graphlib.TopologicalSorter(graph).prepare()


def test_modules_import_each_other_in_no_circle():
    """Imports for types count, those in functions do not."""
    graph = {
        name: {module for module, inside, _ in imports(path) if not inside} - {"gla_ext"}
        for name, path in modules().items()
        if name != "gla_ext"
    }
    graphlib.TopologicalSorter(graph).prepare()


def test_folders_are_small_enough_to_be_read():
    """Beside the public files of ops/, a list of operators."""
    listed = ("gla_ext/ops/", "gla_ext/ops/_")
    paths = [
        p for p in modules().values() if p.startswith(listed[1]) or not p.startswith(listed[0])
    ]
    folders = [Path(path).parent for path in paths]
    assert max(map(folders.count, folders)) <= 15
