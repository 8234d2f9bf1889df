"""setup.py: CUDA rules, sources, the one version, the sdist, and a build without torch."""

import sys
import tarfile
from pathlib import Path

import pytest
import torch
from source_tree import ROOT, copy_tree, load_module, run

import gla_ext
from gla_ext._build_info import BUILD_INFO

BUILD_FILES = ["setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md", "CHANGELOG.md"]
NVCC = "/opt/cuda/bin/nvcc"

rules = load_module("setup.py")


@pytest.mark.parametrize(
    ("asked", "cuda", "expected"),
    [
        ("9.0", "13.0", ["9.0a"]),
        ("9.0a", "13.0", ["9.0a"]),
        ("9.0+PTX", "13.0", ["9.0a", "9.0+PTX"]),
        ("Hopper", "13.0", ["9.0a", "9.0+PTX"]),
        ("8.0;9.0", "13.0", ["8.0", "9.0a"]),
        ("8.0 8.6, 9.0a;9.0", "13.0", ["8.0", "8.6", "9.0a"]),
        ("7.0;7.5;8.0+PTX", "13.0", ["8.0+PTX"]),
        ("Ampere", "13.0", ["8.0", "8.6+PTX"]),
        ("10.0;12.0+PTX", "13.0", ["10.0", "12.0+PTX"]),
        ("", "13.0", ["8.0", "9.0a", "10.0+PTX"]),
        ("", "12.8", ["8.0", "9.0a", "10.0+PTX"]),
        ("native", "12.6", ["8.0", "9.0a", "9.0+PTX"]),  # where no GPU is
        ("7.5", "13.0", "needs compute capability 8.0 or higher, got '7.5'"),
        ("sm_90", "13.0", "got 'sm_90'"),
    ],
)
def test_cuda_archs(asked, cuda, expected):
    for name in ("TORCH_CUDA_ARCH_LIST", "GLA_EXT_CUDA_ARCHS"):
        if isinstance(expected, str):
            with pytest.raises(SystemExit, match=f"{name}: .*{expected}"):
                rules.cuda_archs({name: asked}, cuda)
        else:
            assert rules.cuda_archs({name: asked}, cuda) == expected


def test_cuda_archs_of_two_variables_and_of_the_gpus_at_hand():
    env = {"TORCH_CUDA_ARCH_LIST": "8.9", "GLA_EXT_CUDA_ARCHS": "8.0"}
    assert rules.cuda_archs(env, "13.0") == ["8.9"]
    env = {"TORCH_CUDA_ARCH_LIST": "native"}
    assert rules.cuda_archs(env, "13.0", visible=["9.0", "10.0"]) == ["9.0a", "10.0"]
    assert rules.cuda_archs({}, "13.0", visible=["8.6"]) == rules.default_cuda_archs("13.0")


def test_nvcc_flags(tmp_path):
    """Compressed code where nvcc can; a spill fails a build that asks for it, but not the driver's
    translation of its PTX.
    """
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    nvcc.chmod(0o755)
    assert rules.nvcc_release(str(nvcc)) == (13, 0)
    assert rules.nvcc_flags({}, (12, 6), []) == rules.NVCC_FLAGS
    for release in ((12, 8), (13, 0)):
        assert rules.nvcc_flags({}, release, ["8.0+PTX"]).count("--compress-mode=size") == 1
    asked = {"GLA_EXT_WERROR_SPILLS": "1"}, (13, 0)
    flags = rules.nvcc_flags(*asked, ["8.0", "9.0a+PTX"])
    assert "-warn-spills -Xptxas -Werror" in " ".join(flags)
    assert not [flag for flag in flags if "arch" in flag]
    with pytest.raises(SystemExit, match=r"no PTX for other GPUs, got \['8.0\+PTX'\]"):
        rules.nvcc_flags(*asked, ["8.0+PTX", "9.0a"])


@pytest.mark.parametrize(
    ("nvcc", "cuda", "has_sources", "missing"),
    [
        (NVCC, "13.0", True, None),
        (None, "13.0", True, "nvcc was not found"),
        (NVCC, None, True, "the installed torch was built without CUDA"),
        (NVCC, "13.0", False, "this version has no CUDA sources"),
    ],
)
def test_cuda_decision(nvcc, cuda, has_sources, missing):
    def decide(force):
        use, message = rules.cuda_decision(force, nvcc, cuda, has_sources)
        assert "\n" not in message
        return use, message

    use, message = decide("0")
    assert not use and "FORCE_CUDA=0" in message
    use, message = decide(None)
    if missing is None:
        assert use and f"CPU and CUDA backends with {NVCC}" in message
        assert decide("1") == (use, message)
    else:
        assert not use and f"CPU backend only: {missing}" in message
        with pytest.raises(SystemExit, match=f"FORCE_CUDA=1, but {missing}"):
            decide("1")


