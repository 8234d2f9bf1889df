"""Times gla_ext on CPU beside plain PyTorch and attention, and writes results/RESULTS_CPU.md.

    python benchmarks/bench_cpu.py

1. chunk_gla, the pure-PyTorch chunked reference and the PyTorch recurrence on one training shape.
2. Each of the ten steps alone on that shape.
3. chunk_gla and causal scaled_dot_product_attention of the same model width over T.
4. Peak memory of both over T.

All of it in fp32. First the results are checked against the recurrence in fp64;
if they are wrong nothing is timed. Variants run in turns within a comparison.
"""

import argparse
import functools
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from pages.tables import table
from shared import gate
from shared.inputs import SHAPES, STEPS, compose_steps, exact, make_inputs, ours
from shared.machine import commit, cpu_name
from shared.operator import BOTH, MODES
from shared.picture import can_be_drawn, over_lengths, panels
from shared.timing import high_water_mark, interleave, peak_bytes
from torch.nn.functional import logsigmoid, scaled_dot_product_attention

import gla_ext
from gla_ext import _C, reference, selftest

HERE = Path(__file__).parent

TRAIN = SHAPES["train"]
GLA_HEADS = (4, 64, 128)  # H, K, V of a model 512 wide: keys take half of it, values all
ATTENTION_HEADS = (8, 64)
LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
MEMORY_LENGTHS = (1024, 2048, 4096, 8192, 16384)


def check() -> None:
    """Raises WrongResults unless small cases and the training shape's heads are right."""
    gate.require(gate.check_small("cpu", torch.float32))
    _, _, *heads = TRAIN
    inputs = make_inputs(1, 300, *heads, gate=1 / 16, states=False)
    expected = exact(inputs)
    for name, value in ours(inputs).items():
        tolerance = selftest.tolerance(name, torch.float32)
        gate.require_close({name: value}, {name: expected[name]}, tolerance, "train shape")


def gla_step(function, B: int, T: int, H: int, K: int, V: int, backward: bool = True) -> Callable:
    """A callable that runs `function(q, k, v, g)` forward, and backward if wanted."""
    q, k, v = (torch.randn(B, T, H, D, requires_grad=backward) for D in (K, K, V))
    g = (logsigmoid(torch.randn(B, T, H, K)) / 16).requires_grad_(backward)
    do = torch.randn(B, T, H, V)

    def step():
        o, _ = function(q, k, v, g)
        if backward:
            torch.autograd.grad(o, (q, k, v, g), do)

    return step


def attention_step(B: int, T: int, H: int, D: int, backward: bool = True) -> Callable:
    q, k, v = (torch.randn(B, H, T, D, requires_grad=backward) for _ in range(3))
    do = torch.randn(B, H, T, D)

    def step():
        o = scaled_dot_product_attention(q, k, v, is_causal=True)
        if backward:
            torch.autograd.grad(o, (q, k, v), do)

    return step


def forms(rounds: int) -> list[str]:
    functions = {
        "gla_ext.chunk_gla": gla_ext.chunk_gla,
        "PyTorch, chunked (gla_ext.reference.chunk_gla)": reference.chunk_gla,
        "PyTorch, recurrence (gla_ext.reference.recurrence)": reference.recurrence,
    }
    rows: dict[str, list] = {name: [] for name in functions}
    for mode in MODES:
        steps = {name: gla_step(f, *TRAIN, mode == BOTH) for name, f in functions.items()}
        timings = interleave(steps, rounds)
        for name, timing in timings.items():
            faster = timing.median / timings["gla_ext.chunk_gla"].median
            rows[name] += [timing, f"{faster:.1f}"]
    return table(
        "One training shape: B {}, T {}, H {}, K {}, V {}".format(*TRAIN),
        "",
        [head for mode in MODES for head in (f"{mode}, ms", "gla_ext is faster by")],
        rows,
    )


def steps_alone(rounds: int) -> list[str]:
    x = compose_steps(make_inputs(*TRAIN, gate=1 / 16, states=False))
    calls = {f"`{name}`": functools.partial(call, x) for name, (call, _) in STEPS.items()}
    rows = {name: [timing] for name, timing in interleave(calls, rounds).items()}
    return table("The steps alone on that shape", "", ["ms"], rows)


