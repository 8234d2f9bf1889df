"""Turns what `check_gpu.py` measured into a page, benchmarks/results/RESULTS_CUDA.md:

python benchmarks/check_gpu.py --read runs/gpu.json --markdown benchmarks/results/RESULTS_CUDA.md
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from bench_fla import HEADS, HIDDEN
from pages import decoding_page
from pages.tables import table, under
from parts import bench_attention
from shared import operator as bench
from shared.operator import BOTH, FORWARD, MODES
from shared.timing import Timing

FLOOR_BYTES = {FORWARD: "2(3K + 2V)", BOTH: "2(3K + 2V) + 2(6K + 3V)"}
OURS = ("gla_ext", "steps")


def load(path: Path) -> dict:
    """The results that check_gpu.py wrote with --out."""
    return json.loads(
        path.read_text(), object_hook=lambda x: Timing(**x) if x.keys() >= {"median", "p20"} else x
    )


def page(results: dict, picture: str | None = None) -> str:
    """The page; `picture` is the plot's file, beside it."""
    environment = results["environment"]
    rate = results.get("copy_bytes_per_s")
    copy = [f"- Copy on the device: {rate / 1e12:.2f} TB/s, read and written"] if rate else []
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
        *copy,
        f"- Command: `{environment['command']}`",
    ]
    parts = (
        *(speed, memory, waiting_for_backward, others, gates, attention, layer, operators),
        *(decoding_page.batches, decoding_page.lengths, decoding_page.recurrent, host),
    )
    lines += [x for part in parts for x in part(results)]
    if picture:
        lines += ["", "## Time over T", "", f"![Time over T]({picture})"]
    return "\n".join(lines) + "\n"


def of_shapes(results: dict, part: str) -> dict:
    return {name: row[part] for name, row in results["shapes"].items() if part in row}


def by_mode(
    title: str, text: str, heads: Iterable[str], rows: dict, cells: Callable[[dict], Iterable]
) -> list[str]:
    """A table forward and one both ways; `cells` of a row's times."""
    tables = (
        table(f"{title}, {mode}", text, heads, {n: cells(row[mode]) for n, row in rows.items()})
        for mode in MODES
    )
    return [line for lines in tables for line in lines]


def beside(times: dict[str, Timing]) -> list[str]:
    """FLA's time and how many times as long it is as gla_ext's."""
    if "FLA" not in times:
        return ["", ""]
    return [str(times["FLA"]), f"{times['FLA'].median / times['gla_ext'].median:.2f}"]


def speed(results: dict) -> list[str]:
    lines = []
    for mode in MODES:
        rows = {}
        for name, row in of_shapes(results, "speed").items():
            rate = results["copy_bytes_per_s"]
            floor = bench.floor_ms(bench.parse_shape(name), mode, rate)
            over = row[mode]["gla_ext"].median / floor
            beside_fla = beside(row[mode])
            rows[name] = [*under(OURS, row[mode]), *beside_fla, f"{floor:.3f}", f"{over:.2f}"]
        lines += table(
            f"Speed, {mode}",
            "Floor: every input read once and every output written once at the rate of the copy, "
            f"{FLOOR_BYTES[mode]} bytes a token and head.",
            ["gla_ext, ms", "steps, ms", "FLA, ms", "FLA/gla_ext", "floor, ms", "gla_ext/floor"],
            rows,
        )
    return lines


def memory(results: dict) -> list[str]:
    heads = (*OURS, "FLA")
    mib = {
        name: {who: size / 2**20 for who, size in row.items()}
        for name, row in of_shapes(results, "memory").items()
    }
    return table(
        "Peak memory of forward + backward",
        "MiB beside the inputs, outputs and gradients included.",
        heads,
        {name: under(heads, row, ".0f") for name, row in mib.items()},
    )


def waiting_for_backward(results: dict) -> list[str]:
    rows = {}
    for name, x in of_shapes(results, "kept").items():
        rows[name] = [x["ms"]["recomputed"], "", "", ""]
        if "kept" in x["ms"]:
            B, T, H, K, V = bench.parse_shape(name)
            inputs, size = 2 * B * T * H * (3 * K + V), x["bytes"]["kept"]
            rows[name][1:] = [x["ms"]["kept"], f"{size / 2**20:.0f}", f"{size / inputs:.2f}"]
    return table(
        "What waits for backward",
        "Forward + backward by the operators, ms: with nothing but the inputs "
        "(`GLA_EXT_KEEP_OPERANDS=0`), or with the operands that forward has made, as is the "
        "default; and the MiB that then wait beside the inputs, and of these.",
        ["inputs", "operands", "MiB", "of the inputs"],
        rows,
    )


