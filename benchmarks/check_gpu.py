"""Checks and times gla_ext on this machine's GPU: `make test-gpu`, or

    python benchmarks/check_gpu.py --out gpu.json
    python benchmarks/check_gpu.py --only speed memory --shapes 32x2048x4x128x256 --fla
    python benchmarks/check_gpu.py --only attention layer operators plot --compile
    python benchmarks/check_gpu.py --only generate recurrent --fla --markdown page.md
    python benchmarks/check_gpu.py --only --sanitizer        # nothing else
    python benchmarks/check_gpu.py --read gpu.json --markdown page.md   # measures nothing

Parts: correctness (pytest -m cuda, which runs bf16 on both paths), speed (the path the plan
chooses, the step path, and FLA with --fla), memory, kept (what forward leaves for backward), host
(time of a call on the CPU), others (odd sizes, packed sequences, fp32 gates), gates (of any
strength, beside the step path), attention (causal, of the same model width), layer (beside its
products), operators (norms, SwiGLU, convolution and loss, beside torch's), plot (time over T),
generate (time to the first token, tokens/s and memory up to 100,000 tokens, beside a Transformer)
and recurrent (decoding's operators). Whatever is timed is checked against fp64 or fp32 first,
generation against a forward over all tokens. A run ends at the first wrong result, and shows no
times. A page of tables comes last; --markdown writes it, as benchmarks/results/RESULTS_CUDA.md is
one, with a plot beside it of the part plot, or of what lengths other parts have timed. --out takes
all numbers as JSON, and logs are written beside it.

FLA compiles and tunes for 4 to 7 minutes for a head size (K, V), at its first call, unless
TRITON_CACHE_DIR holds the result of benchmarks/bench_fla.py, which tunes them side by side.
"""

import argparse
import dataclasses
import functools
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import bench_fla
import torch
from pages import cuda_page
from parts import (
    bench_attention,
    bench_for_backward,
    bench_generate,
    bench_layer,
    bench_length,
    bench_operators,
    bench_recurrent,
)
from shared import gate
from shared import operator as bench
from shared.bench_cases import OTHERS, Case, strengths
from shared.machine import ROOT, commit, cpu_name
from shared.picture import can_be_drawn
from shared.timing import copy_bytes_per_s

SANITIZER_TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
STARTED = time.perf_counter()


class Run:
    """What is asked for, and the parts, each of which gives its numbers."""

    def __init__(self, fla: list[str] | None, compiled: bool) -> None:
        self.fla, self.compiled = fla, compiled
        self.functions = bench.implementations(fla is not None)
        self.copy_bytes_per_s = copy_bytes_per_s()
        self.checked: set[Case] = set()
        self.times: dict[Case, bench.Times] = {}
        dtypes = (torch.float32, torch.bfloat16, torch.float16)
        small = functools.partial(gate.check_small, "cuda", *dtypes)
        gate.require(small() + bench.on_steps(small)())

    def at(self, shape: tuple[int, ...]) -> dict[str, Callable]:
        """The functions, without FLA where it was asked for at other head sizes."""
        *_, K, V = shape
        without = self.fla and f"{K}x{V}" not in self.fla
        return {name: f for name, f in self.functions.items() if name != "FLA" or not without}

    def draw(self, case: Case):
        """A case's inputs, on which results are right."""
        x = case.draw()
        if case not in self.checked:
            gate.require(gate.check_inputs(x, f"{case.shape}, n {case.n:g}"))
            self.checked.add(case)
            torch.cuda.empty_cache()
        return x

    def speed(self, case: Case) -> bench.Times:
        if case not in self.times:
            self.times[case] = bench.speed(self.draw(case), self.at(case.shape))
        return self.times[case]

    def memory(self, case: Case) -> dict[str, int]:
        return bench.peak_bytes(self.draw(case), self.at(case.shape))

    def kept(self, case: Case) -> dict:
        return bench_for_backward.measure(self.draw(case))

    def host(self) -> dict[str, dict[str, float]]:
        return bench.host_times(self.at(bench.HOST_SHAPE))

    def others(self) -> dict[str, bench.Times]:
        return {name: self.speed(case) for name, case in OTHERS.items()}

    def gates(self) -> dict[str, dict[str, bench.Times]]:
        ours = bench.implementations(fla=False)
        return {
            shape: {f"{n:g}": bench.speed(self.draw(case), ours) for n, case in cases.items()}
            for shape, cases in strengths().items()
        }

    def attention(self) -> dict[str, bench.Times]:
        """By T."""
        cases = {str(shape[1]): Case(*shape) for shape in bench_attention.shapes()}
        return {
            T: bench_attention.measure(self.at(case.shape), self.draw(case))
            for T, case in cases.items()
        }

    def layer(self) -> dict[str, bench.Times]:
        return bench_layer.measure(self.fla is not None, self.compiled)

    def operators(self) -> dict[str, bench.Times]:
        return bench_operators.measure(self.fla is not None, self.copy_bytes_per_s)

    def plot(self) -> dict[str, bench.Times]:
        return {bench.name_of(x): self.speed(Case(*x)) for x in bench_length.shapes()}

    def generate(self) -> dict:
        return bench_generate.measure(self.fla is not None)

    def recurrent(self) -> dict[str, dict]:
        return bench_recurrent.measure()


