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
from pathlib import Path

import torch
from pages.tables import table
from shared.inputs import SHAPES, STEPS, compose_steps, exact, make_inputs, ours
from shared.machine import commit, cpu_name
from shared.timing import Timing, high_water_mark, interleave, peak_bytes
from torch.nn.functional import logsigmoid, scaled_dot_product_attention

import gla_ext
from gla_ext import _C, reference, selftest

HERE = Path(__file__).parent

GLA_HEADS = (4, 64, 128)  # H, K, V of a model 512 wide: keys take half of it, values all
ATTENTION_HEADS = (8, 64)
LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
MEMORY_LENGTHS = (1024, 2048, 4096, 8192, 16384)


def check() -> list[str]:
    """What is wrong with the results, one line each."""
    wrong = []
    for case in selftest.CASES:
        for name, error in selftest.check(case, torch.float32, "cpu").items():
            if not error <= selftest.tolerance(name, torch.float32):
                wrong.append(f"{case.name}: {name} is off by {error:.1e}")
    _, _, H, K, V = SHAPES["train"]
    inputs = make_inputs(1, 300, H, K, V, gate=1 / 16, states=False)
    expected = exact(inputs)
    for name, value in ours(inputs).items():
        error = selftest.relative_error(value, expected[name])
        if not error <= selftest.tolerance(name, torch.float32):
            wrong.append(f"train shape: {name} is off by {error:.1e}")
    return wrong


def gla_step(function, B: int, T: int, H: int, K: int, V: int, backward: bool = True):
    """A callable that runs `function(q, k, v, g)` forward, and backward if wanted."""
    q, k, v = (torch.randn(B, T, H, D, requires_grad=backward) for D in (K, K, V))
    g = (logsigmoid(torch.randn(B, T, H, K)) / 16).requires_grad_(backward)
    do = torch.randn(B, T, H, V)

    def step():
        o, _ = function(q, k, v, g)
        if backward:
            torch.autograd.grad(o, (q, k, v, g), do)

    return step


def attention_step(B: int, T: int, H: int, D: int, backward: bool = True):
    q, k, v = (torch.randn(B, H, T, D, requires_grad=backward) for _ in range(3))
    do = torch.randn(B, H, T, D)

    def step():
        o = scaled_dot_product_attention(q, k, v, is_causal=True)
        if backward:
            torch.autograd.grad(o, (q, k, v), do)

    return step


def compare_forms(rounds: int) -> dict[str, dict[str, Timing]]:
    functions = {
        "gla_ext.chunk_gla": gla_ext.chunk_gla,
        "PyTorch, chunked (gla_ext.reference.chunk_gla)": reference.chunk_gla,
        "PyTorch, recurrence (gla_ext.reference.recurrence)": reference.recurrence,
    }
    results = {}
    for backward in (False, True):
        steps = {
            name: gla_step(function, *SHAPES["train"], backward=backward)
            for name, function in functions.items()
        }
        results["forward + backward" if backward else "forward"] = interleave(steps, rounds)
    return results


def time_steps(rounds: int) -> dict[str, Timing]:
    x = compose_steps(make_inputs(*SHAPES["train"], gate=1 / 16, states=False))
    calls = {name: functools.partial(call, x) for name, (call, _) in STEPS.items()}
    return interleave(calls, rounds)


def compare_lengths(rounds: int, lengths, backward: bool) -> dict[int, dict[str, Timing]]:
    return {
        T: interleave(
            {
                "gla": gla_step(gla_ext.chunk_gla, 1, T, *GLA_HEADS, backward=backward),
                "attention": attention_step(1, T, *ATTENTION_HEADS, backward=backward),
            },
            rounds,
        )
        for T in lengths
    }


MEMORY_STEPS = {
    "gla": lambda T: gla_step(gla_ext.chunk_gla, 1, T, *GLA_HEADS),
    "reference": lambda T: gla_step(reference.chunk_gla, 1, T, *GLA_HEADS),
    "attention": lambda T: attention_step(1, T, *ATTENTION_HEADS),
}


def measure_memory(variant: str, T: int) -> int:
    """Growth of this process's peak memory over one forward + backward, inputs included, bytes."""
    MEMORY_STEPS[variant](64)()
    before = high_water_mark()
    MEMORY_STEPS[variant](T)()
    return high_water_mark() - before


