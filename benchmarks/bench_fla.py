"""flash-linear-attention beside gla_ext: what is taken from it, and its tuning.

    TRITON_CACHE_DIR=/some/folder python benchmarks/bench_fla.py

compiles and tunes FLA for all that `check_gpu.py --fla` times but its part others, and leaves the
result in TRITON_CACHE_DIR. That takes 4 to 7 minutes for a head size (K, V), and as long again
where sequences are packed or a head has one gate, so each has a process of its own. With shapes, or
names of cases in shared/bench_cases.py, it does so for these in this process.
"""

import argparse
import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import bench_cuda as bench
import torch
from shared import bench_cases

HIDDEN, HEADS = 1024, 4
LAYERS = ((32, 2048), (8, 2048), (4, 8192))  # B, T
LOGS = Path(__file__).parents[1] / "runs"


def installed() -> bool:
    return importlib.util.find_spec("fla") is not None


def version() -> str:
    return importlib.import_module("fla").__version__ if installed() else "not installed"


def tune_operator(cases: Iterable[bench_cases.Case]) -> None:
    for case in cases:
        bench.call(bench.by_fla, case.draw(), True)()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def tune_layer() -> None:
    """Apart from the operator's own tuning: the layer asks for states of another layout."""
    from shared.inputs import layer_class

    layer = layer_class()(hidden_size=HIDDEN, num_heads=HEADS).to("cuda", torch.bfloat16)
    for B, T in LAYERS:
        x = torch.randn(B, T, HIDDEN, dtype=torch.bfloat16, device="cuda")
        layer(x)[0].sum().backward()
        torch.cuda.synchronize()


def jobs(
    shapes: Iterable[tuple[int, ...]], layer: bool, cases: Iterable[str] = ()
) -> dict[str, list[str]]:
    """Arguments of each process by name: one a head size, and one more where its sequences are
    packed or its heads have one gate, with one shape or case (by its name) for each B, H and dtype
    of gates.
    """
    groups: dict[str, dict[tuple, str]] = {}
    plain = {"x".join(map(str, shape)): bench_cases.Case(*shape) for shape in shapes}
    for name, case in (plain | {name: bench_cases.OTHERS[name] for name in cases}).items():
        job = f"{case.K}x{case.V}" + "_packed" * bool(case.lengths) + "_head" * case.head_gates
        groups.setdefault(job, {}).setdefault((case.B, case.H, case.gate_dtype), name)
    found = {job: list(group.values()) for job, group in groups.items()}
    return found | ({"layer": ["--layer"]} if layer else {})


def tune(
    shapes: Iterable[tuple[int, ...]], layer: bool, logs: Path, cases: Iterable[str] = ()
) -> int:
    """Runs the jobs side by side, each with a log, and returns how many there were.

    Raises:
        RuntimeError: when one of them fails.
    """
    logs.mkdir(parents=True, exist_ok=True)
    processes = {}
    for name, arguments in jobs(shapes, layer, cases).items():
        with (logs / f"tune_{name}.log").open("w") as log:
            command = [sys.executable, __file__, *arguments]
            processes[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    codes = {name: process.wait() for name, process in processes.items()}
    if failed := [name for name, code in codes.items() if code]:
        raise RuntimeError(f"tuning FLA failed, see {logs}/tune_*.log: {', '.join(failed)}")
    return len(codes)


def parse_case(text: str) -> bench_cases.Case:
    return bench_cases.OTHERS.get(text) or bench_cases.Case(*bench.parse_shape(text))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", type=parse_case, metavar="BxTxHxKxV|NAME")
    parser.add_argument("--layer", action="store_true", help="the layer, in this process")
    arguments = parser.parse_args()
    if arguments.layer:
        tune_layer()
    if arguments.cases:
        tune_operator(arguments.cases)
    if not arguments.layer and not arguments.cases:
        count = tune(bench.BASELINES, True, LOGS)
        where = os.environ.get("TRITON_CACHE_DIR", "~/.triton/cache")
        print(f"tuned by {count} processes into {where}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