# Methods of Run.
OF_SHAPES = ("speed", "memory", "kept")
ONCE = (
    *("host", "others", "gates", "attention", "layer", "operators", "plot"),
    *("generate", "recurrent"),
)
PARTS = ("correctness", *OF_SHAPES, *ONCE)


def measure(arguments: argparse.Namespace, results: dict) -> None:
    """Every part that was asked for, into `results`."""
    say("results against fp64")
    run = Run(arguments.fla, arguments.compile)
    results["copy_bytes_per_s"] = run.copy_bytes_per_s
    for name in arguments.shapes:
        case = Case(*bench.parse_shape(name))
        row = results["shapes"].setdefault(name, {})
        for part in OF_SHAPES:
            if part in arguments.only:
                say(f"{part}, {name}")
                row[part] = getattr(run, part)(case)
                torch.cuda.empty_cache()
    for part in ONCE:
        if part in arguments.only:
            say(part)
            results[part] = getattr(run, part)()


def say(part: str) -> None:
    """On stderr, for who waits: what comes now, and after how many seconds."""
    print(f"{time.perf_counter() - STARTED:6.0f} s  {part}", file=sys.stderr, flush=True)


def environment() -> dict[str, str]:
    """What the numbers depend on."""
    return {
        "GPU": torch.cuda.get_device_name(),
        "CPU": f"{cpu_name()}, {os.cpu_count()} threads",
        "torch": torch.__version__,
        "FLA": bench_fla.version(),
        "Python": platform.python_version(),
        "commit": commit(),
        "command": shlex.join(["python", *sys.argv]),
    }


def run_pytest(marker: str, log: Path, *before: str, **variables: str) -> tuple[bool, list[str]]:
    """Whether the marked tests passed, and the lines of their output, which also goes to `log`."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-m", marker, "-p", "no:cacheprovider"]
    with log.open("w") as file:  # as it comes, for a run that is stopped
        code = subprocess.run(
            [*before, *pytest],
            cwd=ROOT,
            env=os.environ | variables,
            stdout=file,
            stderr=subprocess.STDOUT,
        ).returncode
    return code == 0, log.read_text(errors="replace").splitlines()


def run_tests(out: Path) -> bool:
    """The tests marked `cuda`; prints the accuracy table and the last lines."""
    passed, lines = run_pytest("cuda", out.with_suffix(".pytest.log"))
    print(*(x for x in lines if x.startswith("|")), sep="\n")
    failed = [x for x in lines if x.startswith(("FAILED", "ERROR"))]
    print(*failed[:40], *lines[-1:], sep="\n")
    return passed


def run_sanitizer(out: Path) -> bool:
    """The tests marked `sanitizer` under every tool of compute-sanitizer."""
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    clean = True
    for tool in SANITIZER_TOOLS:
        command = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--report-api-errors", "no"]
        log, variables = out.with_suffix(f".{tool}.log"), {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        passed, lines = run_pytest("sanitizer", log, *command, **variables)
        clean &= passed
        said = [x for x in lines if any(y in x for y in ("SUMMARY", " passed", "FAILED"))]
        print(f"{tool}: {'clean' if passed else 'not clean'}", *said[-5:], sep="\n")
    return clean


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS, help="parts to run")
    parser.add_argument(
        "--shapes", nargs="+", default=[*map(bench.name_of, bench.BASELINES)], metavar="BxTxHxKxV",
        help="shapes of speed, memory and kept; default: BASELINES",
    )  # fmt: skip
    parser.add_argument(
        "--fla", nargs="*", metavar="KxV",
        help="time FLA beside it, of the operator at these head sizes alone; default: at all",
    )  # fmt: skip
    parser.add_argument("--compile", action="store_true", help="layer also compiled")
    parser.add_argument("--sanitizer", action="store_true", help="compute-sanitizer, four tools")
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
    if arguments.fla is not None and not bench_fla.installed():
        print("FLA is not installed: its columns stay empty")
        arguments.fla = None
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    results = {"environment": environment(), "wrong": [], "shapes": {}}
    wrong = results["wrong"]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("check_gpu: ended by SIGTERM"))
    if "correctness" in arguments.only and not run_tests(arguments.out):
        wrong.append("pytest -m cuda failed")
    if arguments.sanitizer and not run_sanitizer(arguments.out):
        wrong.append("compute-sanitizer has something to report")
    try:
        if set(arguments.only) - {"correctness"} and not wrong:
            measure(arguments, results)
    except gate.WrongResults as error:
        wrong += error.args
    finally:  # what there is
        arguments.out.write_text(json.dumps(results, indent=1, default=dataclasses.asdict))
    return finish(results, arguments)


def finish(results: dict, arguments: argparse.Namespace) -> int:
    """Prints results and writes the page, unless something was wrong in their run."""
    if results["wrong"]:
        print(*results["wrong"], sep="\n")
        print("Wrong results, or a report of the sanitizer: no times are shown.")
        return 1
    drawn = None
    if arguments.markdown:
        picture = arguments.markdown.with_suffix(".png")
        lengths = results.get("plot") or bench_length.timed(results["shapes"])
        if len(lengths) > 1 and can_be_drawn():
            bench_length.plot(results | {"plot": lengths}, picture)
            drawn = picture.name
    page = cuda_page.page(results, drawn)
    if arguments.markdown:
        arguments.markdown.write_text(page, encoding="utf-8")
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
