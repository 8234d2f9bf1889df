"""Wheels: what their names and metadata say, their commit, and the pieces of `make wheel`."""

import ctypes
import fnmatch
import itertools
import math
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from source_tree import ROOT, copy_tree, load_module, run

from gla_ext import _C

rules = load_module("setup.py")
wheel = load_module(".ci/build_wheel.py")


# Version and requirement


@pytest.mark.parametrize(
    ("torch_version", "cuda", "suffix", "requirement"),
    [
        ("2.11.0+cu130", "13.0", "+torch2.11.cu130", "torch==2.11.*"),
        ("2.15.0+cu132", "13.2", "+torch2.15.cu132", "torch==2.15.*"),
        ("2.15.1+cu132", None, "+torch2.15.cpu", "torch==2.15.*"),
        ("2.12.0.dev20260101+cpu", None, "+torch2.12.cpu", "torch==2.12.*"),
    ],
)
def test_what_is_compiled_fits_one_minor_version(torch_version, cuda, suffix, requirement):
    assert rules.wheel_metadata(torch_version, cuda, True) == (
        f"{rules.version()}{suffix}",
        requirement,
    )
    assert rules.wheel_metadata(torch_version, cuda, False) == (rules.version(), requirement)


@pytest.mark.parametrize("command", ["bdist_wheel", "dist_info", "editable_wheel"])
def test_wheels_are_pinned_and_named(monkeypatch, command):
    monkeypatch.setenv("FORCE_CUDA", "0")
    monkeypatch.delenv("GLA_EXT_LOCAL_VERSION", raising=False)
    minor = ".".join(torch.__version__.split(".")[:2])
    pin = f"torch=={minor}.*"
    assert rules.metadata([command]) == (f"{rules.version()}+torch{minor}.cpu", pin)
    monkeypatch.setenv("GLA_EXT_LOCAL_VERSION", "0")
    assert rules.metadata([command]) == (rules.version(), pin)


def test_an_unpacked_sdist_keeps_its_version_unless_asked(monkeypatch, tmp_path):
    tree = copy_tree(tmp_path, "gla_ext/_version.py")
    (tree / "PKG-INFO").touch()
    monkeypatch.setattr(rules, "ROOT", tree)
    monkeypatch.setenv("FORCE_CUDA", "0")
    monkeypatch.delenv("GLA_EXT_LOCAL_VERSION", raising=False)
    number, pin = rules.metadata(["dist_info"])
    assert number == rules.version()
    assert pin.startswith("torch==")
    monkeypatch.setenv("GLA_EXT_LOCAL_VERSION", "1")
    assert rules.metadata(["dist_info"])[0].startswith(f"{rules.version()}+torch")


def test_an_sdist_fits_every_torch():
    assert rules.metadata(["-q", "sdist"]) == (rules.version(), "torch>=2.11")
    with pytest.raises(SystemExit, match="expected an sdist or a wheel, got both"):
        rules.metadata(["sdist", "bdist_wheel"])


def test_metadata_that_pip_reads(tmp_path):
    names = ["setup.py", "pyproject.toml", "README.md", "LICENSE", "gla_ext"]
    tree = copy_tree(tmp_path / "tree", *names)
    command = ["setup.py", "-q", "dist_info", "--output-dir", str(tmp_path)]
    env = {"FORCE_CUDA": "0", "GLA_EXT_LOCAL_VERSION": "1"}
    result = run(sys.executable, *command, cwd=tree, **env)
    assert result.returncode == 0, result.stderr
    (found,) = tmp_path.glob("*.dist-info/METADATA")
    number, pin = rules.wheel_metadata(torch.__version__, None, True)
    text = found.read_text()
    assert f"\nVersion: {number}\n" in text
    assert re.findall(r"^Requires-Dist: (torch\b.*)$", text, re.MULTILINE) == [pin]
    assert "\nProject-URL: Paper, https://arxiv.org/abs/2312.06635\n" in text


# Commit


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    result = run("git", "-C", str(folder), *who, *arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_commit_of_a_checkout_and_of_an_sdist(tmp_path, monkeypatch):
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert rules.commit(tmp_path) == "unknown"
    git(tmp_path, "init", "--quiet")
    assert rules.commit(tmp_path) == "unknown"  # nothing is committed yet
    (tmp_path / "setup.py").touch()
    git(tmp_path, "add", "setup.py")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert rules.commit(tmp_path) == head
    (tmp_path / "notes.txt").touch()
    assert rules.commit(tmp_path) == head
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "new.cpp").touch()
    assert rules.commit(tmp_path) == f"{head}-dirty"
    (tmp_path / "csrc" / "new.cpp").unlink()
    (tmp_path / "setup.py").write_text("changed = True\n")
    assert rules.commit(tmp_path) == f"{head}-dirty"

    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    assert rules.commit(unpacked) == "unknown"  # not the repository around it
    (unpacked / "COMMIT").write_text(f"{head}-dirty\n")
    assert rules.commit(unpacked) == f"{head}-dirty"


# Compiler and linker


@pytest.mark.parametrize(("release", "compressed"), [((12, 6), 0), ((12, 8), 1), ((13, 0), 1)])
def test_cuda_code_is_compressed_where_nvcc_can(release, compressed):
    assert rules.nvcc_flags({}, release).count("--compress-mode=size") == compressed


