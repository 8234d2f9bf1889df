"""setup.py: CUDA rules, sources, the one version, the sdist, and a build without torch."""

import os
import shutil
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from source_tree import ROOT, copy_tree, load_module, run

import gla_ext
from gla_ext._build_info import BUILD_INFO

BUILD_FILES = ["setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md", "CHANGELOG.md"]


rules = load_module("setup.py")


# CUDA architectures


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("9.0", ["9.0a"]),
        ("9.0a", ["9.0a"]),
        ("9.0+PTX", ["9.0a", "9.0+PTX"]),
        ("Hopper", ["9.0a", "9.0+PTX"]),
        ("8.0;9.0", ["8.0", "9.0a"]),
        ("8.0 8.6, 9.0a;9.0", ["8.0", "8.6", "9.0a"]),
        ("7.0;7.5;8.0+PTX", ["8.0+PTX"]),
        ("Ampere", ["8.0", "8.6+PTX"]),
        ("10.0;12.0+PTX", ["10.0", "12.0+PTX"]),
    ],
)
@pytest.mark.parametrize("name", ["TORCH_CUDA_ARCH_LIST", "GLA_EXT_CUDA_ARCHS"])
def test_cuda_archs_asked_for(name, asked, expected):
    assert rules.cuda_archs({name: asked}, "13.0") == expected


def test_cuda_archs_torch_list_wins():
    env = {"TORCH_CUDA_ARCH_LIST": "8.9", "GLA_EXT_CUDA_ARCHS": "8.0"}
    assert rules.cuda_archs(env, "13.0") == ["8.9"]


@pytest.mark.parametrize(
    ("cuda", "expected"),
    [
        ("13.0", ["8.0", "9.0a", "10.0+PTX"]),
        ("12.8", ["8.0", "9.0a", "10.0+PTX"]),
        ("12.6", ["8.0", "9.0a", "9.0+PTX"]),
    ],
)
@pytest.mark.parametrize("asked", ["", "native"])
def test_cuda_archs_default_needs_no_gpu(asked, cuda, expected):
    assert rules.cuda_archs({"TORCH_CUDA_ARCH_LIST": asked}, cuda) == expected


def test_cuda_archs_native_means_the_gpus_at_hand():
    env = {"TORCH_CUDA_ARCH_LIST": "native"}
    assert rules.cuda_archs(env, "13.0", visible=["9.0", "10.0"]) == ["9.0a", "10.0"]
    assert rules.cuda_archs({}, "13.0", visible=["8.6"]) == rules.default_cuda_archs("13.0")


@pytest.mark.parametrize(
    ("asked", "message"),
    [("7.5", "needs compute capability 8.0 or higher, got '7.5'"), ("sm_90", "got 'sm_90'")],
)
def test_cuda_archs_errors(asked, message):
    with pytest.raises(SystemExit, match=message):
        rules.cuda_archs({"TORCH_CUDA_ARCH_LIST": asked}, "13.0")


def test_torch_turns_the_list_into_wgmma_code(monkeypatch):
    from torch.utils import cpp_extension

    archs = rules.cuda_archs({"GLA_EXT_CUDA_ARCHS": "Hopper"}, "13.0")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", ";".join(archs))
    flags = cpp_extension._get_cuda_arch_flags(rules.NVCC_FLAGS)
    assert "-gencode=arch=compute_90a,code=sm_90a" in flags
    assert "-gencode=arch=compute_90,code=compute_90" in flags


def test_spills_fail_a_build_that_asks_for_it():
    assert rules.nvcc_flags({}, (12, 6)) == rules.NVCC_FLAGS
    flags = rules.nvcc_flags({"GLA_EXT_WERROR_SPILLS": "1"}, (13, 0))
    assert "-warn-spills -Xptxas -Werror" in " ".join(flags)
    assert not [flag for flag in flags if "arch" in flag]


NVCC = "/opt/cuda/bin/nvcc"