def others(results: dict) -> list[str]:
    return by_mode(
        "Other sizes, packed sequences, fp32 gates, one gate a head",
        "B x T x H x K x V; bf16 gates unless said.",
        ["gla_ext, ms", "steps, ms", "FLA, ms", "FLA/gla_ext"],
        results.get("others", {}),
        lambda times: [*under(OURS, times), *beside(times)],
    )


def gates(results: dict) -> list[str]:
    rows, lines = results.get("gates", {}), []
    for mode in MODES if rows else ():
        cells = {
            shape: {
                f"n = {n}": f"{x[mode]['gla_ext'].median:.3g} ({x[mode]['steps'].median:.3g})"
                for n, x in row.items()
            }
            for shape, row in rows.items()
        }
        lines += table(
            f"Gates of any strength, {mode}",
            "g is logsigmoid(N(0, 1)) / n: outside tier 1 are few chunks at n = 1 and all at 0.25. "
            "gla_ext, and in brackets steps; ms.",
            next(iter(cells.values())),
            {shape: row.values() for shape, row in cells.items()},
        )
    return lines


def attention(results: dict) -> list[str]:
    rows = results.get("attention", {})
    H, D = bench_attention.ATTENTION_HEADS
    lines = []
    for mode in MODES if rows else ():
        names = list(next(iter(rows.values()))[mode])
        medians = {who: {int(T): row[mode][who].median for T, row in rows.items()} for who in names}
        ends = [
            f"{who} {bench_attention.break_even(medians['gla_ext'], medians[who])}"
            for who in bench_attention.BACKENDS
        ]
        lines += table(
            f"Causal attention of the same model width, {mode}",
            f"B {bench_attention.BATCH}, width {H * D}: `scaled_dot_product_attention` with {H} "
            f"heads of {D}, `chunk_gla` with H, K, V = "
            f"{', '.join(map(str, bench_attention.GLA_HEADS))}; ms. `chunk_gla` of gla_ext takes "
            f"less time from T on: {', '.join(ends)}.",
            names,
            {f"T {T}": under(names, row[mode]) for T, row in rows.items()},
        )
    return lines


def names_in(rows: dict) -> list[str]:
    """Whatever was timed in any row."""
    return list(dict.fromkeys(who for row in rows.values() for who in row[FORWARD]))


def layer(results: dict) -> list[str]:
    rows = {
        "B {}, T {}".format(*name.split("x")): row for name, row in results.get("layer", {}).items()
    }
    names = names_in(rows)
    return by_mode(
        "`GatedLinearAttention`",
        f"Hidden size {HIDDEN}, {HEADS} heads, bf16, one set of weights, ms; backward is to the "
        "input and to all weights. Outputs and gradients of the input were compared before.",
        [*names, "FLA/gla_ext"],
        rows,
        lambda times: [*under(names, times), beside(times)[1]],
    )


def operators(results: dict) -> list[str]:
    rows = results.get("operators", {})
    names = names_in(rows)
    return by_mode(
        "Operators around attention",
        "ms, in bf16, at the sizes of a 374 M model's step. Floor: every input read once and "
        "every output written once at the rate of the copy.",
        names,
        rows,
        lambda times: under(names, times),
    )


def host(results: dict) -> list[str]:
    B, T, H, K, V = bench.HOST_SHAPE
    times = results.get("host", {})
    names = list(dict.fromkeys(name for row in times.values() for name in row))
    return table(
        "Host time of a call",
        f"B {B}, T {T}, H {H}, K {K}, V {V}, without waiting for the GPU: the median of five "
        "means over 1,000 calls. Backward is `torch.autograd.grad`; in one thread: under "
        "`torch.autograd.set_multithreading_enabled(False)`. A view launches nothing: what torch "
        "itself takes.",
        [f"{name}, µs" for name in names],
        {mode: under(names, row, ".1f") for mode, row in times.items()},
    )
