"""Wheels: what their names and metadata say, their commit, and the pieces of `make wheel`."""

import fnmatch
import itertools
import math
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch
from source_tree import copy_tree, load_module, run

from gla_ext import _C

rules = load_module("setup.py")
wheel = load_module(".ci/build_wheel.py")
shared = load_module(".ci/shared_objects.py")


@pytest.mark.parametrize(
    ("torch_version", "cuda", "suffix", "requirement"),
    [
        ("2.11.0+cu130", "13.0", "+torch2.11.cu130", "torch==2.11.*"),
        ("2.15.1+cu132", None, "+torch2.15.cpu", "torch==2.15.*"),
        ("2.12.0.dev20260101+cpu", None, "+torch2.12.cpu", "torch==2.12.*"),
    ],
)
def test_what_is_compiled_fits_one_minor_version(torch_version, cuda, suffix, requirement):
    full = f"{rules.version()}{suffix}"
    assert rules.wheel_metadata(torch_version, cuda, True) == (full, requirement)
    assert rules.wheel_metadata(torch_version, cuda, False) == (rules.version(), requirement)


@pytest.mark.parametrize("unpacked", [False, True])
def test_metadata_of_a_wheel_and_of_an_sdist(monkeypatch, tmp_path, unpacked):
    """An sdist fits every torch; unpacked, it keeps its version unless asked for a longer one."""
    monkeypatch.setenv("FORCE_CUDA", "0")
    if unpacked:
        copy_tree(tmp_path, "gla_ext/_version.py")
        (tmp_path / "PKG-INFO").touch()
        monkeypatch.setattr(rules, "ROOT", tmp_path)
    number, minor = rules.version(), ".".join(torch.__version__.split(".")[:2])
    full, pin = f"{number}+torch{minor}.cpu", f"torch=={minor}.*"
    monkeypatch.delenv("GLA_EXT_LOCAL_VERSION", raising=False)
    for command in ("bdist_wheel", "dist_info", "editable_wheel"):
        assert rules.metadata([command]) == (number if unpacked else full, pin)
    for local, version in (("0", number), ("1", full)):
        monkeypatch.setenv("GLA_EXT_LOCAL_VERSION", local)
        assert rules.metadata(["dist_info"]) == (version, pin)
    assert rules.metadata(["-q", "sdist"]) == (number, "torch>=2.11")
    with pytest.raises(SystemExit, match="expected an sdist or a wheel, got both"):
        rules.metadata(["sdist", "bdist_wheel"])


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_commit_of_a_checkout_and_of_an_sdist(tmp_path, monkeypatch):
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)

    def git(*arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        result = run("git", "-C", str(tmp_path), *who, *arguments)
        assert result.returncode == 0, result.stderr
        return result.stdout.strip()

    assert rules.commit(tmp_path) == "unknown"
    git("init", "--quiet")
    assert rules.commit(tmp_path) == "unknown"  # nothing is committed yet
    (tmp_path / "setup.py").touch()
    git("add", "setup.py")
    git("commit", "--quiet", "--message", "first")
    head = git("rev-parse", "HEAD")
    (tmp_path / "notes.txt").touch()
    assert rules.commit(tmp_path) == head
    new = tmp_path / "csrc" / "new.cpp"
    new.parent.mkdir()
    new.touch()
    assert rules.commit(tmp_path) == f"{head}-dirty"
    new.unlink()
    assert rules.commit(tmp_path) == head
    (tmp_path / "setup.py").write_text("changed = True\n")
    assert rules.commit(tmp_path) == f"{head}-dirty"
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    assert rules.commit(unpacked) == "unknown"  # not the repository around it
    (unpacked / "COMMIT").write_text(f"{head}-dirty\n")
    assert rules.commit(unpacked) == f"{head}-dirty"


# What manylinux_2_28 has, of every library whose symbols have versions.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
needs_old_glibc = pytest.mark.skipif(len(rules.LINK_FLAGS) < 2, reason="needs glibc on x86_64")


def newer_versions(library):
    """The versions that a library asks the system for, beyond those of manylinux_2_28."""
    # Names in a library's string table stand between zeros.
    pattern = rb"(?<=\0)(GLIBC|GLIBCXX|CXXABI|GCC)_([^\0]+)(?=\0)"
    names = [(of.decode(), v.decode()) for of, v in re.findall(pattern, library.read_bytes())]
    assert ("GLIBC", "2.2.5") in names
    # GLIBC_ABI_DT_RELR, of 2.36, has no number.
    numbers = {(of, v): tuple(map(int, re.findall(r"\d+", v))) or (math.inf,) for of, v in names}
    return [f"{of}_{v}" for (of, v), number in numbers.items() if number > NEWEST[of]]


@needs_old_glibc
def test_the_built_extension_runs_on_glibc_2_28():
    assert newer_versions(Path(_C.__file__)) == []


def test_libraries_of_torch_and_cuda_are_left_out():
    arguments = wheel.repair_arguments(Path("a.whl"), Path("out"))
    assert arguments[0] == "repair"
    assert arguments[-3:] == ["--wheel-dir", "out", "a.whl"]
    patterns = [b for a, b in itertools.pairwise(arguments) if a == "--exclude"]
    libraries = ["libtorch_cpu.so", "libtorch.so", "libc10.so", "libgomp.so.1"]
    libraries += ["libc10_cuda.so", "libtorch_cuda.so", "libcudart.so.13", "libtorch_python.so"]
    for name in libraries:
        assert any(fnmatch.fnmatch(name, pattern) for pattern in patterns), name
    assert not any(fnmatch.fnmatch("libstdc++.so.6", pattern) for pattern in patterns)


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf")
def test_the_extension_needs_no_other_library():
    text = subprocess.check_output(["readelf", "-d", _C.__file__], text=True)
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", text)
    system = ["libstdc++.so.*", "libgcc_s.so.*", "libm.so.*", "libc.so.*", "ld-linux*.so.*"]
    system += ["libpthread.so.*", "libdl.so.*", "librt.so.*"]
    patterns = wheel.EXCLUDED + system
    assert "libc10.so" in needed
    assert [n for n in needed if not any(fnmatch.fnmatch(n, p) for p in patterns)] == []


def test_unpacking_leaves_nothing_old(tmp_path):
    tree, target = tmp_path / "gla_ext-0.1.0", tmp_path / "source"
    old = ["csrc/old.cpp", "setup.py", ".build/cpython/a.o"]
    for folder, names in ((tree, ["csrc/new.cpp", "setup.py"]), (target, old)):
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(folder.name)
    archive = shutil.make_archive(str(tmp_path / "sdist"), "gztar", tmp_path, tree.name)
    wheel.unpack(Path(archive), target)
    files = {str(f.relative_to(target)) for f in target.rglob("*") if f.is_file()}
    assert files == {"csrc/new.cpp", "setup.py"}
    assert (target / "setup.py").read_text() == tree.name


# Writes its arguments as the object, and the header that `reads` names as what it read.
COMPILER = """#!/bin/sh
case "$*" in *--version*) echo 1.0; exit ;; esac
echo "$1" >> {log}
while [ $# -gt 1 ]; do
  case "$1" in -o) echo "$*" > "$2" ;; -MF) echo "x.o: {reads}" > "$2" ;; esac
  shift
done
"""


class Compiler:
    """shared_objects.py before a compiler that only writes down what it was called for."""

    def __init__(self, folder):
        self.folder, self.log = folder, folder / "log"
        copy_tree(folder / "source", "csrc/dispatch", "csrc/swiglu", "csrc/module.cpp")

    def __call__(
        self, source, torch="torch==2.11.0", include="/a/include", reads="op.h", flags=(), built=()
    ):
        """Compiles; returns how often the compiler was called for it."""
        compiler, source = self.folder / "c++", self.folder / "source" / "csrc" / source
        compiler.write_text(COMPILER.format(log=self.log, reads=reads))
        compiler.chmod(0o755)
        self.log.write_text("")
        target = self.folder / "x.o"
        target.unlink(missing_ok=True)
        command = [self.folder / "objects", torch, compiler, "-MF", self.folder / "x.d"]
        command += [*built, "-fPIC", f"-I{include}", "-c", source, "-o", target, *flags]
        code = shared.main(*map(str, command))
        assert target.exists() == (code == 0)
        return len(self.log.read_text().splitlines()) if code == 0 else None


def test_an_object_is_made_once_for_all_wheels_it_fits(tmp_path):
    compile = Compiler(tmp_path)
    other = {"torch": "torch==2.12.1", "include": "/b/include"}
    cuda, cpp = "swiglu/cuda_kernels.cu", "swiglu/op.cpp"
    assert [compile(cuda), compile(cuda), compile(cuda, **other)] == [1, 0, 0]
    assert [compile(cpp), compile(cpp, include="/b/include"), compile(cpp, **other)] == [1, 0, 1]
    assert [compile(cpp, built=["-fwrapv"]), compile(cpp, flags=["-fwrapv"])] == [0, 1]
    assert [compile("module.cpp"), compile("module.cpp")] == [1, 1]
    assert [compile(cuda, flags=["-DX"]), compile(cuda, flags=["-DX"])] == [1, 0]
    (tmp_path / "source/csrc/swiglu/op.cpp").write_text("int x;")
    assert [compile(cpp), compile(cuda)] == [1, 0]
    (tmp_path / "source/csrc/swiglu/op.h").write_text("int x;")
    assert [compile(cpp), compile(cuda)] == [1, 1]


def test_an_object_that_fits_one_wheel_alone_is_not_shared(tmp_path, capsys):
    compile = Compiler(tmp_path)
    for source, header in (
        ("swiglu/cuda_kernels.cu", "/x/torch/include/ATen/ATen.h"),
        ("swiglu/op.cpp", "/x/include/python3.12/Python.h"),
    ):
        assert compile(source, reads=header) is None
        assert f"got an include of {header}" in capsys.readouterr().out
        assert not (tmp_path / "objects").exists()


def test_the_progress_of_a_build():
    lines = [
        "  gla_ext: building the CPU backend only (FORCE_CUDA=0). 60 files.\n",
        "  [3/8] c++ -fPIC -I/x/csrc -c -c /x/csrc/swiglu/op.cpp -o /x/op.o -O3\n",
        "creating x\n",
    ]
    shown = ["gla_ext: building the CPU backend only (FORCE_CUDA=0). 60 files."]
    assert [wheel.progress(x) for x in lines] == [*shown, "[3/8] csrc/swiglu/op.cpp", None]


def test_an_index_of_wheels(tmp_path):
    names = ["gla_ext-0.3.0+torch2.11.cu130-cp312.whl", "gla_ext-0.3.0+torch2.11.cu130-cp313.whl"]
    for name in reversed(names):
        (tmp_path / name).write_text(name)
    assert [path.name for path in wheel.write_index(tmp_path)] == names
    assert (
        subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=tmp_path).returncode == 0
    )
    links = re.findall(r'<a href="(\S+)#sha256=\w{64}">', (tmp_path / "index.html").read_text())
    assert links == [name.replace("+", "%2B") for name in names]


def test_a_wheel_with_another_library_is_refused(tmp_path):
    archive = tmp_path / "gla_ext.whl"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("gla_ext/_C.cpython-312-x86_64-linux-gnu.so", "")
    wheel.check_contents(archive)
    with zipfile.ZipFile(archive, "a") as file:
        file.writestr("gla_ext.libs/libgomp-1.so.1", "")
    with pytest.raises(SystemExit, match=r"expected gla_ext/_C alone, got .*libgomp"):
        wheel.check_contents(archive)
