"""`chunk_gla` beside its chunkwise form in plain PyTorch and attention, on this machine's GPU.

    python benchmarks/bench_naive.py --out naive.jsonl
    python benchmarks/bench_naive.py --report naive.jsonl    # the tables of lines that are there

The form in PyTorch has chunks of 16 to 256 tokens. Peak memory is what a forward + backward has
allocated beside the inputs. Each form is checked against fp64 before it is timed.
"""

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path

import torch
from parts import bench_attention
from parts.naive import naive_chunk_gla
from shared import operator as bench
from shared.gate import require
from shared.inputs import exact_by_chunks
from shared.machine import require_gpu

from gla_ext import chunk_gla, selftest

CHUNKS = (16, 32, 64, 128, 256)
SHAPES = ((8, 2048, 4, 128, 256), (32, 2048, 4, 128, 256))


def functions() -> dict[str, Callable]:
    naive = {f"PyTorch, {C}": functools.partial(naive_chunk_gla, chunk=C) for C in CHUNKS}
    return {"gla_ext": chunk_gla} | naive


def errors(x) -> dict[str, dict[str, float]]:
    """How far each form's outputs and gradients on bf16 inputs x are off, against fp64.

    Raises:
        WrongResults: for more than is allowed. The gradient of the form's gates in PyTorch is a
            sum of differences, and off by more than ours; it may be, and is told.
    """
    wanted = {name: exact_by_chunks(x)[name] for name in ("o", "dq", "dk", "dv", "dg")}
    results, wrong = {}, []
    for name, function in functions().items():
        leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v, x.g)]
        o = function(*leaves)[0]
        found = dict(zip(wanted, (o, *torch.autograd.grad(o, leaves, x.do)), strict=True))
        results[name] = {key: selftest.relative_error(found[key], wanted[key]) for key in wanted}
        for key, error in results[name].items():
            told = key == "dg" and name != "gla_ext"
            if not error <= (0.05 if told else selftest.tolerance(key, torch.bfloat16)):
                wrong.append(f"{name}: {key} is off by {error:.1e}")
    require(wrong)
    return results


def measure(shape: tuple[int, ...]) -> list[dict]:
    """A result each of gla_ext, the form by size of chunk, and attention."""
    off = errors(bench.draw((1, *shape[1:])))
    x = bench.draw(shape)

    def calls(backward: bool) -> dict[str, Callable]:
        return {name: bench.call(f, x, backward) for name, f in functions().items()} | {
            name: bench_attention.call(backend, shape[1], backward, shape[0])
            for name, backend in bench_attention.BACKENDS.items()
        }

    times, peaks = bench.time_both_ways(calls), {}
    for name, run in calls(True).items():
        peaks[name] = bench.peak_of(run)
    device = torch.cuda.get_device_name()
    return [
        {"shape": bench.name_of(shape), "name": name, "peak_bytes": peak, "device": device}
        | {"dg_error": off.get(name, {}).get("dg")}
        | {mode: vars(times[mode][name]) for mode in bench.MODES}
        for name, peak in peaks.items()
    ]


def tables(lines: list[dict]) -> list[str]:
    """A table for each shape: median milliseconds, times those of gla_ext, GiB, error of dg."""
    said = []
    for shape in dict.fromkeys(line["shape"] for line in lines):
        rows = [line for line in lines if line["shape"] == shape]
        own = next(row for row in rows if row["name"] == "gla_ext")
        said += [
            f"{shape}, {own['device']}:",
            "",
            "| | forward, ms | | both, ms | | GiB | dg off by |",
        ]
        said.append("|---|--:|--:|--:|--:|--:|--:|")
        for row in rows:
            cells = []
            for mode in bench.MODES:
                ms = row[mode]["median"]
                cells += [f"{ms:.3g}", f"{ms / own[mode]['median']:.1f} x"]
            off = f"{row['dg_error']:.1e}" if row["dg_error"] else ""
            cells += [f"{row['peak_bytes'] / 2**30:.2f}", off]
            said.append(f"| {' | '.join([row['name'], *cells])} |")
        said.append("")
    return said


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", type=bench.parse_shape, default=SHAPES)
    parser.add_argument("--out", type=Path, help="where results go, a JSON line each")
    parser.add_argument("--report", type=Path, help="show what --out has written; nothing is run")
    arguments = parser.parse_args()
    if arguments.report:
        lines = [json.loads(line) for line in arguments.report.read_text().splitlines()]
        print(*tables(lines), sep="\n")
        return
    require_gpu()
    for shape in arguments.shapes:
        results = measure(shape)
        if arguments.out:
            with arguments.out.open("a") as file:
                file.writelines(json.dumps(result) + "\n" for result in results)
        print(*tables(results), sep="\n", flush=True)


if __name__ == "__main__":
    main()
