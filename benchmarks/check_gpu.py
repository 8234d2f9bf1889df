"""Checks and times gla_ext on this machine's GPU: `make test-gpu`, or

    python benchmarks/check_gpu.py --out gpu.json
    python benchmarks/check_gpu.py --only speed memory --shapes 32x2048x4x128x256 --fla
    python benchmarks/check_gpu.py --only --sanitizer        # nothing else
    python benchmarks/check_gpu.py --read gpu.json --markdown page.md   # measures nothing

Parts: correctness (pytest -m cuda), speed (beside FLA with --fla), memory, steps (each step
operator, and the kernels of a call), host (time of a call on the CPU), first-call. Whatever is
timed is checked against fp64 first, and nothing is timed where that, or pytest, fails. A short
table comes last; --out takes all numbers as JSON, and logs are written beside it. --markdown
makes a page of them, as benchmarks/RESULTS_CUDA.md is one.

FLA compiles and tunes for 4 to 7 minutes at its first call of a head size (K, V), unless
TRITON_CACHE_DIR holds the result of an earlier run.
"""

import argparse
import dataclasses
import importlib
import importlib.util
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import bench_cuda as bench
import cuda_page
import torch
from timing import Timing

PARTS = ("correctness", "speed", "memory", "steps", "host", "first-call")
SANITIZER_TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
ROOT = Path(__file__).parents[1]


def environment() -> dict[str, str]:
    """What the numbers depend on."""

    def output(*command):
        try:
            return subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.strip()
        except FileNotFoundError:
            return ""

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), "unknown")
    fla = importlib.util.find_spec("fla") and importlib.import_module("fla").__version__
    changed = output("git", "status", "--porcelain", "--", "csrc", "gla_ext", "benchmarks")
    return {
        "GPU": torch.cuda.get_device_name(),
        "CPU": f"{cpu}, {os.cpu_count()} threads",
        "torch": torch.__version__,
        "FLA": fla or "not installed",
        "Python": platform.python_version(),
        "commit": output("git", "rev-parse", "--short", "HEAD") + (" + changes" if changed else ""),
        "command": shlex.join(["python", *sys.argv]),
    }


def run_logged(command: list[str], log: Path, **variables: str) -> tuple[int, str]:
    """The exit code and the output of a command, which also goes to `log`."""
    with log.open("w") as file:  # as it comes, for a run that is stopped
        code = subprocess.run(
            command, cwd=ROOT, env=os.environ | variables, stdout=file, stderr=subprocess.STDOUT
        ).returncode
    return code, log.read_text(errors="replace")


def run_tests(out: Path) -> bool:
    """The tests marked `cuda`; prints the accuracy table and the last lines."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", "--durations=10"]
    code, output = run_logged(command, out.with_suffix(".pytest.log"))
    lines = output.splitlines()
    print(*(x for x in lines if x.startswith("|")), sep="\n")
    failed = [x for x in lines if x.startswith(("FAILED", "ERROR"))]
    print(*failed[:40], *lines[-1:], sep="\n")
    return code == 0


def run_sanitizer(out: Path) -> bool:
    """The tests marked `sanitizer` under every tool of compute-sanitizer."""
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    clean = True
    for tool in SANITIZER_TOOLS:
        command = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--report-api-errors", "no"]
        tests = [sys.executable, "-m", "pytest", "-q", "-m", "sanitizer", "-p", "no:cacheprovider"]
        start, log = time.perf_counter(), out.with_suffix(f".{tool}.log")
        code, output = run_logged(command + tests, log, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        clean &= code == 0
        words = ("SUMMARY", " passed", "FAILED")
        said = [line for line in output.splitlines() if any(x in line for x in words)]
        print(f"{tool}: exit code {code}, {time.perf_counter() - start:.0f} s")
        print(*said[-5:], sep="\n")
    return clean


def run_ncu(shape: str, out: Path) -> bool:
    """Nsight Compute's report on the kernels of one forward + backward, beside `out`."""
    command = ["ncu", "--profile-from-start", "off", "--clock-control", "none", "--set", "full"]
    command += ["--force-overwrite", "--export", str(out.with_suffix(".ncu-rep"))]
    script = [sys.executable, bench.__file__, "once", shape]
    code, output = run_logged(command + script, out.with_suffix(".ncu.log"))
    print(*output.splitlines()[-3:], sep="\n")
    return code == 0


def measure(arguments, results: dict):
    """Every part that was asked for, into `results`."""
    functions = bench.implementations(arguments.fla)
    shapes = {name: bench.parse_shape(name) for name in arguments.shapes}
    for name, shape in shapes.items():
        row = results["shapes"].setdefault(name, {})
        for part, function in (("speed", bench.speed), ("memory", bench.peak_bytes)):
            if part in arguments.only:
                row[part] = function(shape, functions)
                torch.cuda.empty_cache()
    main = next(iter(shapes.values()))
    if "steps" in arguments.only:
        results["steps"] = bench.step_times(main)
        results["kernels"] = bench.kernel_times(main)
    if "host" in arguments.only:
        results["host_us"] = bench.host_us(functions)
    if "first-call" in arguments.only:
        results["first_call_s"] = bench.first_call_in_a_fresh_process()