def environment() -> list[str]:
    return [
        f"- CPU: {cpu_name()}, {torch.get_num_threads()} threads, load average "
        f"{os.getloadavg()[0]:.1f} at the start",
        f"- torch {torch.__version__}, Python {platform.python_version()}",
        f"- gla_ext {gla_ext.__version__}, commit {commit()}, CPU capability {_C.cpu_capability()}",
        f"- Command: `{shlex.join(['python', 'benchmarks/bench_cpu.py', *sys.argv[1:]])}`",
    ]


def forms_table(results) -> list[str]:
    B, T, H, K, V = SHAPES["train"]
    ours = {mode: timings["gla_ext.chunk_gla"].median for mode, timings in results.items()}
    return table(
        f"One training shape: B {B}, T {T}, H {H}, K {K}, V {V}",
        "",
        [head for mode in results for head in (f"{mode}, ms", "gla_ext is faster by")],
        {
            name: [
                cell
                for mode, timings in results.items()
                for cell in (str(timings[name]), f"{timings[name].median / ours[mode]:.1f}")
            ]
            for name in next(iter(results.values()))
        },
    )


def steps_table(steps) -> list[str]:
    rows = {f"`{name}`": [str(timing)] for name, timing in steps.items()}
    return table("The steps alone on that shape", "", ["ms"], rows)


def lengths_table(forward, both) -> list[str]:
    H, K, V = GLA_HEADS
    heads, D = ATTENTION_HEADS
    rows: dict[str, list[str]] = {}
    for T in both:
        for results in (forward, both):
            gla, attention = results[T]["gla"], results[T]["attention"]
            cells = [str(gla), str(attention), f"{attention.median / gla.median:.2f}"]
            rows.setdefault(f"T {T}", []).extend(cells)
    return table(
        "Against attention of the same model width (512)",
        f"chunk_gla: B 1, H {H}, K {K}, V {V}. scaled_dot_product_attention: {heads} heads of {D}, "
        "causal. A ratio under 1 is a loss.",
        [
            *("forward: GLA, ms", "attention, ms", "ratio"),
            *("forward + backward: GLA, ms", "attention, ms", "ratio"),
        ],
        rows,
    )


def memory_table(memory) -> list[str]:
    return table(
        "Peak memory over T",
        "Growth of the process's peak over one forward + backward, inputs included, MiB; B 1, "
        "width 512.",
        ["GLA", "PyTorch, chunked", "attention"],
        {f"T {T}": [f"{x / 2**20:.0f}" for x in peaks.values()] for T, peaks in memory.items()},
    )


def plot(both, path: Path) -> bool:
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    labels = {"gla": "gla_ext.chunk_gla", "attention": "scaled_dot_product_attention"}
    for name, label in labels.items():
        timings = [both[T][name] for T in both]
        axes.plot(list(both), [x.median for x in timings], marker="o", label=label)
        axes.fill_between(list(both), [x.p20 for x in timings], [x.p80 for x in timings], alpha=0.2)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="forward + backward, ms")
    axes.set_xticks(list(both), [str(T) for T in both])
    axes.set_xticks([], minor=True)
    axes.set_title("B 1, model width 512, fp32, CPU")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    return True


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
    if arguments.rounds < 2:
        parser.error("expected --rounds to be at least 2")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    if arguments.memory:
        variant, T = arguments.memory
        print(json.dumps(measure_memory(variant, int(T))))
        return 0

    if wrong := check():
        print("Not timed, because the results are wrong:", *wrong, sep="\n", file=sys.stderr)
        return 1
    setup = environment()
    forms = compare_forms(arguments.rounds)
    steps = time_steps(arguments.rounds)
    forward, both = (compare_lengths(arguments.rounds, arguments.lengths, x) for x in (False, True))
    memory = {
        T: {name: peak_bytes(__file__, "--memory", name, str(T)) for name in MEMORY_STEPS}
        for T in MEMORY_LENGTHS
    }
    picture = arguments.output.with_suffix(".png")
    lines = [
        "# gla_ext on CPU",
        "",
        "Written by `benchmarks/bench_cpu.py`; all from one run, in fp32: medians and, in "
        "brackets, the 20th and 80th percentile.",
        "",
        *setup,
        *forms_table(forms),
        *steps_table(steps),
        *lengths_table(forward, both),
        *(["", f"![Time over T]({picture.name})"] if plot(both, picture) else []),
        *memory_table(memory),
    ]
    arguments.output.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
