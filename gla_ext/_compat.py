"""Checks whether the extension that setup.py built fits this Python, torch and processor.

Runs before gla_ext._C is loaded: a mismatch then gives a clear error instead of an undefined
symbol.
"""

import importlib.util
import platform
import sys
from collections.abc import Iterable, Mapping
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

try:
    from gla_ext._build_info import BUILD_INFO
except ModuleNotFoundError:  # written by setup.py
    BUILD_INFO = None

REBUILD = "run 'make build', or 'pip install --no-build-isolation -e .', in its source folder"


def mismatch(
    built: Mapping[str, object] | None,
    torch_version: str,
    torch_cuda: str | None,
    python: str,
    machine: str,
) -> str | None:
    """The error message if the extension cannot be loaded, or None if it can.

    built: BUILD_INFO of the generated gla_ext/_build_info.py, None if it was never built. python:
    the interpreter's major and minor version, such as "3.12".
    """
    if built is None:
        return f"gla_ext is not built yet: {REBUILD}."
    if built["python"] != python:
        return (
            f"gla_ext was built for Python {built['python']}, this is Python {python}: {REBUILD}."
        )
    if built["machine"] != machine:
        return f"gla_ext was built for {built['machine']}, this is {machine}: {REBUILD}."
    if minor_version(built["torch"]) != minor_version(torch_version):
        return (
            f"gla_ext was built against torch {built['torch']}, and torch {torch_version} is "
            f"installed now: {REBUILD}."
        )
    if (
        built["cuda"] is not None
        and minor_version(built["cuda"])[0] != minor_version(torch_cuda)[0]
    ):
        return (
            f"gla_ext was built for CUDA {built['cuda']}, and the installed torch {torch_version} "
            f"uses {f'CUDA {torch_cuda}' if torch_cuda else 'no CUDA'}: {REBUILD}."
        )
    return None


def shadowed(package: Path, search_path: Iterable[str]) -> str | None:
    """The error message if gla_ext was imported from a source folder without an extension, and that
    folder hides an installed gla_ext in one of the folders of search_path (sys.path); else None.
    """
    for folder in search_path:
        other = Path(folder or ".") / package.name
        if other.resolve() != package.resolve() and any(
            (other / f"_C{suffix}").is_file() for suffix in EXTENSION_SUFFIXES
        ):
            return (
                f"gla_ext is imported from the source folder {package.parent}, which has no "
                f"extension, and hides the one installed in {other.parent}: start Python in "
                "another folder, or run 'pip install --no-build-isolation -e .' in this one."
            )
    return None


def minor_version(version: str | None) -> tuple[str, ...]:
    """The part of a version that decides binary compatibility: ("2", "11") for "2.11.0+cu130"."""
    return tuple((version or "0.0").split(".")[:2])


def check_build() -> None:
    """Raises ImportError, with the message of `mismatch`, if gla_ext._C cannot be loaded."""
    import torch

    built = BUILD_INFO if importlib.util.find_spec("gla_ext._C") is not None else None
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    sentence = mismatch(built, torch.__version__, torch.version.cuda, python, platform.machine())
    if built is None:
        sentence = shadowed(Path(__file__).parent, sys.path) or sentence
    if sentence is not None:
        raise ImportError(sentence)
