"""Running commands on this source tree and on copies of it, for the tests of the build."""

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess:
    """Runs a command with output as text, and without the settings of a make around the tests."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    for name in ("PYTHON", "TORCH", "PYTHONPATH"):
        inherited.pop(name, None)
    return subprocess.run(
        command, cwd=cwd, env=inherited | env, capture_output=True, text=True, timeout=120
    )


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
