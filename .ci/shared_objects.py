"""A compiler that takes an object which an earlier build made of the same source, and keeps what it
makes: `python .ci/shared_objects.py FOLDER TORCH COMPILER ARGUMENT...`.

Wheels differ by torch and Python, most objects do not: .cu files include no torch, .cpp files no
Python, but for module.cpp. So one object does for all wheels, for those of a torch, or for one. A
source that includes what it should not ends the build. An object's key is its source, all headers
of csrc/, the flags but for paths, the compiler and, of a .cpp file, the torch.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

# Of a source whose object is shared: no header that it reads has this in its path.
FOREIGN = {".cu": "/torch/include/", ".cpp": "/include/python3"}
HEADERS = (".h", ".cuh")
PYTHON_FLAGS = ("-fno-strict-overflow", "-DNDEBUG")  # of 3.12 and 3.13, but for warnings


def steady(arguments: list[str]) -> list[str]:
    """A .cpp file's arguments, without the flags that the Python itself was built with, which stand
    before -fPIC and differ: 3.11 has -fwrapv.
    """
    start, end = arguments.index("-MF") + 2, arguments.index("-fPIC")
    return [*arguments[:start], *PYTHON_FLAGS, *arguments[end:]]


def flags(arguments: list[str]) -> list[str]:
    """Those that decide what the object is: no paths."""
    takes_path = ("-o", "-MF", "-MT", "-isystem")
    pairs = zip(["", *arguments], arguments, strict=False)
    kept = (x for before, x in pairs if before not in takes_path and x not in takes_path)
    return [x for x in kept if not x.startswith("-I") and not x.endswith((".cpp", ".cu"))]


def key(source: Path, torch: str, compiler: str, arguments: list[str]) -> str:
    """A digest, as the top of this file says."""
    csrc = next(folder for folder in source.parents if folder.name == "csrc")
    digest = hashlib.sha256()
    version = subprocess.check_output([compiler, "--version"])
    told = [*flags(arguments), torch if source.suffix == ".cpp" else ""]
    for part in (version, *map(str.encode, told)):
        digest.update(part + b"\0")
    headers = (path for path in csrc.rglob("*") if path.suffix in HEADERS)
    for path in (source, *sorted(headers)):
        digest.update(f"{path.relative_to(csrc)}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def main(folder: str, torch: str, compiler: str, *arguments: str) -> int:
    source = next((Path(x) for x in arguments if x.endswith((".cpp", ".cu"))), None)
    if source is None or "-c" not in arguments or source.name == "module.cpp":
        return subprocess.call([compiler, *arguments])
    if source.suffix == ".cpp":
        arguments = steady(list(arguments))
    target, read = (Path(arguments[arguments.index(flag) + 1]) for flag in ("-o", "-MF"))
    kept = Path(folder) / f"{key(source, torch, compiler, list(arguments))}.o"
    if kept.exists():
        shutil.copyfile(kept, target)
        read.write_text(f"{target}: {source}\n")
        return 0
    if code := subprocess.call([compiler, *arguments]):
        return code
    if FOREIGN[source.suffix] in (headers := read.read_text()):
        found = next(x for x in headers.split() if FOREIGN[source.suffix] in x)
        target.unlink()
        print(f"{source}: expected an object for every build, got an include of {found}")
        return 1
    kept.parent.mkdir(parents=True, exist_ok=True)
    unfinished = kept.with_suffix(f".{os.getpid()}")
    shutil.copyfile(target, unfinished)
    unfinished.rename(kept)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
