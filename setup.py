"""Builds gla_ext._C: the CPU kernels once per CPU capability, all else once, CUDA with nvcc.

Metadata stands in pyproject.toml, but for the version and the required torch: an sdist fits every
torch from MIN_TORCH on, what is compiled fits one minor version. Environment variables read here:
    TORCH_CUDA_ARCH_LIST, else GLA_EXT_CUDA_ARCHS: the GPU architectures to build for.
    FORCE_CUDA: 1 fails when CUDA cannot be built, 0 builds the CPU backend only.
    MAX_JOBS: compiler processes at once (ninja's default: processors + 2).
    GLA_EXT_LOCAL_VERSION: 1 adds torch and CUDA to the version, 0.3.0+torch2.11.cu130. Default 1,
        but 0 in an unpacked sdist: pip refuses a wheel of another version than the sdist's name.
    GLA_EXT_WERROR_SPILLS: 1 fails where a CUDA kernel spills registers; for CI, not for users.
    GLA_EXT_SANITIZE: 1 builds with the sanitizers that `make sanitize` loads.
"""

import os
import platform
import pprint
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

if tuple(int(part) for part in setuptools.__version__.split(".")[:2]) < (77, 0):
    raise SystemExit(
        f"gla_ext needs setuptools 77.0.3 or newer to build, got {setuptools.__version__}: "
        "pip install 'setuptools>=77.0.3,<82'"
    )

ROOT = Path(__file__).resolve().parent
MIN_TORCH = (2, 11)
# setuptools' commands whose result holds the compiled extension, or describes it.
WHEEL_COMMANDS = {"bdist_wheel", "dist_info", "editable_wheel"}
# A change in any of these makes another wheel than their commit does.
WHEEL_FILES = ("csrc", "gla_ext", "setup.py", "pyproject.toml", "README.md", "LICENSE")

CPU_CAPABILITY_FLAGS = {
    "DEFAULT": [],
    "AVX2": ["-mavx2", "-mfma", "-mf16c"],
    "AVX512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"],
}
# torch's vector headers warn by the hundred under -Wall.
KERNEL_WARNINGS = ["-Wno-unknown-pragmas", "-Wno-maybe-uninitialized"]
KERNEL_WARNINGS += ["-Wno-aggressive-loop-optimizations"]
SANITIZED = os.environ.get("GLA_EXT_SANITIZE") == "1"
SANITIZE = ["-fsanitize=address,undefined", "-fno-omit-frame-pointer", "-g1"] * SANITIZED
LINK_FLAGS = ["-fopenmp", *SANITIZE]
if platform.machine() == "x86_64" and platform.libc_ver()[0] == "glibc":  # csrc/common/glibc.cpp
    wrap = ["exp", "exp2", "log", "log2", "pow", "pthread_rwlock_wrlock", "pthread_rwlock_unlock"]
    LINK_FLAGS += [f"-Wl,--wrap={name}" for name in wrap]
CXX_FLAGS = ["-O3", "-g0", "-fopenmp", "-Wall", *SANITIZE]
NVCC_FLAGS = ["-O3", "-std=c++17"]  # the same for every torch, so that wheels share objects
COMPRESS = "--compress-mode=size"  # nvcc knows it from 12.8 on
SPILLS_ARE_ERRORS = ["-Xptxas", "-warn-spills", "-Xptxas", "-Werror"]
# Without CUDA or torch headers, for plans of GPUs that are not there.
CUDA_PLAN = "csrc/cuda/plan/"
CPU_KERNELS = "csrc/cpu/kernels/"

# torch's names for the architectures that the CUDA kernels support (sm_80 and up).
NAMED_ARCHS = {
    "Ampere+Tegra": "8.7",
    "Ampere": "8.0;8.6+PTX",
    "Ada": "8.9+PTX",
    "Hopper": "9.0+PTX",
    "Blackwell+Tegra": "11.0",
    "Blackwell": "10.0;10.3;12.0;12.1+PTX",
}


def version() -> str:
    """The version in gla_ext/_version.py, read without importing the package."""
    text = (ROOT / "gla_ext" / "_version.py").read_text()
    return re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE).group(1)


def wheel_metadata(torch_version: str, cuda: str | None, local: bool) -> tuple[str, str]:
    """The version of what is compiled for a torch, and CUDA or None, and the torch it requires."""
    minor = ".".join(torch_version.split(".")[:2])
    suffix = f"+torch{minor}." + (f"cu{cuda.replace('.', '')}" if cuda else "cpu")
    return version() + (suffix if local else ""), f"torch=={minor}.*"


