"""Training steps of whole language models, side by side in one run on this machine's GPU.

    python benchmarks/bench_training.py                                # the 374 M model
    python benchmarks/bench_training.py --builds new=. old=../before   # two builds of gla_ext
    python benchmarks/bench_training.py --rows "eager" "autocast" --seconds 4
    python benchmarks/bench_training.py --profile                      # one step by kind of kernel
    python benchmarks/bench_training.py --figure steps.json --draw RESULTS_TRAINING.png

A row is a model and the way its steps run; each build of gla_ext has a process of its own for
its rows. Two layers are checked against fp32 before anything is timed. A step is forward, loss,
backward and a fused AdamW, on one batch; times are sustained: back to back for `--seconds`, after
three steps and a second of the same. A cool step is one after a rest. Host time is that of a step,
and of a layer's forward, of 1 x 64 tokens, for which the GPU waits. A row that fails says so, and
the next has a new process.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from bench_builds import Build, parse_build, use
from pages import training_page
from parts.training_rows import DEFAULT_ROWS, ROWS, SIZES
from shared import utilisation
from shared.machine import require_gpu

FAILED = 3  # exit code of a process after a row that failed and that it has reported


def in_process(folder: str, names: list[str], seconds: float, profiled: bool) -> None:
    """A JSON line a row, as each is done."""
    use(folder)
    from parts.training_steps import measure

    for name in names:
        try:
            result = measure(name, ROWS[name], seconds, profiled)
        except Exception as error:  # of any kind: it is the row's result
            result = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        print(json.dumps({"row": name} | result), flush=True)
        if "failed" in result:
            raise SystemExit(FAILED)
        gc.collect()
        torch.cuda.empty_cache()


def run_build(build: Build, arguments: argparse.Namespace) -> Iterator[dict]:
    """A result a row. After one that failed the others have a process of their own.

    torch.compile's caches are off. They take two graphs of the same operators for one, though the
    rows ask for other kernels of attention, or the builds have other strides and copies.
    """
    environment = os.environ | build.environment | {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    command = [sys.executable, __file__, "--in-process", str(build.folder)]
    command += ["--seconds", str(arguments.seconds), *(["--profile"] * arguments.profile)]
    names = list(arguments.rows)
    while names:
        child = subprocess.Popen(
            [*command, "--rows", *names], stdout=subprocess.PIPE, env=environment
        )
        with child:
            for line in child.stdout:
                if line.startswith(b"{"):
                    yield json.loads(line)
                    names.pop(0)
        if child.returncode not in (0, FAILED):
            if not names:
                return
            yield {"row": names.pop(0), "failed": f"exit code {child.returncode}"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--builds", nargs="+", type=parse_build, help=parse_build.__doc__)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=DEFAULT_ROWS, metavar="ROW")
    parser.add_argument("--seconds", type=float, default=2.5, help="of steps that are timed")
    parser.add_argument("--profile", action="store_true", help="a step of each row by kernels")
    parser.add_argument("--out", type=Path, help="where all results go, a JSON line a row")
    parser.add_argument("--figure", type=Path, help="draw what --out has written; nothing is run")
    parser.add_argument("--size", choices=SIZES, default="374 M", help="of the figure's models")
    parser.add_argument("--draw", type=Path, default=Path("RESULTS_TRAINING.png"))
    parser.add_argument("--in-process", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.in_process:
        return in_process(
            arguments.in_process, arguments.rows, arguments.seconds, arguments.profile
        )
    if arguments.figure:
        lines = arguments.figure.read_text().splitlines()
        return training_page.draw(
            [json.loads(line) for line in lines], arguments.draw, arguments.size
        )
    require_gpu()
    builds = arguments.builds or [Build("gla_ext", Path(__file__).resolve().parents[1], {})]
    results = []
    for build in builds:
        for result in run_build(build, arguments):
            results.append({"build": build.name} | result)
            if arguments.out:
                with arguments.out.open("a") as file:
                    file.write(json.dumps(results[-1]) + "\n")
            print(training_page.table(results[-1:])[-1], flush=True)
    print(torch.cuda.get_device_name(), torch.__version__)
    print(*training_page.table(results), "", utilisation.MEANING, sep="\n")
    print(*training_page.kinds_table(results), sep="\n")
    return None


if __name__ == "__main__":
    main()
