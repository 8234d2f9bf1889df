"""Turns what `check_gpu.py` measured into a page, benchmarks/RESULTS_CUDA.md:

python benchmarks/check_gpu.py --read runs/gpu.json --markdown benchmarks/RESULTS_CUDA.md
"""

import json
import re
from pathlib import Path

import bench_cuda as bench
from timing import Timing

MODES = ("forward", "forward + backward")


def load(path: Path) -> dict:
    """The results that check_gpu.py wrote with --out."""
    return json.loads(
        path.read_text(), object_hook=lambda x: Timing(**x) if x.keys() >= {"median", "p20"} else x
    )


def page(results: dict) -> str:
    environment = results["environment"]
    lines = [
        "# gla_ext on CUDA",
        "",
        "Written by `benchmarks/check_gpu.py --markdown` from one run, in bf16: medians and, in "
        "brackets, the 20th and 80th percentile. Times are the GPU's alone, by CUDA events: L2 is "
        "cold, and a call is queued before it starts, so that what it costs on the host is in no "
        "table but that of host time. FLA is `fla.ops.gla.chunk_gla`, in turns with gla_ext. What "
        "is timed was compared with the recurrence in fp64 before.",
        "",
        *(f"- {name}: {value}" for name, value in environment.items() if name != "command"),
        f"- Command: `{environment['command']}`",
    ]
    parts = (speed, memory, steps, kernels, host, first_call)
    return "\n".join([*lines, *(x for part in parts for x in part(results))]) + "\n"


def speed(results) -> list[str]:
    lines = []
    for mode in MODES:
        rows = {
            name: row["speed"][mode] for name, row in results["shapes"].items() if "speed" in row
        }
        if not rows:
            return []
        lines += table(
            f"Speed, {mode}",
            "Factor: FLA's time over gla_ext's. Floor: every input read once and every output "
            "written once at 4.27 TB/s, an H200's copy rate.",
            ["gla_ext, ms", "FLA, ms", "factor", "floor, ms"],
            {
                name: [str(x["gla_ext"]), *beside(x), f"{floor(name, mode):.3f}"]
                for name, x in rows.items()
            },
        )
    return lines


def floor(name: str, mode: str) -> float:
    return bench.floor_ms(bench.parse_shape(name), "backward" in mode)


def beside(timings: dict[str, Timing]) -> list[str]:
    """FLA's time and how many times as long it is as gla_ext's."""
    if "FLA" not in timings:
        return ["", ""]
    return [str(timings["FLA"]), f"{timings['FLA'].median / timings['gla_ext'].median:.2f}"]


def memory(results) -> list[str]:
    rows = {name: row["memory"] for name, row in results["shapes"].items() if "memory" in row}
    return rows and table(
        "Peak memory of forward + backward",
        "MiB beside the inputs, outputs and gradients included.",
        ["gla_ext", "FLA"],
        {
            name: [f"{x[who] / 2**20:.0f}" if who in x else "" for who in ("gla_ext", "FLA")]
            for name, x in rows.items()
        },
    )


def steps(results) -> list[str]:
    return results.get("steps", []) and table(
        f"The steps alone, {next(iter(results['shapes']), bench.MAIN)}",
        "The operators by themselves hand on fp32 intermediates; inside `chunk_gla` most of them "
        "are bf16.",
        ["ms"],
        {f"`{name}`": [str(timing)] for name, timing in results["steps"].items()},
    )


def kernels(results) -> list[str]:
    return results.get("kernels", []) and table(
        "The kernels of one forward + backward on that shape",
        "By torch's profiler, not with a cold L2; launches of one kernel are summed.",
        ["launches", "µs"],
        {
            f"`{short(x['kernel'])}`": [f"{x['launches']:g}", f"{x['us']:.1f}"]
            for x in results["kernels"]
        },
    )


def short(kernel: str) -> str:
    """A kernel's name without return type, namespaces and parameters."""
    name = re.sub(r"^void |gla_ext::cuda::|\(anonymous namespace\)::|__nv_", "", kernel)
    return re.sub(r"\((\w+)\)(\d+)", r"\1 \2", name).split("(")[0]


def host(results) -> list[str]:
    B, T, H, K, V = bench.HOST_SHAPE
    times = results.get("host_us", {})
    names = list(next(iter(times.values()), {}))
    return times and table(
        "Host time of a call",
        f"B {B}, T {T}, H {H}, K {K}, V {V}, without waiting for the GPU: the median of five "
        "means over 1,000 calls. Backward is `torch.autograd.grad`.",
        [f"{name}, µs" for name in names],
        {mode: [f"{x[name]:.1f}" for name in names] for mode, x in times.items()},
    )


def first_call(results) -> list[str]:
    times = results.get("first_call_s", {})
    return times and table(
        "First calls of gla_ext in a fresh process",
        "CUDA and torch's autograd are started before.",
        ["s"],
        {name: [f"{seconds:.4f}"] for name, seconds in times.items()},
    )


def table(title: str, text: str, heads: list[str], rows: dict[str, list[str]]) -> list[str]:
    """A section with one table; the first column has no head."""
    shapes = all(re.fullmatch(r"\d+(x\d+){4}", name) for name in rows)
    return [
        "",
        f"## {title}",
        "",
        text,
        "",
        f"| {'B x T x H x K x V' if shapes else ''} | {' | '.join(heads)} |",
        "|---|" + "--:|" * len(heads),
        *(f"| {' | '.join([name, *cells])} |" for name, cells in rows.items()),
    ]