@pytest.mark.parametrize(
    ("force", "nvcc", "cuda", "has_sources", "use", "reason"),
    [
        (None, NVCC, "13.0", True, True, f"CPU and CUDA backends with {NVCC}"),
        ("1", NVCC, "13.0", True, True, f"CPU and CUDA backends with {NVCC}"),
        ("0", NVCC, "13.0", True, False, "FORCE_CUDA=0"),
        (None, None, "13.0", True, False, "CPU backend only: nvcc was not found"),
        (None, NVCC, None, True, False, "CPU backend only: the installed torch was built without"),
        (None, NVCC, "13.0", False, False, "CPU backend only: this version has no CUDA sources"),
    ],
)
def test_cuda_decision(force, nvcc, cuda, has_sources, use, reason):
    decision, message = rules.cuda_decision(force, nvcc, cuda, has_sources)
    assert decision is use
    assert reason in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("nvcc", "cuda", "has_sources", "reason"),
    [
        (None, "13.0", True, "nvcc was not found"),
        (NVCC, None, True, "built without CUDA"),
        (NVCC, "13.0", False, "no CUDA sources"),
    ],
)
def test_force_cuda_fails_where_cuda_cannot_be_built(nvcc, cuda, has_sources, reason):
    with pytest.raises(SystemExit, match=f"FORCE_CUDA=1, but .*{reason}"):
        rules.cuda_decision("1", nvcc, cuda, has_sources)


# Sources and capabilities


