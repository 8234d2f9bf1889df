"""What the numbers of a page depend on."""

import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"


def require_gpu() -> None:
    """Ends the program, with a message, where torch finds no GPU."""
    if not torch.cuda.is_available():
        sys.exit(f"{Path(sys.argv[0]).name}: expected a CUDA GPU, found none")


def commit() -> str:
    """The tree's commit, and whether csrc, gla_ext or benchmarks have changed since."""

    def git(*command: str) -> str:
        try:
            command = ("git", *command)
            return subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.strip()
        except FileNotFoundError:
            return ""

    changed = git("status", "--porcelain", "--", "csrc", "gla_ext", "benchmarks")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + " + changes" * bool(changed)
