"""Checks and times gla_ext on this machine's GPU: `make test-gpu`, or

    python benchmarks/check_gpu.py --out gpu.json
    python benchmarks/check_gpu.py --only speed memory --shapes 32x2048x4x128x256 --fla
    python benchmarks/check_gpu.py --only attention layer operators plot --compile
    python benchmarks/check_gpu.py --only generate recurrent --fla --markdown page.md
    python benchmarks/check_gpu.py --only --sanitizer        # nothing else
    python benchmarks/check_gpu.py --read gpu.json --markdown page.md   # measures nothing

Parts: correctness (pytest -m cuda, which runs bf16 on both paths), speed (the path the plan
chooses, the step path, and FLA with --fla), memory, kept (what forward leaves for backward),
steps (each step operator, and the kernels of a call), host (time of a call on the CPU), first-call,
others (odd sizes, packed sequences, fp32 gates), gates (of any strength, beside the step path),
attention (causal, of the same model width), layer (beside its products), operators (norms, SwiGLU,
convolution and loss, beside torch's), plot (time over T), generate (time to the first token,
tokens/s and memory up to 100,000 tokens, beside a Transformer) and recurrent (decoding's
operators). Whatever is timed is checked against fp64 or fp32 first, generation against a forward
over all tokens. Nothing is timed where that, or pytest, fails, and nothing is printed where a
comparison within a part does. A page of tables comes last; --markdown writes it, as
benchmarks/results/RESULTS_CUDA.md is one, with a plot beside it of the part plot, or of what
lengths other parts have timed. --out takes all numbers as JSON, and logs are written beside it.

FLA compiles and tunes for 4 to 7 minutes for a head size (K, V), the head sizes side by side,
unless TRITON_CACHE_DIR holds the result of an earlier run or of benchmarks/bench_fla.py.
"""

import argparse
import dataclasses
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
import bench_fla
import torch
from pages import cuda_page
from parts import (
    bench_attention,
    bench_for_backward,
    bench_generate,
    bench_length,
    bench_model,
    bench_operators,
    bench_recurrent,
)
from shared import bench_cases, gate
from shared.machine import ROOT, commit, cpu_name
from shared.timing import copy_bytes_per_s

PARTS = (
    *("correctness", "speed", "memory", "kept", "steps", "host", "first-call", "others", "gates"),
    *("attention", "layer", "operators", "plot", "generate", "recurrent"),
)
OF_SHAPES = {"speed", "memory", "kept"}
OF_THE_MAIN_SHAPE = {"steps", "host", "first-call"}
SANITIZER_TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
STARTED = time.perf_counter()


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


def checked_shapes(arguments) -> list[tuple[int, ...]]:
    """The shapes that the parts asked for time `chunk_gla` at."""
    only, own = set(arguments.only), [bench.parse_shape(name) for name in arguments.shapes]
    shapes = own if only & OF_SHAPES else own[:1] if only & OF_THE_MAIN_SHAPE else []
    if "attention" in only:
        shapes = shapes + bench_attention.shapes()
    if "plot" in only:
        shapes = shapes + list(bench_length.shapes().values())
    return list(dict.fromkeys(shapes))


def checked_cases(arguments) -> dict[str, bench_cases.Case]:
    """What the parts of `bench_cases` time `chunk_gla` on."""
    cases = dict(bench_cases.OTHERS) if "others" in arguments.only else {}
    if "gates" in arguments.only:
        for shape, own in bench_cases.strengths().items():
            cases |= {f"{shape}, n {n:g}": case for n, case in own.items()}
    return cases


def check(arguments) -> list[str]:
    """What is wrong with the results of what will be timed."""
    wrong = gate.check_small()
    for shape in checked_shapes(arguments):
        wrong += gate.check(shape)
        torch.cuda.empty_cache()
    for name, case in checked_cases(arguments).items():
        wrong += gate.check_inputs(case.draw(), name)
        torch.cuda.empty_cache()
    return wrong


def at_heads(functions: dict, shape: tuple[int, ...], fla: list[str] | None) -> dict:
    """Without FLA where it was asked for at other head sizes."""
    *_, K, V = shape
    without = fla and f"{K}x{V}" not in fla
    return {name: f for name, f in functions.items() if name != "FLA" or not without}


def tune_fla(arguments, results: dict):
    """FLA's tuning for the parts asked for, before anything is timed; generation's forward is tuned
    as it is checked.
    """
    own = [bench.HOST_SHAPE] if "host" in arguments.only else []
    layer = "layer" in arguments.only
    shapes = checked_shapes(arguments) + own
    shapes = [shape for shape in shapes if at_heads({"FLA": None}, shape, arguments.fla)]
    others = bench_cases.OTHERS if "others" in arguments.only else {}
    cases = [n for n, case in others.items() if at_heads({"FLA": None}, case.shape, arguments.fla)]
    if count := bench_fla.tune(shapes, layer, arguments.out.parent, cases):
        results["environment"]["FLA"] += f", tuned before by {count} processes that shared the GPU"


def say(part: str) -> None:
    """On stderr, for who waits: what comes now, and after how many seconds."""
    print(f"{time.perf_counter() - STARTED:6.0f} s  {part}", file=sys.stderr, flush=True)


