"""Turns what `check_gpu.py` measured into a page, benchmarks/results/RESULTS_CUDA.md:

python benchmarks/check_gpu.py --read runs/gpu.json --markdown benchmarks/results/RESULTS_CUDA.md
"""

import json
import re
from pathlib import Path

import bench_cuda as bench
from bench_cuda import MODES
from pages import decoding_page
from pages.tables import table
from parts import bench_attention, bench_model
from shared.timing import Timing

FLOOR_BYTES = {MODES[0]: "2(3K + 2V)", MODES[1]: "2(3K + 2V) + 2(6K + 3V)"}


def load(path: Path) -> dict:
    """The results that check_gpu.py wrote with --out."""
    return json.loads(
        path.read_text(), object_hook=lambda x: Timing(**x) if x.keys() >= {"median", "p20"} else x
    )


def page(results: dict, picture: str | None = None) -> str:
    """The page; `picture` is the plot's file, beside it."""
    environment = results["environment"]
    lines = [
        "# gla_ext on CUDA",
        "",
        "Written by `benchmarks/check_gpu.py --markdown` from one run, in bf16: medians and, in "
        "brackets, the 20th and 80th percentile. Times are the GPU's alone, by CUDA events: L2 is "
        "cold, and a call is queued before it starts, so that what it costs on the host is in no "
        "table but those of host time and generation. FLA is "
        "`fla.ops.gla.chunk_gla`, in turns with gla_ext. What is timed was compared with the "
        "recurrence in fp64 before. steps is gla_ext with "
        f"`{bench.PATH_VARIABLE}=steps`.",
        "",
        *(f"- {name}: {value}" for name, value in environment.items() if name != "command"),
        *copy_rate(results),
        f"- Command: `{environment['command']}`",
    ]
    parts = (
        *(speed, memory, waiting_for_backward, others, gates, attention, layer, operators),
        *(decoding_page.generation, decoding_page.recurrent),
        *(steps, kernels, host, first_call),
    )
    lines += [x for part in parts for x in part(results)]
    if picture:
        lines += ["", "## Time over T", "", f"![Time over T]({picture})"]
    return "\n".join(lines) + "\n"


def copy_rate(results) -> list[str]:
    rate = results.get("copy_bytes_per_s")
    return [f"- Copy on the device: {rate / 1e12:.2f} TB/s, read and written"] if rate else []


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
            "Floor: every input read once and every output written once at the rate of the copy, "
            f"{FLOOR_BYTES[mode]} bytes a token and head.",
            ["gla_ext, ms", "steps, ms", "FLA, ms", "FLA/gla_ext", "floor, ms", "gla_ext/floor"],
            {
                name: [
                    *(str(x["gla_ext"]), str(x["steps"])),
                    *beside(x),
                    *floor_cells(x, floor_ms(results, name, mode)),
                ]
                for name, x in rows.items()
            },
        )
    return lines


def floor_ms(results: dict, name: str, mode: str) -> float:
    """The floor of the shape of that name at the rate of a copy in the same run."""
    shape = bench.parse_shape(name)
    return bench.floor_ms(shape, mode == MODES[1], results["copy_bytes_per_s"])


def floor_cells(timings: dict[str, Timing], floor: float) -> list[str]:
    return [f"{floor:.3f}", f"{timings['gla_ext'].median / floor:.2f}"]


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
        ["gla_ext", "steps", "FLA"],
        {
            name: [
                f"{x[who] / 2**20:.0f}" if who in x else "" for who in ("gla_ext", "steps", "FLA")
            ]
            for name, x in rows.items()
        },
    )


def waiting_for_backward(results) -> list[str]:
    rows = {name: row["kept"] for name, row in results["shapes"].items() if "kept" in row}
    return rows and table(
        "What waits for backward",
        "Forward + backward by the operators, ms: with nothing but the inputs "
        "(`GLA_EXT_KEEP_OPERANDS=0`), or with the operands that forward has made, as is the "
        "default; and the MiB that then wait beside the inputs, and of these.",
        ["inputs", "operands", "MiB", "of the inputs"],
        {
            name: [str(x["ms"]["recomputed"]), *waiting(x, input_bytes(name))]
            for name, x in rows.items()
        },
    )


def waiting(x, inputs: int) -> list[str]:
    """The time with kept operands, and their bytes."""
    if "kept" not in x["ms"]:
        return ["", "", ""]
    size = x["bytes"]["kept"]
    return [str(x["ms"]["kept"]), f"{size / 2**20:.0f}", f"{size / inputs:.2f}"]


def input_bytes(name: str) -> int:
    B, T, H, K, V = bench.parse_shape(name)
    return 2 * B * T * H * (3 * K + V)


