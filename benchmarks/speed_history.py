"""Which of ten numbers became over 3 % slower than in the last version, on this machine's GPU:

    python benchmarks/speed_history.py          # measures and compares, in a minute and a half
    python benchmarks/speed_history.py --add    # and writes them down as this version's

benchmarks/results/history.jsonl has a line for a version and a card. The numbers are sustained:
calls back to back, a second of each in turns, five times over, and of the five the median. Results
are checked first. Cards of one name differ a little: of what is said to be slower, time both builds
in turns on one card, by benchmarks/bench_builds.py or bench_training.py. The exit code is 1 if
something became slower.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from pages.tables import table
from parts import bench_generate, bench_layer, training_steps
from parts.training_rows import ROWS
from shared import gate
from shared import operator as bench
from shared.bench_cases import OTHERS, Case
from shared.machine import ROOT, commit, require_gpu
from shared.models import Ours
from shared.timing import Timing, interleave

import gla_ext
from gla_ext.model import fuse_projections

HISTORY = ROOT / "benchmarks" / "results" / "history.jsonl"
ALLOWED = 1.03
FORWARD = (32, 2048, 4, 128, 256)
BOTH_WAYS = (FORWARD, (8, 2048, 4, 256, 512), (32, 2048, 16, 64, 64), (1, 131072, 4, 128, 256))
PACKED = "1x65536x4x128x256, packed, 33 of 5 to 12,106"
LAYER, DECODED = (32, 2048), (1, 256)  # B, T; B

Calls = dict[str, Callable[[], object]]


def operator_calls() -> Calls:
    """`chunk_gla` at six shapes."""
    cases = {bench.name_of(shape): Case(*shape) for shape in BOTH_WAYS} | {PACKED: OTHERS[PACKED]}
    calls: Calls = {}
    for name, case in cases.items():
        x = case.draw()
        gate.require(gate.check_inputs(x, name))
        if case.shape == FORWARD:
            calls[f"{name}, forward"] = torch.no_grad()(bench.call(gla_ext.chunk_gla, x, False))
        calls[f"{name}, both ways"] = bench.call(gla_ext.chunk_gla, x, True)
    return calls


def model_calls() -> Calls:
    """The layer and a model's training step, both ways, and a decoded token of the model."""
    B, T = LAYER
    layers = bench_layer.build(fla=False, compiled=False)
    x, do = (
        torch.randn(B, T, bench_layer.HIDDEN, dtype=torch.bfloat16, device="cuda") for _ in range(2)
    )
    bench_layer.check(layers, x, do)
    calls = {f"layer, {B}x{T}, both ways": bench_layer.calls(layers, x, do, True)["gla_ext"]}
    row = ROWS["eager"]
    training_steps.check("eager", row)
    step, tokens = (
        training_steps.stepper(row, training_steps.build(row)),
        training_steps.tokens_of(row),
    )
    calls[f"374 M, a training step of {row.B}x{row.T}"] = lambda: step(tokens)
    sizes = bench_generate.Sizes(prompt=64)
    checked, model = (fuse_projections(sizes.build(checked=x)) for x in (True, False))
    for B in DECODED:
        bench_generate.check_ours(checked, sizes.draw(B))
        ours = Ours(model, B)
        with torch.no_grad():
            ours.first(sizes.draw(B))
        calls[f"374 M, a decoded token, B {B}"] = torch.no_grad()(ours.step)
    return calls


def sustained(
    calls: Calls, wait: Callable[[], None], seconds: float = 1.0, rounds: int = 5
) -> dict[str, Timing]:
    """Milliseconds of each call among others of its kind."""

    def burst(call: Callable[[], object], count: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(count):
                call()
            wait()

        return run

    counts = {}
    for name, call in calls.items():
        burst(call, 3)()
        start = time.perf_counter()
        burst(call, 3)()
        counts[name] = max(3, int(3 * seconds / (time.perf_counter() - start)))
    bursts = {name: burst(call, counts[name]) for name, call in calls.items()}
    times = interleave(bursts, rounds, budget_s=float("inf"))
    return {
        name: Timing(*(ms / counts[name] for ms in (x.median, x.p20, x.p80)), rounds)
        for name, x in times.items()
    }


def entry(times: dict[str, Timing], card: str) -> dict:
    """A line of the history."""
    return {
        "version": gla_ext.__version__,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "card": card,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "ms": {name: [x.median, x.p20, x.p80] for name, x in times.items()},
    }


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def before(history: list[dict], now: dict) -> dict | None:
    """The line to compare with: the last of this card and another version, else the last of this
    card.
    """
    same = [line for line in history if line["card"] == now["card"]]
    others = [line for line in same if line["version"] != now["version"]]
    return (others or same or [None])[-1]


def add(path: Path, now: dict) -> None:
    """Writes the line, in place of one of the same version and card."""
    kept = [x for x in read(path) if (x["version"], x["card"]) != (now["version"], now["card"])]
    path.write_text("".join(json.dumps(x) + "\n" for x in [*kept, now]))


def ratios(now: dict, then: dict) -> dict[str, float]:
    """Of the numbers that both have, above 1 where it became slower."""
    return {name: x[0] / then["ms"][name][0] for name, x in now["ms"].items() if name in then["ms"]}


def page(now: dict, then: dict | None) -> str:
    """A table, and a line that says what became slower."""
    found = ratios(now, then) if then else {}
    rows = {
        name: [
            f"{median:.4g} ({low:.4g} to {high:.4g})",
            f"{then['ms'][name][0]:.4g}" if name in found else "",
            f"{found[name]:.3f}" if name in found else "",
        ]
        for name, (median, low, high) in now["ms"].items()
    }
    slower = [name for name, ratio in found.items() if ratio > ALLOWED]
    if then is None:
        verdict = f"Nothing to compare with: {HISTORY.name} has no line of {now['card']}."
    elif slower:
        verdict = f"Over {ALLOWED - 1:.0%} slower: {'; '.join(slower)}."
    else:
        verdict = f"None of {len(found)} is over {ALLOWED - 1:.0%} slower."
    head = f"{now['card']}, gla_ext {now['version']} ({now['commit']}), torch {now['torch']}"
    last = f"{then['version']} ({then['commit']}, {then['date']})" if then else "none"
    return "\n".join([*table(head, "", ["ms now", f"ms of {last}", "ratio"], rows), verdict])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--add", action="store_true", help="write the numbers into the history")
    parser.add_argument("--history", type=Path, default=HISTORY, metavar="FILE")
    arguments = parser.parse_args()
    require_gpu()
    try:
        calls = operator_calls() | model_calls()
    except gate.WrongResults as error:
        sys.exit("\n".join((*error.args, "Wrong results: nothing is timed.")))
    now = entry(sustained(calls, torch.cuda.synchronize), torch.cuda.get_device_name())
    then = before(read(arguments.history), now)
    print(page(now, then))
    if arguments.add:
        add(arguments.history, now)
    return int(then is not None and max(ratios(now, then).values(), default=0) > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