def commit(root: Path = ROOT) -> str:
    """The git commit of the sources in root, with "-dirty" behind it where WHEEL_FILES differ.

    An sdist has its commit in a file COMMIT instead. Without either, or without git: "unknown".
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True).strip()

    try:
        # Only root's own repository: an unpacked sdist may lie inside that of something else.
        if (root / ".git").exists():
            dirty = git("status", "--porcelain", "--", *WHEEL_FILES)
            return git("rev-parse", "HEAD") + ("-dirty" if dirty else "")
        return (root / "COMMIT").read_text().strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def sources() -> dict[str, list[str]]:
    """The source files: `common` is compiled once, `kernels` per capability, `cuda` with CUDA."""
    files = sorted(str(f.relative_to(ROOT)) for f in (ROOT / "csrc").rglob("*.*"))
    headers = [f for f in files if f.endswith((".h", ".cuh"))]
    every = [f for f in files if f.endswith((".cu", ".cpp"))]
    kernels = [f for f in every if f.startswith(CPU_KERNELS) or f.endswith("/cpu_kernels.cpp")]
    cuda = [f for f in every if f.startswith("csrc/cuda/") or f.endswith((".cu", "/cuda.cpp"))]
    cuda = [f for f in cuda if not f.startswith(CUDA_PLAN)]
    common = [f for f in every if f not in kernels and f not in cuda]
    return {"common": common, "kernels": kernels, "cuda": cuda, "headers": headers}


def cpu_capabilities(machine: str) -> list[str]:
    """The capabilities the kernels are compiled for, weakest first; run time picks one."""
    return list(CPU_CAPABILITY_FLAGS) if machine in ("x86_64", "AMD64") else ["DEFAULT"]


def capability_flags(capability: str) -> list[str]:
    """Compiler flags of one capability: the macros at::vec looks at, and the instruction sets."""
    macros = [f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}"]
    return macros + KERNEL_WARNINGS + CPU_CAPABILITY_FLAGS[capability]


def nvcc_flags(env: dict[str, str], release: tuple[int, int], archs: list[str]) -> list[str]:
    """Flags of that release of nvcc. One with "arch" in it switches TORCH_CUDA_ARCH_LIST off."""
    compress = [COMPRESS] if release >= (12, 8) else []
    spills = SPILLS_ARE_ERRORS if env.get("GLA_EXT_WERROR_SPILLS") == "1" else []
    # PTX keeps the option, and the driver of another GPU obeys it.
    if spills and (ptx := [arch for arch in archs if re.fullmatch(r"[\d.]+\+PTX", arch)]):
        raise SystemExit(f"GLA_EXT_WERROR_SPILLS: expected no PTX for other GPUs, got {ptx}.")
    return NVCC_FLAGS + compress + spills


def default_cuda_archs(cuda: str) -> list[str]:
    """A100, H100, and everything newer through PTX; nvcc knows 10.0 from CUDA 12.8 on."""
    major, minor = (int(part) for part in cuda.split(".")[:2])
    newest = ["10.0+PTX"] if (major, minor) >= (12, 8) else ["9.0+PTX"]
    return ["8.0", "9.0a", *newest]


def cuda_archs(env: dict[str, str], cuda: str, visible: list[str] | None = None) -> list[str]:
    """The architectures to build for, in the form TORCH_CUDA_ARCH_LIST takes.

    Args:
        env: the environment. TORCH_CUDA_ARCH_LIST wins over GLA_EXT_CUDA_ARCHS, which wins over
            the default. Both take torch's syntax, names included.
        cuda: the CUDA version torch was built for, such as "13.0".
        visible: capabilities of the GPUs at hand, which "native" stands for; default none.

    Returns:
        A list without repeats. 9.0 becomes 9.0a, because only sm_90a has wgmma, and 9.0+PTX becomes
        9.0a and 9.0+PTX, because PTX of 90a runs on no other GPU. What is below 8.0 is left out.

    Raises:
        SystemExit: nothing is left, or an entry is not an architecture.
    """
    name = "TORCH_CUDA_ARCH_LIST" if env.get("TORCH_CUDA_ARCH_LIST") else "GLA_EXT_CUDA_ARCHS"
    asked = env.get(name, "")
    if asked in ("", "native"):
        entries = (visible or []) if asked else []
        entries = entries or default_cuda_archs(cuda)
    else:
        entries = re.split(r"[ ,;]+", asked.strip(" ,;"))
        entries = [part for e in entries for part in NAMED_ARCHS.get(e, e).split(";")]
    archs = []
    for entry in entries:
        match = re.fullmatch(r"(\d+)\.(\d)[af]?(\+PTX)?", entry)
        if not match:
            raise SystemExit(f"{name}: expected architectures as '8.0;9.0a+PTX', got '{entry}'.")
        if int(match[1]) >= 8:
            archs += {"9.0": ["9.0a"], "9.0+PTX": ["9.0a", "9.0+PTX"]}.get(entry, [entry])
    if not archs:
        raise SystemExit(f"{name}: gla_ext needs compute capability 8.0 or higher, got '{asked}'.")
    return list(dict.fromkeys(archs))


def cuda_decision(
    force: str | None, nvcc: str | None, torch_cuda: str | None, has_sources: bool
) -> tuple[bool, str]:
    """Whether to build the CUDA backend, and the line that says so.

    Args:
        force: FORCE_CUDA, "1", "0" or unset.
        nvcc: path of the CUDA compiler, None where there is none.
        torch_cuda: torch.version.cuda.
        has_sources: whether csrc/cuda holds sources.

    Raises:
        SystemExit: FORCE_CUDA=1 asks for what cannot be built.
    """
    if force == "0":
        return False, "gla_ext: building the CPU backend only (FORCE_CUDA=0)."
    missing = None
    if not has_sources:
        missing = "this version has no CUDA sources"
    elif torch_cuda is None:
        missing = "the installed torch was built without CUDA"
    elif nvcc is None:
        missing = "nvcc was not found (set CUDA_HOME)"
    if missing is None:
        return True, f"gla_ext: building the CPU and CUDA backends with {nvcc}."
    if force == "1":
        raise SystemExit(f"gla_ext: FORCE_CUDA=1, but {missing}.")
    return False, f"gla_ext: building the CPU backend only: {missing}."


def require_torch(error: ImportError | None) -> None:
    """Stops with one sentence where torch is missing or too old to build against."""
    if error is not None:
        raise SystemExit(
            "gla_ext is built against the torch you have, and none can be imported here "
            f"({error}): install torch first, then run 'pip install --no-build-isolation -e .'"
        )
    import torch

    found = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if found < MIN_TORCH:
        raise SystemExit(f"gla_ext needs torch 2.11 or newer, got {torch.__version__}.")


def find_nvcc() -> str | None:
    """nvcc of the toolkit that torch's build rules will use."""
    from torch.utils.cpp_extension import CUDA_HOME

    return shutil.which("nvcc", path=os.path.join(CUDA_HOME, "bin")) if CUDA_HOME else None