def others(results) -> list[str]:
    rows, lines = results.get("others", {}), []
    for mode in MODES if rows else ():
        lines += table(
            f"Other sizes, packed sequences, fp32 gates, one gate a head, {mode}",
            "B x T x H x K x V; bf16 gates unless said.",
            ["gla_ext, ms", "steps, ms", "FLA, ms", "FLA/gla_ext"],
            {
                name: [str(x[mode]["gla_ext"]), str(x[mode]["steps"]), *beside(x[mode])]
                for name, x in rows.items()
            },
        )
    return lines


def gates(results) -> list[str]:
    rows, lines = results.get("gates", {}), []
    for mode in MODES if rows else ():
        strengths = list(next(iter(rows.values())))
        lines += table(
            f"Gates of any strength, {mode}",
            "g is logsigmoid(N(0, 1)) / n: outside tier 1 are few chunks at n = 1 and all at 0.25. "
            "gla_ext, and in brackets steps; ms.",
            [f"n = {n}" for n in strengths],
            {
                shape: [
                    f"{x[n][mode]['gla_ext'].median:.3g} ({x[n][mode]['steps'].median:.3g})"
                    for n in strengths
                ]
                for shape, x in rows.items()
            },
        )
    return lines


def attention(results) -> list[str]:
    rows = results.get("attention", {})
    H, D = bench_attention.ATTENTION_HEADS
    lines = []
    for mode in MODES if rows else ():
        timings = {int(T): row[mode] for T, row in rows.items()}
        ours = medians(timings, "gla_ext")
        ends = [
            f"{who} {bench_attention.break_even(ours, medians(timings, who))}"
            for who in bench_attention.BACKENDS
        ]
        lines += table(
            f"Causal attention of the same model width, {mode}",
            f"B {bench_attention.BATCH}, width {H * D}: `scaled_dot_product_attention` with {H} "
            f"heads of {D}, `chunk_gla` with H, K, V = "
            f"{', '.join(map(str, bench_attention.GLA_HEADS))}; ms. `chunk_gla` of gla_ext takes "
            f"less time from T on: {', '.join(ends)}.",
            list(next(iter(timings.values()))),
            {f"T {T}": [str(t) for t in row.values()] for T, row in timings.items()},
        )
    return lines


def medians(timings: dict[int, dict[str, Timing]], who: str) -> dict[int, float]:
    return {T: row[who].median for T, row in timings.items()}


def layer(results) -> list[str]:
    rows = results.get("layer", {})
    lines = []
    for mode in MODES if rows else ():
        names = list(next(iter(rows.values()))[mode])
        lines += table(
            f"`GatedLinearAttention`, {mode}",
            f"Hidden size {bench_model.HIDDEN}, {bench_model.HEADS} heads, bf16, one set of "
            "weights, ms; backward is to the input and to all weights. Outputs and gradients of "
            "the input were compared before.",
            [*names, "FLA/gla_ext"],
            {
                "B {}, T {}".format(*name.split("x")): [
                    *(str(row[mode][who]) for who in names),
                    beside(row[mode])[1],
                ]
                for name, row in rows.items()
            },
        )
    return lines


def operators(results) -> list[str]:
    rows, lines = results.get("operators", {}), []
    for mode in MODES if rows else ():
        names = list(dict.fromkeys(who for row in rows.values() for who in row[mode]))
        lines += table(
            f"Operators around attention, {mode}",
            "ms, in bf16, at the sizes of a 374 M model's step. Floor: every input read once and "
            "every output written once at the rate of the copy.",
            names,
            {
                name: [str(row[mode][who]) if who in row[mode] else "" for who in names]
                for name, row in rows.items()
            },
        )
    return lines


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
    names = list(dict.fromkeys(name for x in times.values() for name in x))
    return times and table(
        "Host time of a call",
        f"B {B}, T {T}, H {H}, K {K}, V {V}, without waiting for the GPU: the median of five "
        "means over 1,000 calls. Backward is `torch.autograd.grad`; in one thread: under "
        "`torch.autograd.set_multithreading_enabled(False)`. A view launches nothing: what torch "
        "itself takes.",
        [f"{name}, µs" for name in names],
        {mode: [f"{x[n]:.1f}" if n in x else "" for n in names] for mode, x in times.items()},
    )


def first_call(results) -> list[str]:
    times = results.get("first_call_s", {})
    return times and table(
        "First calls of gla_ext in a fresh process",
        "CUDA and torch's autograd are started before.",
        ["s"],
        {name: [f"{seconds:.4f}"] for name, seconds in times.items()},
    )