def test_nvcc_says_its_release(tmp_path):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    nvcc.chmod(0o755)
    assert rules.nvcc_release(str(nvcc)) == (13, 0)


OLD_GLIBC = """
#include <cmath>
#include <memory>
extern "C" double f(double x) {
  static std::shared_ptr<double> kept = std::make_shared<double>(0.0);
  std::shared_ptr<double> other = kept;
  return std::exp(x) + std::exp2(x) + std::log(x) + std::log2(x) + std::pow(x, x) + *other;
}
"""
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


@needs_old_glibc
def test_functions_of_newer_glibc_are_not_asked_for(tmp_path):
    (tmp_path / "f.cpp").write_text(OLD_GLIBC)
    library = tmp_path / "f.so"
    compiler = os.environ.get("CXX", "c++")
    sources = ["f.cpp", str(ROOT / "csrc" / "common" / "glibc.cpp")]
    flags = ["-O3", "-fPIC", "-shared", *rules.LINK_FLAGS]
    result = run(compiler, *sources, *flags, "-o", str(library), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert newer_versions(library) == []
    function = ctypes.CDLL(str(library)).f
    function.restype, function.argtypes = ctypes.c_double, [ctypes.c_double]
    expected = math.exp(0.5) + math.exp2(0.5) + math.log(0.5) + math.log2(0.5) + 0.5**0.5
    assert function(0.5) == pytest.approx(expected, rel=1e-15)


# make wheel


def test_work_folders_differ_by_torch():
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    folder = wheel.work_folder("torch==2.11.0", Path("/x"))
    assert folder == Path(f"/x/.build/wheel/torch-2.11.0-{python}")
    assert wheel.work_folder("torch>=2.12,<3", Path("/x")).name == f"torch-2.12-3-{python}"


def test_environment_lets_nothing_else_in():
    inherited = {"PATH": "/bin", "PYTHONPATH": "/x", "VIRTUAL_ENV": "/y", "FORCE_CUDA": "0"}
    assert wheel.environment(inherited, Path("/tools")) == {
        "PATH": f"/tools{os.pathsep}/bin",
        "FORCE_CUDA": "0",
        "PYTHONNOUSERSITE": "1",
        "GLA_EXT_LOCAL_VERSION": "1",
    }


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


def test_glibc_of_a_tag():
    name = "gla_ext-0.1.0+torch2.11.cu130-cp312-cp312-{}_x86_64.whl"
    assert wheel.glibc(name.format("manylinux_2_28")) == "2.28"
    assert wheel.glibc(name.format("manylinux_2_27_x86_64.manylinux_2_28")) == "2.27"
    assert wheel.glibc(name.format("linux")) == "unknown"


def test_unpacking_keeps_compiled_objects_alone(tmp_path):
    tree = tmp_path / "gla_ext-0.1.0"
    (tree / "csrc").mkdir(parents=True)
    (tree / "csrc" / "new.cpp").touch()
    (tree / "setup.py").write_text("new\n")
    archive = shutil.make_archive(str(tmp_path / "sdist"), "gztar", tmp_path, tree.name)
    target = tmp_path / "source"
    for name in ("csrc/old.cpp", "setup.py", ".build/lib.linux/old.py", ".build/cpython/a.o"):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_text("old\n")
    wheel.unpack(Path(archive), target)
    files = {str(f.relative_to(target)) for f in target.rglob("*") if f.is_file()}
    assert files == {"csrc/new.cpp", "setup.py", ".build/cpython/a.o"}
    assert (target / "setup.py").read_text() == "new\n"


def test_a_wheel_with_another_library_is_refused(tmp_path):
    archive = tmp_path / "gla_ext.whl"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("gla_ext/_C.cpython-312-x86_64-linux-gnu.so", "")
    wheel.check_contents(archive)
    with zipfile.ZipFile(archive, "a") as file:
        file.writestr("gla_ext.libs/libgomp-1.so.1", "")
    with pytest.raises(SystemExit, match=r"expected gla_ext/_C alone, got .*libgomp"):
        wheel.check_contents(archive)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_wheel_and_wheels(tmp_path):
    tree = copy_tree(tmp_path, "Makefile", "csrc", "examples", "tests/cpp", "tests/emulator")
    (tree / ".ci").mkdir()
    (tree / ".ci" / "preflight").write_text(f"#!/bin/sh\necho {sys.executable}\n")
    (tree / ".ci" / "preflight").chmod(0o755)
    (tree / ".ci" / "build_wheel.py").write_text("import sys\nprint(sys.argv[1:])\n")
    one = run("make", "wheel", "TORCH=torch>=2.12,<2.13", cwd=tree)
    assert one.stdout == "['torch>=2.12,<2.13']\n", one.stderr
    some = run("make", "wheels", "TORCHES=2.11.0 2.15.0", cwd=tree)
    assert some.stdout == "['torch==2.11.0']\n['torch==2.15.0']\n", some.stderr
    every = run("make", "wheels", cwd=tree).stdout.splitlines()
    minors = [re.match(r"\['torch==(2\.\d+)\.\d+'\]", line)[1] for line in every]
    assert minors == ["2.11", "2.12", "2.13", "2.14", "2.15"]
    (tree / ".ci" / "build_wheel.py").write_text("raise SystemExit('no')\n")
    assert run("make", "wheels", cwd=tree).stderr.count("no\n") == 1