def over_t(rounds: int, lengths: list[int], picture: Path) -> list[str]:
    """The table, and the picture of both ways."""
    H, K, V = GLA_HEADS
    heads, D = ATTENTION_HEADS
    rows: dict[str, list] = {f"T {T}": [] for T in lengths}
    for mode in MODES:
        found = []
        for T, cells in zip(lengths, rows.values(), strict=True):
            steps = {
                "gla_ext.chunk_gla": gla_step(gla_ext.chunk_gla, 1, T, *GLA_HEADS, mode == BOTH),
                "scaled_dot_product_attention": attention_step(
                    1, T, *ATTENTION_HEADS, mode == BOTH
                ),
            }
            found.append(interleave(steps, rounds))
            gla, attention = found[-1].values()
            cells += [gla, attention, f"{attention.median / gla.median:.2f}"]
    lines = table(
        "Against attention of the same model width (512)",
        f"chunk_gla: B 1, H {H}, K {K}, V {V}. scaled_dot_product_attention: {heads} heads of {D}, "
        "causal. A ratio under 1 is a loss.",
        [head for mode in MODES for head in (f"{mode}: GLA, ms", "attention, ms", "ratio")],
        rows,
    )
    if not can_be_drawn():
        return lines
    with panels(picture, 1, (6, 4)) as (_, (axis,)):
        for name in found[0]:
            timings = [row[name] for row in found]
            axis.plot(lengths, [x.median for x in timings], marker="o", label=name)
            low, high = [x.p20 for x in timings], [x.p80 for x in timings]
            axis.fill_between(lengths, low, high, alpha=0.2)
        over_lengths(axis, lengths, yscale="log", xlabel="tokens", ylabel=f"{BOTH}, ms")
        axis.set_title("B 1, model width 512, fp32, CPU")
        axis.legend()
    return [*lines, "", f"![Time over T]({picture.name})"]


MEMORY_STEPS = {
    "GLA": lambda T: gla_step(gla_ext.chunk_gla, 1, T, *GLA_HEADS),
    "PyTorch, chunked": lambda T: gla_step(reference.chunk_gla, 1, T, *GLA_HEADS),
    "attention": lambda T: attention_step(1, T, *ATTENTION_HEADS),
}


def measure_memory(variant: str, T: int) -> int:
    """Growth of this process's peak memory over one forward + backward, inputs included, bytes."""
    MEMORY_STEPS[variant](64)()
    before = high_water_mark()
    MEMORY_STEPS[variant](T)()
    return high_water_mark() - before


def memory() -> list[str]:
    peaks = {
        f"T {T}": [peak_bytes(__file__, "--memory", name, str(T)) for name in MEMORY_STEPS]
        for T in MEMORY_LENGTHS
    }
    return table(
        "Peak memory over T",
        "Growth of the process's peak over one forward + backward, inputs included, MiB; B 1, "
        "width 512.",
        MEMORY_STEPS,
        {T: [f"{x / 2**20:.0f}" for x in row] for T, row in peaks.items()},
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20, help="runs a variant (default: 20)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=LENGTHS, help="T for the attention comparison"
    )
    parser.add_argument(
        "--output", type=Path, default=HERE / "results" / "RESULTS_CPU.md", help="the page to write"
    )
    parser.add_argument("--memory", nargs=2, metavar=("VARIANT", "T"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    rounds = arguments.rounds
    if rounds < 2:
        parser.error("expected --rounds to be at least 2")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    if arguments.memory:
        variant, T = arguments.memory
        print(json.dumps(measure_memory(variant, int(T))))
        return 0
    try:
        check()
    except gate.WrongResults as error:
        print("Not timed, because the results are wrong:", *error.args, sep="\n", file=sys.stderr)
        return 1
    lines = [
        "# gla_ext on CPU",
        "",
        "Written by `benchmarks/bench_cpu.py`; all from one run, in fp32: medians and, in "
        "brackets, the 20th and 80th percentile.",
        "",
        f"- CPU: {cpu_name()}, {torch.get_num_threads()} threads, load average "
        f"{os.getloadavg()[0]:.1f} at the start",
        f"- torch {torch.__version__}, Python {platform.python_version()}",
        f"- gla_ext {gla_ext.__version__}, commit {commit()}, CPU capability {_C.cpu_capability()}",
        f"- Command: `{shlex.join(['python', 'benchmarks/bench_cpu.py', *sys.argv[1:]])}`",
        *forms(rounds),
        *steps_alone(rounds),
        *over_t(rounds, arguments.lengths, arguments.output.with_suffix(".png")),
        *memory(),
    ]
    arguments.output.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