def test_every_source_is_compiled_by_one_rule(monkeypatch, tmp_path):
    names = ["csrc/a.cpp", "csrc/cpu/b.cpp", "csrc/cpu/kernels/c.cpp", "csrc/cuda/d.cpp"]
    names += ["csrc/cuda/plan/plan.cpp", "csrc/cuda/steps/e.cu"]
    names += [f"csrc/op/{name}" for name in ("op.cpp", "cpu.cpp", "cuda.cpp")]
    names += [f"csrc/op/{name}" for name in ("cpu_kernels.cpp", "cuda_kernels.cu")]
    for name in [*names, "csrc/cpu/kernels/f.h", "csrc/cuda/g.cuh"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(rules, "ROOT", tmp_path)
    assert rules.sources() == {
        "common": [
            "csrc/a.cpp",
            "csrc/cpu/b.cpp",
            "csrc/cuda/plan/plan.cpp",
            "csrc/op/cpu.cpp",
            "csrc/op/op.cpp",
        ],
        "kernels": ["csrc/cpu/kernels/c.cpp", "csrc/op/cpu_kernels.cpp"],
        "cuda": [
            "csrc/cuda/d.cpp",
            "csrc/cuda/steps/e.cu",
            "csrc/op/cuda.cpp",
            "csrc/op/cuda_kernels.cu",
        ],
        "headers": ["csrc/cpu/kernels/f.h", "csrc/cuda/g.cuh"],
    }


def test_capabilities_are_ordered_weakest_first():
    assert rules.cpu_capabilities("x86_64") == ["DEFAULT", "AVX2", "AVX512"]
    assert rules.cpu_capabilities("aarch64") == ["DEFAULT"]
    assert "-mavx512f" not in rules.capability_flags("AVX2")
    macros = ["-DCPU_CAPABILITY=DEFAULT", "-DCPU_CAPABILITY_DEFAULT"]
    default = rules.capability_flags("DEFAULT")
    assert default[:2] == macros
    assert not [flag for flag in default if flag.startswith("-m")]


# One version


def test_version_has_one_source(tmp_path):
    copy_tree(tmp_path, *BUILD_FILES[:2], "gla_ext/_version.py")
    (tmp_path / "README.md").touch()
    (tmp_path / "LICENSE").touch()
    (tmp_path / "gla_ext" / "_version.py").write_text('__version__ = "9.8.7"\n')
    result = run(sys.executable, "setup.py", "--version", cwd=tmp_path)
    assert result.stdout.split()[-1] == "9.8.7", result.stderr
    assert gla_ext.__version__ == rules.version() == BUILD_INFO["version"]


def test_cmake_reads_the_same_version(tmp_path):
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if cmake is None:
        pytest.skip("needs cmake")
    copy_tree(tmp_path, "CMakeLists.txt", "csrc", "gla_ext/_version.py", "tests/cpp", "examples")
    (tmp_path / "gla_ext" / "_version.py").write_text('__version__ = "9.8.7"\n')
    python = f"-DPython3_EXECUTABLE={sys.executable}"
    result = run(cmake, "-S", ".", "-B", "build", python, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "CMAKE_PROJECT_VERSION:STATIC=9.8.7" in (tmp_path / "build/CMakeCache.txt").read_text()


# Building without torch

WITHOUT_TORCH = (
    "import runpy, sys; sys.modules['torch'] = None; sys.argv = ['setup.py', *sys.argv[1:]]; "
    "runpy.run_path('setup.py', run_name='__main__')"
)


@pytest.mark.parametrize("command", ["build_ext", "dist_info"])
def test_missing_torch_is_one_sentence(tmp_path, command):
    copy_tree(tmp_path, *BUILD_FILES, "gla_ext")
    result = run(sys.executable, "-c", WITHOUT_TORCH, "-q", command, cwd=tmp_path)
    assert result.returncode == 1
    assert "pip install --no-build-isolation -e ." in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


def test_old_torch_is_one_sentence(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.10.1")
    with pytest.raises(SystemExit, match=r"needs torch 2\.11 or newer, got 2\.10\.1"):
        rules.require_torch(None)


def test_sdist_builds_without_torch_and_is_complete(tmp_path):
    folders = ["csrc", "gla_ext", "tests", "benchmarks", "docs", "examples", "experiments", ".ci"]
    names = [*BUILD_FILES, "CMakeLists.txt", "Makefile", ".clang-format"]
    tree = copy_tree(tmp_path / "tree", *names, *folders)
    (tree / "gla_ext" / "_build_info.py").write_text("BUILD_INFO = {}\n")
    (tree / "gla_ext" / "_C.so").touch()
    commit = "0123456789abcdef0123456789abcdef01234567"
    (tree / "COMMIT").write_text(f"{commit}\n")  # as in an sdist that another is made from
    result = run(sys.executable, "-c", WITHOUT_TORCH, "-q", "sdist", cwd=tree)
    assert result.returncode == 0, result.stderr
    (archive,) = (tree / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        packed = {name.partition("/")[2] for name in tar.getnames()}
        top = archive.name.removesuffix(".tar.gz")
        about = tar.extractfile(f"{top}/PKG-INFO").read().decode()
        kept = tar.extractfile(f"{top}/COMMIT").read().decode()
    assert f"\nVersion: {rules.version()}\n" in about
    assert "\nRequires-Dist: torch>=2.11\n" in about
    assert kept == f"{commit}\n"
    suffixes = ".cpp .h .cu .cuh .md .py .pyi .typed .cmake .in .txt .jsonl"
    expected = {
        str(path.relative_to(ROOT))
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in suffixes.split()
    }
    assert expected - packed <= {"gla_ext/_build_info.py"}
    assert set(names) <= packed
    assert not packed & {"gla_ext/_build_info.py", "gla_ext/_C.so"}


def test_old_setuptools_is_one_sentence():
    code = (
        "import runpy, setuptools; setuptools.__version__ = '65.5.0'; "
        "runpy.run_path('setup.py', run_name='__main__')"
    )
    result = run(sys.executable, "-c", code, cwd=ROOT)
    assert result.returncode == 1
    assert result.stderr == (
        "gla_ext needs setuptools 77.0.3 or newer to build, got 65.5.0: "
        "pip install 'setuptools>=77.0.3,<82'\n"
    )