def report(results: dict) -> list[str]:
    """The short table."""
    lines = [f"{name}: {value}" for name, value in results["environment"].items()]
    if steps := results.get("steps"):
        lines += ["", "steps, ms: " + ", ".join(f"{n} {t.median:.3f}" for n, t in steps.items())]
        for x in results["kernels"]:
            lines.append(f"{x['us']:9.1f} us {x['launches']:3g} x {x['kernel'][:80]}")
    for mode, times in results.get("host_us", {}).items():
        lines.append(f"host, {mode}: " + ", ".join(f"{n} {t:.1f} us" for n, t in times.items()))
    if first := results.get("first_call_s"):
        lines.append("fresh process: " + ", ".join(f"{n} {t:.3f} s" for n, t in first.items()))
    modes = {"forward": "fwd", "forward + backward": "fwd+bwd"}
    heads = [f"{short} ms | FLA | FLA/ours | ours/floor" for short in modes.values()]
    lines += ["", f"| B x T x H x K x V | {' | '.join(heads)} | peak MiB | FLA |"]
    for name, row in results["shapes"].items():
        cells = [name]
        for mode in modes:
            cells += speed_cells(name, mode, row.get("speed", {}).get(mode, {}))
        memory = row.get("memory", {})
        cells += [f"{memory[x] / 2**20:.0f}" if x in memory else "" for x in ("gla_ext", "FLA")]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def speed_cells(shape: str, mode: str, timings: dict[str, Timing]) -> list[str]:
    if not timings:
        return [""] * 4
    ours, fla = timings["gla_ext"], timings.get("FLA")
    floor = bench.floor_ms(bench.parse_shape(shape), "backward" in mode)
    beside = [str(fla), f"{fla.median / ours.median:.2f}"] if fla else ["", ""]
    return [str(ours), *beside, f"{ours.median / floor:.1f}"]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS, help="parts to run")
    parser.add_argument(
        "--shapes", nargs="+", default=list(bench.SHAPES), metavar="BxTxHxKxV",
        help="shapes to time, the first also for --only steps; default: BASELINES",
    )  # fmt: skip
    parser.add_argument("--fla", action="store_true", help="time FLA beside it")
    parser.add_argument("--sanitizer", action="store_true", help="compute-sanitizer, four tools")
    parser.add_argument("--ncu", action="store_true", help="Nsight Compute on the first shape")
    default = ROOT / "runs" / "gpu.json"
    parser.add_argument("--out", type=Path, default=default, help="JSON to write")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="page to write")
    parser.add_argument("--read", type=Path, metavar="JSON", help="only print an earlier run's")
    arguments = parser.parse_args()
    for shape in arguments.shapes:
        try:
            bench.parse_shape(shape)
        except ValueError as error:
            parser.error(str(error))
    return arguments


def main() -> int:
    arguments = parse_arguments()
    if arguments.read:
        return finish(cuda_page.load(arguments.read), arguments)
    if not torch.cuda.is_available():
        print("check_gpu: no CUDA GPU here; nothing was checked", file=sys.stderr)
        return 2
    if arguments.fla and importlib.util.find_spec("fla") is None:
        print("FLA is not installed: its columns stay empty")
        arguments.fla = False
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    results = {"environment": environment(), "shapes": {}}
    good = True
    if "correctness" in arguments.only:
        good = run_tests(arguments.out)
    if arguments.sanitizer:
        good &= run_sanitizer(arguments.out)
    timed = set(arguments.only) - {"correctness"}
    if good and timed:
        needed = arguments.shapes if timed & {"speed", "memory"} else arguments.shapes[:1]
        wrong = bench.check_small()
        for name in needed:
            wrong += bench.check(bench.parse_shape(name))
            torch.cuda.empty_cache()
        good = not wrong
        if wrong:
            print(*wrong, sep="\n")
    if not good:
        print("Wrong results, or a report of the sanitizer: nothing was timed.")
        return 1
    try:
        measure(arguments, results)
    finally:  # what there is
        arguments.out.write_text(json.dumps(results, indent=1, default=dataclasses.asdict))
    if arguments.ncu:
        run_ncu(arguments.shapes[0], arguments.out)
    return finish(results, arguments)


def finish(results: dict, arguments) -> int:
    if arguments.markdown:
        arguments.markdown.write_text(cuda_page.page(results), encoding="utf-8")
    print(*report(results), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
