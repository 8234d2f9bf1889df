"""Timing of callables on CPU and on CUDA, and their peak memory on CPU."""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch

SLEEP_CYCLES = 8_000_000  # 4 ms of an H200, more than any call takes on the host


@dataclasses.dataclass(frozen=True)
class Timing:
    """Milliseconds, or what the name of the function that returns it says."""

    median: float
    p20: float
    p80: float
    runs: int

    def __str__(self) -> str:
        return f"{_short(self.median)} ({_short(self.p20)} to {_short(self.p80)})"


def _short(x: float) -> str:
    return f"{x:.3g}" if x < 1000 else f"{x:.0f}"


def interleave(
    variants: dict[str, Callable[[], object]], rounds: int = 20, budget_s: float = 20.0
) -> dict[str, Timing]:
    """Runs the variants in turns, so that what else the machine does meets all of them alike.

    Args:
        rounds: runs of each variant after one to warm up.
        budget_s: a variant that has taken this long in all is left out of later rounds, but not
            before its third run.
    """
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for function in variants.values():
        function()
    for _ in range(rounds):
        for name, function in variants.items():
            if len(samples[name]) >= 3 and sum(samples[name]) > budget_s:
                continue
            start = time.perf_counter()
            function()
            samples[name].append(time.perf_counter() - start)
    return {name: summary([1e3 * x for x in own]) for name, own in samples.items()}


def elapsed_ms(call: Callable[[], object]) -> float:
    """By CUDA events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def cold(variants: dict[str, Callable], budget_s: float = 1.0) -> dict[str, Timing]:
    """Milliseconds by CUDA events, the variants in turns, each with a cold L2.

    The GPU waits for some milliseconds first, so that a call is queued before it starts: its time
    is the GPU's alone.
    """
    size = 2 * torch.cuda.get_device_properties().L2_cache_size
    flush = torch.empty(max(size, 2**27), dtype=torch.int8, device="cuda")
    samples: dict[str, list[float]] = {name: [] for name in variants}

    def once(name: str) -> float:
        flush.zero_()
        torch.cuda._sleep(SLEEP_CYCLES)
        return elapsed_ms(variants[name])

    estimate = 0.0
    for name in variants:
        once(name)
        estimate += min(once(name), once(name))
    rounds = min(60, max(10, int(1e3 * budget_s / estimate)))
    for _ in range(rounds):
        for name, own in samples.items():
            own.append(once(name))
    return {name: summary(own) for name, own in samples.items()}


def capture(call: Callable[[], object], count: int = 1) -> torch.cuda.CUDAGraph:
    """A CUDA graph of `count` calls one after the other, after two calls to warm up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    return graph


def slope_us(call: Callable[[], object], counts: tuple[int, int] = (40, 200)) -> Timing:
    """Microseconds that one more call takes in a CUDA graph, L2 as the calls leave it.

    The median, and the span, over pairs of replays of a shorter and a longer graph: what a replay
    costs by itself is in both.
    """
    graphs = [capture(call, count) for count in counts]
    for graph in graphs:
        elapsed_ms(graph.replay)
    samples = []
    for _ in range(15):
        short, long = (elapsed_ms(graph.replay) for graph in graphs)
        samples.append(1e3 * (long - short) / (counts[1] - counts[0]))
    return summary(samples)


def host_us(call: Callable[[], object], calls: int = 1000, runs: int = 5) -> float:
    """Microseconds of host time of a call, the median of `runs` means over `calls`.

    The device is waited for outside of the timed part, after every 40 calls, so that the launch
    queue (1,024 deep) never fills.
    """
    means, batch = [], 40
    for _ in range(runs + 1):  # the first one warms up
        total = 0.0
        for _ in range(calls // batch):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(batch):
                call()
            total += time.perf_counter() - start
        means.append(1e6 * total / (calls // batch * batch))
    return statistics.median(means[1:])


def copy_bytes_per_s() -> float:
    """The rate of a device copy, its reads and its writes together."""
    source = torch.empty(2**30, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    ms = cold({"copy": lambda: target.copy_(source)})["copy"].median
    return 1e3 * 2 * source.numel() / ms


def summary(samples_ms: list[float]) -> Timing:
    fifths = statistics.quantiles(samples_ms, n=5, method="inclusive")
    return Timing(statistics.median(samples_ms), fifths[0], fifths[-1], len(samples_ms))


def peak_bytes(script: str, *arguments: str) -> int:
    """What a run of `script` with the arguments prints as JSON: the growth of its peak memory."""
    output = subprocess.run(
        [sys.executable, script, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"MALLOC_ARENA_MAX": "1"},
    )
    return json.loads(output.stdout)


def high_water_mark() -> int:
    """The largest resident set of this process so far, bytes (Linux)."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