def test_no_two_sources_have_one_object():
    found = rules.sources()
    files = [*found["common"], *found["kernels"], *found["cuda"]]
    objects = [str(Path(file).with_suffix(".o")) for file in files]
    assert len({*objects}) == len(objects)


def test_capabilities_are_ordered_weakest_first():
    assert rules.cpu_capabilities("x86_64") == ["DEFAULT", "AVX2", "AVX512"]
    assert rules.cpu_capabilities("aarch64") == ["DEFAULT"]
    assert "-mavx512f" not in rules.capability_flags("AVX2")
    default = rules.capability_flags("DEFAULT")
    assert default[:2] == ["-DCPU_CAPABILITY=DEFAULT", "-DCPU_CAPABILITY_DEFAULT"]
    assert not [flag for flag in default if flag.startswith("-m")]


@pytest.mark.slow
def test_version_has_one_source(tmp_path):
    copy_tree(tmp_path, *BUILD_FILES[:2], "gla_ext/_version.py")
    (tmp_path / "README.md").touch()
    (tmp_path / "LICENSE").touch()
    (tmp_path / "gla_ext" / "_version.py").write_text('__version__ = "9.8.7"\n')
    result = run(sys.executable, "setup.py", "--version", cwd=tmp_path)
    assert result.stdout.split()[-1] == "9.8.7", result.stderr
    assert gla_ext.__version__ == rules.version() == BUILD_INFO["version"]
    assert "file(STRINGS gla_ext/_version.py " in (ROOT / "CMakeLists.txt").read_text()


START = "; sys.argv = ['setup.py', *sys.argv[1:]]; runpy.run_path('setup.py', run_name='__main__')"
WITHOUT_TORCH = "import runpy, sys; sys.modules['torch'] = None" + START
OLD_SETUPTOOLS = "import runpy, setuptools, sys; setuptools.__version__ = '65.5.0'" + START


@pytest.mark.parametrize(
    ("code", "command", "sentence"),
    [
        (WITHOUT_TORCH, "build_ext", "pip install --no-build-isolation -e ."),
        (WITHOUT_TORCH, "dist_info", "pip install --no-build-isolation -e ."),
        (
            OLD_SETUPTOOLS,
            "build_ext",
            "gla_ext needs setuptools 77.0.3 or newer to build, got 65.5.0: "
            "pip install 'setuptools>=77.0.3,<82'",
        ),
    ],
)
def test_what_is_missing_is_one_sentence(tmp_path, code, command, sentence):
    copy_tree(tmp_path, *BUILD_FILES, "gla_ext")
    result = run(sys.executable, "-c", code, "-q", command, cwd=tmp_path)
    assert result.returncode == 1
    assert sentence in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


def test_old_torch_is_one_sentence(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.10.1")
    with pytest.raises(SystemExit, match=r"needs torch 2\.11 or newer, got 2\.10\.1"):
        rules.require_torch(None)


@pytest.mark.slow
def test_sdist_builds_without_torch_and_is_complete(tmp_path):
    folders = ["csrc", "gla_ext", "tests", "benchmarks", "docs", "examples", "experiments", ".ci"]
    folders += [".github"]
    names = [*BUILD_FILES, "CMakeLists.txt", "Makefile", ".clang-format"]
    names += [".pre-commit-config.yaml", "CITATION.cff"]
    tree = copy_tree(tmp_path / "tree", *names, *folders)
    built = {"gla_ext/_build_info.py", "gla_ext/_C.so"}
    for name in built:
        (tree / name).touch()
    commit = f"{'0123456789abcdef' * 2}01234567\n"
    (tree / "COMMIT").write_text(commit)  # as in an sdist that another is made from
    result = run(sys.executable, "-c", WITHOUT_TORCH, "-q", "sdist", cwd=tree)
    assert result.returncode == 0, result.stderr
    (archive,) = (tree / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        packed = {name.partition("/")[2] for name in tar.getnames()}
        top = archive.name.removesuffix(".tar.gz")
        about, kept = (
            tar.extractfile(f"{top}/{name}").read().decode() for name in ("PKG-INFO", "COMMIT")
        )
    assert f"\nVersion: {rules.version()}\n" in about
    assert "\nRequires-Dist: torch>=2.11\n" in about
    assert "\nProject-URL: Paper, https://arxiv.org/abs/2312.06635\n" in about
    assert kept == commit
    suffixes = ".cpp .h .cu .cuh .md .py .pyi .typed .cmake .in .txt .jsonl .yml"
    files = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    expected = {str(path.relative_to(ROOT)) for path in files if path.suffix in suffixes.split()}
    assert {*names, *expected} - built <= packed
    assert not packed & built