def measure(arguments, results: dict):
    """Every part that was asked for, into `results`."""
    only, fla = set(arguments.only), arguments.fla is not None
    functions = bench.implementations(fla)

    def at(shape):
        return at_heads(functions, shape, arguments.fla)

    results["copy_bytes_per_s"] = copy_bytes_per_s()
    shapes = {name: bench.parse_shape(name) for name in arguments.shapes}
    for name, shape in shapes.items():
        row = results["shapes"].setdefault(name, {})
        if only & OF_SHAPES:
            say(name)
        for part, function in (("speed", bench.speed), ("memory", bench.peak_bytes)):
            if part in only:
                row[part] = function(bench.draw(shape), at(shape))
                torch.cuda.empty_cache()
        if "kept" in only:
            row["kept"] = bench_for_backward.measure(shape)
            torch.cuda.empty_cache()
    main = next(iter(shapes.values()))
    if "steps" in only:
        say("steps")
        results["steps"] = bench.step_times(main)
        run = bench.call(functions["gla_ext"], bench.draw(main), True)
        results["kernels"] = bench.kernel_times(run)
    if "host" in only:
        say("host")
        results["host_us"] = bench.host_times(at(bench.HOST_SHAPE))
    if "first-call" in only:
        say("first-call")
        results["first_call_s"] = bench.first_call_in_a_fresh_process()
    if "others" in only:
        results["others"] = {}
        for name, case in bench_cases.OTHERS.items():
            say(name)
            results["others"][name] = bench.speed(case.draw(), at(case.shape))
            torch.cuda.empty_cache()
    if "gates" in only:
        ours = {name: f for name, f in functions.items() if name != "FLA"}
        results["gates"] = {}
        for shape, cases in bench_cases.strengths().items():
            say(f"gates, {shape}")
            results["gates"][shape] = {
                f"{n:g}": bench.speed(case.draw(), ours) for n, case in cases.items()
            }
            torch.cuda.empty_cache()
    if "attention" in only:
        say("attention")
        results["attention"] = bench_attention.measure(at(bench_attention.shapes()[0]))
    if "plot" in only:
        say("plot")
        results["lengths"] = {}
        for name, shape in bench_length.shapes().items():
            known = results["shapes"].get(name, {}).get("speed")
            known = known or bench.speed(bench.draw(shape), at(shape))
            results["lengths"][name] = known
            torch.cuda.empty_cache()
    if "layer" in only:
        say("layer")
        results["layer"] = bench_model.measure_layers(fla, arguments.compile)
    if "operators" in only:
        say("operators")
        results["operators"] = bench_operators.measure(fla, results["copy_bytes_per_s"])
    if "recurrent" in only:
        say("recurrent")
        results["recurrent"] = bench_recurrent.measure()
    if "generate" in only:
        say("generate")
        results["generate"] = {}
        bench_generate.measure(fla, arguments.compile, results=results["generate"])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS, help="parts to run")
    parser.add_argument(
        "--shapes", nargs="+", default=list(bench.SHAPES), metavar="BxTxHxKxV",
        help="shapes to time, the first also for --only steps; default: BASELINES",
    )  # fmt: skip
    parser.add_argument(
        "--fla", nargs="*", metavar="KxV",
        help="time FLA beside it, of the operator at these head sizes alone; default: at all",
    )  # fmt: skip
    parser.add_argument(
        "--compile", action="store_true", help="layer and steps of generate also compiled"
    )
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
    if arguments.fla is not None and not bench_fla.installed():
        print("FLA is not installed: its columns stay empty")
        arguments.fla = None
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    results = {"environment": environment(), "wrong": [], "shapes": {}}
    wrong = results["wrong"]
    if "correctness" in arguments.only and not run_tests(arguments.out):
        wrong.append("pytest -m cuda failed")
    if arguments.sanitizer and not run_sanitizer(arguments.out):
        wrong.append("compute-sanitizer has something to report")
    timed = set(arguments.only) - {"correctness"}
    try:
        if timed and not wrong:
            say("results against fp64")
            wrong += check(arguments)
        if timed and not wrong:
            if arguments.fla is not None:
                say("FLA's tuning")
                tune_fla(arguments, results)
            measure(arguments, results)
    except gate.WrongResults as error:
        wrong += error.args
    finally:  # what there is
        arguments.out.write_text(json.dumps(results, indent=1, default=dataclasses.asdict))
    if arguments.ncu and not wrong:
        run_ncu(arguments.shapes[0], arguments.out)
    return finish(results, arguments)


def finish(results: dict, arguments) -> int:
    """Prints results and writes the page, unless something was wrong in their run."""
    if results["wrong"]:
        print(*results["wrong"], sep="\n")
        print("Wrong results, or a report of the sanitizer: no times are shown.")
        return 1
    drawn = None
    if arguments.markdown:
        picture = arguments.markdown.with_suffix(".png")
        lengths = results.get("lengths") or bench_length.timed(results["shapes"])
        if len(lengths) > 1 and bench_length.plot(results | {"lengths": lengths}, picture):
            drawn = picture.name
    page = cuda_page.page(results, drawn)
    if arguments.markdown:
        arguments.markdown.write_text(page, encoding="utf-8")
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
