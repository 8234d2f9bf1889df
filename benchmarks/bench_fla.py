"""flash-linear-attention beside gla_ext: what is taken from it, and its tuning.

    TRITON_CACHE_DIR=/some/folder python benchmarks/bench_fla.py

compiles and tunes FLA for all that `check_gpu.py --fla` times, and leaves the result in
TRITON_CACHE_DIR. That takes 4 to 7 minutes for a head size (K, V), and as long again where
sequences are packed or a head has one gate, so each has a process of its own. With shapes, or names
of cases in shared/bench_cases.py, it does so for these in this process.
"""

import argparse
import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import torch
from shared import operator as bench
from shared.bench_cases import OTHERS, Case
from shared.inputs import layer_class
from shared.machine import require_gpu

HIDDEN, HEADS = 1024, 4
LAYERS = ((32, 2048), (8, 2048), (4, 8192))  # B, T
LOGS = Path(__file__).parents[1] / "runs"


def installed() -> bool:
    return importlib.util.find_spec("fla") is not None


def version() -> str:
    return importlib.import_module("fla").__version__ if installed() else "not installed"


def tune_layer() -> None:
    """Apart from the operator's own tuning: the layer asks for states of another layout."""
    layer = layer_class()(hidden_size=HIDDEN, num_heads=HEADS).to("cuda", torch.bfloat16)
    for B, T in LAYERS:
        x = torch.randn(B, T, HIDDEN, dtype=torch.bfloat16, device="cuda")
        layer(x)[0].sum().backward()
        torch.cuda.synchronize()


def jobs() -> dict[str, list[str]]:
    """Arguments of each process by name: one a head size, and one more where its sequences are
    packed or its heads have one gate, with one shape or case (by its name) for each B, H and dtype
    of gates.
    """
    groups: dict[str, dict[tuple, str]] = {}
    plain = {bench.name_of(shape): Case(*shape) for shape in bench.BASELINES}
    for name, case in (plain | OTHERS).items():
        job = f"{case.K}x{case.V}" + "_packed" * bool(case.lengths) + "_head" * case.head_gates
        groups.setdefault(job, {}).setdefault((case.B, case.H, case.gate_dtype), name)
    return {job: list(group.values()) for job, group in groups.items()} | {"layer": ["--layer"]}


def tune_all() -> int:
    """Runs the jobs side by side, each with a log, and returns how many there were."""
    LOGS.mkdir(parents=True, exist_ok=True)
    processes = {}
    for name, arguments in jobs().items():
        with (LOGS / f"tune_{name}.log").open("w") as log:
            command = [sys.executable, __file__, *arguments]
            processes[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    if failed := [name for name, process in processes.items() if process.wait()]:
        raise RuntimeError(f"tuning FLA failed, see {LOGS}/tune_*.log: {', '.join(failed)}")
    return len(processes)


def parse_case(text: str) -> Case:
    return OTHERS.get(text) or Case(*bench.parse_shape(text))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", type=parse_case, metavar="BxTxHxKxV|NAME")
    parser.add_argument("--layer", action="store_true", help="the layer, in this process")
    arguments = parser.parse_args()
    require_gpu()
    if arguments.layer:
        tune_layer()
    for case in arguments.cases:
        bench.call(bench.by_fla, case.draw(), True)()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    if not arguments.layer and not arguments.cases:
        count = tune_all()
        where = os.environ.get("TRITON_CACHE_DIR", "~/.triton/cache")
        print(f"tuned by {count} processes into {where}")


if __name__ == "__main__":
    main()
