"""Builds of gla_ext in turns on this machine's GPU, or one under several environments:

    python benchmarks/bench_builds.py new=. old=../before --shapes 32x2048x4x128x256
    python benchmarks/bench_builds.py kept=. again=.,GLA_EXT_KEEP_OPERANDS=0
    python benchmarks/bench_builds.py new=. old=../before --gates 0.25 --rounds 4

A build is a folder with the package gla_ext and its extension in it. In every round each has a
process of its own, which holds its results against fp64 before it times anything: absolute times
of different runs are worth nothing, and a process's first allocations move its times by a percent.
Forward / forward + backward, medians in ms of each round, each call with a cold L2.
"""

import argparse
import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

from pages.tables import table
from shared.machine import require_gpu

Times = dict[str, tuple[float, float]]  # ms by shape, forward and both ways


@dataclasses.dataclass(frozen=True)
class Build:
    name: str
    folder: Path
    environment: dict[str, str]


def parse_build(text: str) -> Build:
    """NAME=FOLDER[,VARIABLE=VALUE...]"""
    found = re.fullmatch(r"(\w+)=([^,=]+)((?:,\w+=[^,]*)*)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"expected NAME=FOLDER[,VARIABLE=VALUE...], got '{text}'")
    name, folder, rest = found.groups()
    path = Path(folder).resolve()
    if not list(path.glob("gla_ext/_C*.so")):
        raise argparse.ArgumentTypeError(f"expected a folder with a built gla_ext, got '{folder}'")
    pairs = (x.split("=", 1) for x in rest.split(",") if x)
    return Build(name, path, dict(pairs))


def use(folder: str) -> None:
    """Imports gla_ext from a build's folder."""
    sys.path.insert(0, folder)
    import gla_ext

    if Path(gla_ext.__file__).parents[1] != Path(folder):
        raise SystemExit(f"{folder}: gla_ext came from {gla_ext.__file__}")


def measure(folder: str, shapes: list[str], gates: float) -> Times:
    """In the process of a build."""
    use(folder)
    import torch
    from shared import gate
    from shared import operator as bench
    from shared.bench_cases import Case

    from gla_ext import chunk_gla

    times = {}
    for name in shapes:
        x = Case(*bench.parse_shape(name), n=gates).draw()
        if wrong := gate.check_inputs(x, name):
            raise SystemExit("\n".join(wrong))
        runs = bench.time_both_ways(lambda backward, x=x: {"": bench.call(chunk_gla, x, backward)})
        times[name] = tuple(run[""].median for run in runs.values())
        torch.cuda.empty_cache()
    return times


def measure_apart(build: Build, shapes: list[str], gates: float) -> Times:
    command = [sys.executable, __file__, "--in-process", str(build.folder)]
    command += ["--shapes", *shapes, "--gates", str(gates)]
    run = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | build.environment
    )
    if run.returncode != 0:
        raise SystemExit(f"{build.name}: exit code {run.returncode}")
    return json.loads(run.stdout)


def page(rounds: dict[str, list[Times]]) -> list[str]:
    """A table a shape, each build's ratio to the first from the medians over the rounds."""
    first, *_ = rounds
    lines = []
    for shape in rounds[first][0]:
        medians = {
            name: [statistics.median(times[shape][way] for times in own) for way in range(2)]
            for name, own in rounds.items()
        }
        rows = {}
        for name, own in rounds.items():
            ratios = (a / b for a, b in zip(medians[name], medians[first], strict=True))
            cells = (" / ".join(f"{ms:.4f}" for ms in times[shape]) for times in own)
            rows[name] = [" / ".join(f"{ratio:.3f}" for ratio in ratios), ", ".join(cells)]
        lines += table(shape, "", ["of the first", "ms in each round"], rows)
    return lines


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("builds", nargs="*", type=parse_build, help=parse_build.__doc__)
    parser.add_argument("--shapes", nargs="+", default=["32x2048x4x128x256", "8x2048x4x256x512"])
    parser.add_argument(
        "--gates", type=float, default=16, metavar="n", help="logsigmoid(N(0, 1)) / n; default 16"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--in-process", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.in_process:
        return print(json.dumps(measure(arguments.in_process, arguments.shapes, arguments.gates)))
    names = [build.name for build in arguments.builds]
    if not names or len(set(names)) < len(names):
        parser.error("expected builds of different names")
    require_gpu()
    rounds: dict[str, list[Times]] = {name: [] for name in names}
    for _ in range(arguments.rounds):
        for build in arguments.builds:
            rounds[build.name].append(measure_apart(build, arguments.shapes, arguments.gates))
    print(*page(rounds), sep="\n")


if __name__ == "__main__":
    main()
