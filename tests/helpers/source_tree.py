"""Running commands on this source tree and on copies of it, and its files that are no modules."""

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess:
    """Runs a command with output as text, and without the settings of a make around the tests."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    for name in ("PYTHON", "TORCH", "PYTHONPATH"):
        inherited.pop(name, None)
    return subprocess.run(
        command, cwd=cwd, env=inherited | env, capture_output=True, text=True, timeout=120
    )


def load_module(name: str) -> ModuleType:
    """A Python file of the tree, imported without its folder on the path."""
    spec = importlib.util.spec_from_file_location(f"gla_ext_{Path(name).stem}", ROOT / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def copy_tree(target: Path, *names: str) -> Path:
    """Copies sources, without what was built from them."""
    built = shutil.ignore_patterns("*.so", "_build_info.py", "__pycache__")
    for name in names:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=built)
        else:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target