def nvcc_release(nvcc: str) -> tuple[int, int]:
    """The version that nvcc says it has, such as (13, 0)."""
    text = subprocess.check_output([nvcc, "--version"], text=True)
    return tuple(map(int, re.search(r"release (\d+)\.(\d+)", text).groups()))


def decide_cuda() -> tuple[bool, str]:
    """`cuda_decision` for this environment."""
    import torch

    has_sources = bool(sources()["cuda"])
    return cuda_decision(os.environ.get("FORCE_CUDA"), find_nvcc(), torch.version.cuda, has_sources)


def metadata(arguments: list[str]) -> tuple[str, str]:
    """The version and the requirement of torch, for the commands in setup.py's arguments."""
    if not WHEEL_COMMANDS & set(arguments):
        return version(), f"torch>={'.'.join(map(str, MIN_TORCH))}"
    if "sdist" in arguments:
        raise SystemExit("gla_ext: expected an sdist or a wheel, got both in one command.")
    import torch

    default = "0" if (ROOT / "PKG-INFO").exists() else "1"
    local = os.environ.get("GLA_EXT_LOCAL_VERSION", default) == "1"
    cuda = torch.version.cuda if decide_cuda()[0] else None
    return wheel_metadata(torch.__version__, cuda, local)


def make_extension() -> tuple[Extension, dict[str, object]]:
    """The extension without the kernels' objects, and what _build_info.py will say of it."""
    import torch
    from torch.utils.cpp_extension import CppExtension, CUDAExtension

    files = sources()
    with_cuda, message = decide_cuda()
    archs, macros, nvcc = [], [], []
    if with_cuda:
        gpus = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
        visible = sorted({f"{major}.{minor}" for major, minor in gpus})
        archs = cuda_archs(dict(os.environ), torch.version.cuda, visible)
        os.environ["TORCH_CUDA_ARCH_LIST"] = ";".join(archs)
        message = f"{message} For {', '.join(archs)}."
        macros = [f'-DGLA_EXT_CUDA="{torch.version.cuda}"']
        macros += [f'-DGLA_EXT_CUDA_ARCHS="{";".join(archs)}"']
        nvcc = nvcc_flags(dict(os.environ), nvcc_release(find_nvcc()), archs)
    compiled = files["common"] + (files["cuda"] if with_cuda else [])
    capabilities = cpu_capabilities(platform.machine())
    count = len(compiled) + len(files["kernels"]) * len(capabilities)
    print(message, f"{count} files.", file=sys.stderr)
    extension = (CUDAExtension if with_cuda else CppExtension)(
        "gla_ext._C",
        compiled,
        include_dirs=[str(ROOT / "csrc")],
        extra_compile_args={"cxx": CXX_FLAGS + macros, "nvcc": nvcc},
        extra_link_args=LINK_FLAGS,
        depends=files["headers"],
    )
    info = {
        "version": version(),
        "commit": commit(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if with_cuda else None,
        "cuda_archs": archs,
        "cpu_capabilities": capabilities,
        "machine": platform.machine(),
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
    }
    return extension, info


def torch_build_ext() -> type[build_ext]:
    """torch's BuildExtension, which also compiles the kernels once per CPU capability."""
    import torch
    from torch.utils.cpp_extension import BuildExtension

    class BuildExt(BuildExtension):
        user_options: ClassVar = [
            *BuildExtension.user_options,
            ("cuda-only", None, "compile the .cu files and link nothing"),
        ]
        boolean_options: ClassVar = [*BuildExtension.boolean_options, "cuda-only"]

        def initialize_options(self) -> None:
            super().initialize_options()
            self.cuda_only = False

        def finalize_options(self) -> None:
            # One folder for a torch version also under `pip install -e`, whose own is temporary:
            # a second build then compiles only what changed.
            super().finalize_options()
            tag = f"{sys.implementation.cache_tag}-torch-{torch.__version__}"
            self.build_temp = str(ROOT / ".build" / (tag + "-sanitized" * SANITIZED))

        def run(self) -> None:
            # Only now: sdist finalizes this command too, and decides nothing about CUDA.
            extension, self.info = make_extension()
            vars(self.extensions[0]).update(vars(extension))
            if self.cuda_only:
                if not self.info["cuda_archs"]:
                    raise SystemExit("gla_ext: --cuda-only, but CUDA is not built here.")
                self.inplace = False
                self.build_temp += "-cuda-" + "-".join(self.info["cuda_archs"])
            super().run()
            if self.cuda_only:
                return
            folder = ROOT if self.inplace else Path(self.build_lib)
            text = pprint.pformat(self.info, sort_dicts=False)
            header = '"""Written by setup.py when the extension was built."""\n\n'
            (folder / "gla_ext" / "_build_info.py").write_text(f"{header}BUILD_INFO = {text}\n")

        def build_extension(self, ext: Extension) -> None:
            if self.cuda_only:
                self.compiler.compile(
                    [f for f in sources()["cuda"] if f.endswith(".cu")],
                    output_dir=self.build_temp,
                    include_dirs=ext.include_dirs,
                    extra_postargs=ext.extra_compile_args,
                    depends=ext.depends,
                )
                return
            # The linker keeps the first copy of an inline function that several objects hold, so
            # the weakest capability goes first: no AVX-512 copy may serve the code of another.
            for capability in self.info["cpu_capabilities"]:
                ext.extra_objects += self.compiler.compile(
                    sources()["kernels"],
                    output_dir=os.path.join(self.build_temp, capability),
                    include_dirs=ext.include_dirs,
                    extra_postargs=CXX_FLAGS + capability_flags(capability),
                    depends=ext.depends,
                )
            super().build_extension(ext)

    return BuildExt


def main() -> None:
    try:
        build, error = torch_build_ext(), None
    except ImportError as e:
        build, error = build_ext, e

    class BuildExt(build):
        def run(self) -> None:
            require_torch(error)
            super().run()

    class Sdist(sdist):
        def make_release_tree(self, base_dir: str, files: list[str]) -> None:
            super().make_release_tree(base_dir, files)
            (Path(base_dir) / "COMMIT").write_text(f"{commit()}\n")

    # pip asks for the metadata first: stop here, before it downloads a torch of its own.
    if WHEEL_COMMANDS & set(sys.argv):
        require_torch(error)
    full_version, requirement = metadata(sys.argv[1:])
    setup(
        version=full_version,
        install_requires=[requirement],
        ext_modules=[Extension("gla_ext._C", [])],
        cmdclass={"build_ext": BuildExt, "sdist": Sdist},
        options={"build": {"build_base": ".build"}},
    )


if __name__ == "__main__":
    main()
