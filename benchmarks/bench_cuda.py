"""What is measured on CUDA; `check_gpu.py` chooses, runs and prints it.

Alone it does what needs a process of its own:

    python benchmarks/bench_cuda.py first-call            # seconds of the first calls, as JSON
    python benchmarks/bench_cuda.py once 32x2048x4x128x256  # one forward + backward, for a profiler
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from shared.timing import Timing, cold, host_us

BASELINES = (  # B, T, H, K, V; the first is the main shape
    (32, 2048, 4, 128, 256),
    (32, 1024, 4, 128, 256),
    (8, 2048, 4, 128, 256),
    (32, 4096, 4, 128, 256),
    (32, 8192, 4, 128, 256),
    (1, 2048, 4, 128, 256),
    (1, 32768, 4, 128, 256),
    (1, 131072, 4, 128, 256),
    (8, 2048, 4, 256, 512),
    (8, 8192, 4, 256, 512),
    (1, 65536, 4, 256, 512),
    (8, 2048, 16, 128, 128),
    (32, 2048, 16, 64, 64),
)
SHAPES = {"x".join(map(str, shape)): shape for shape in BASELINES}
MAIN = next(iter(SHAPES))
MODES = ("forward", "forward + backward")
PATH_VARIABLE = "GLA_EXT_CUDA_PATH"
HOST_SHAPE = (1, 64, 4, 128, 256)
VIEW = "a view"


def parse_shape(text: str) -> tuple[int, ...]:
    """(B, T, H, K, V) of "32x2048x4x128x256"."""
    shape = tuple(map(int, text.split("x")))
    if len(shape) != 5:
        raise ValueError(f"expected BxTxHxKxV, got {text}")
    return shape


def floor_ms(shape, backward: bool, bytes_per_s: float) -> float:
    """Every bf16 input read once and every output written once, at the rate of a copy."""
    B, T, H, K, V = shape
    values = 3 * K + 2 * V + (6 * K + 3 * V if backward else 0)
    return 1e3 * B * T * H * 2 * values / bytes_per_s


def draw(shape, gate: float = 1 / 16, lengths: tuple[int, ...] | None = None):
    """bf16 inputs with gates logsigmoid(N(0, 1)) * gate, trained GLA's, drawn on the GPU; lengths:
    of packed sequences.
    """
    from shared.inputs import large_inputs

    return large_inputs(*shape, gate=gate, lengths=lengths)


def implementations(fla: bool) -> dict[str, Callable]:
    """`chunk_gla` of gla_ext and, if wanted and installed, of FLA."""
    import gla_ext

    return {"gla_ext": gla_ext.chunk_gla} | ({"FLA": by_fla} if fla else {})


def by_fla(q, k, v, g, **packed):
    """FLA's function for such gates."""
    from fla.ops.gla import chunk_gla
    from fla.ops.simple_gla import chunk_simple_gla

    return (chunk_simple_gla if g.dim() == 3 else chunk_gla)(q, k, v, g, **packed)


def call(function, x, backward: bool) -> Callable[[], object]:
    """One forward, or forward + backward, of `function` on x."""
    leaves = [t.detach().requires_grad_(backward) for t in (x.q, x.k, x.v, x.g)]
    packed = {} if x.cu_seqlens is None else {"cu_seqlens": x.cu_seqlens}

    def run():
        o, _ = function(*leaves, **packed)
        return torch.autograd.grad(o, leaves, x.do) if backward else o

    return run


def on_steps(run: Callable[[], object]) -> Callable[[], object]:
    """`run` on the path of the step kernels, forward and backward."""

    def forced():
        before = os.environ.get(PATH_VARIABLE)
        os.environ[PATH_VARIABLE] = "steps"
        try:
            return run()
        finally:
            if before is None:
                del os.environ[PATH_VARIABLE]
            else:
                os.environ[PATH_VARIABLE] = before

    return forced


def variants(functions: dict[str, Callable], x, backward: bool) -> dict[str, Callable]:
    """A call of every function, and of gla_ext on the step path."""
    calls = {name: call(function, x, backward) for name, function in functions.items()}
    return {"gla_ext": calls["gla_ext"], "steps": on_steps(calls["gla_ext"]), **calls}


def speed(x, functions: dict[str, Callable]) -> dict[str, dict[str, Timing]]:
    """Times on inputs x, by mode and name."""
    results = {}
    for backward in (False, True):
        with torch.set_grad_enabled(backward):
            results[MODES[backward]] = cold(variants(functions, x, backward))
    return results


def peak_bytes(x, functions: dict[str, Callable]) -> dict[str, int]:
    """The most that one forward + backward has allocated beside the inputs x."""
    results = {}
    for name, run in variants(functions, x, True).items():
        run()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        results[name] = torch.cuda.max_memory_allocated() - before
    return results


def view_call(x) -> Callable[[], object]:
    """Both ways of a view, which launches nothing: what torch itself takes."""
    leaf = x.v.detach().requires_grad_()
    return lambda: torch.autograd.grad(leaf.view(x.do.shape), leaf, x.do)


def host_times(functions: dict[str, Callable]) -> dict[str, dict[str, float]]:
    """Microseconds of host time of a call, by mode and name.

    In one thread: torch's engine then runs backward where it is called, and not in the GPU's thread
    of its own, which it hands over to and waits for.
    """
    x = draw(HOST_SHAPE)
    forward, both = MODES
    with torch.no_grad():
        results = {forward: {n: host_us(call(f, x, False)) for n, f in functions.items()}}
    calls = {name: call(f, x, True) for name, f in functions.items()} | {VIEW: view_call(x)}
    for mode, threads in ((both, True), (f"{both}, in one thread", False)):
        with torch.autograd.set_multithreading_enabled(threads):
            results[mode] = {name: host_us(run) for name, run in calls.items()}
    return results


def step_times(shape) -> dict[str, Timing]:
    """Each step operator alone, as the tests call it."""
    from shared.inputs import STEPS, compose_steps

    with torch.no_grad():
        x = compose_steps(draw(shape))
        return cold({name: functools.partial(f, x) for name, (f, _) in STEPS.items()}, 2.0)


def kernel_times(run: Callable[[], object], calls: int = 5) -> list[dict]:
    """The kernels of a call by torch's profiler, the longest in all first: name, launches and
    microseconds of a call.
    """
    run()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
    rows = [
        {"kernel": e.key, "launches": e.count / calls, "us": e.self_device_time_total / calls}
        for e in profile.key_averages()
        if e.self_device_time_total > 0
    ]
    return sorted(rows, key=lambda row: -row["us"])


def first_call() -> dict[str, float]:
    """Seconds, in this process, which must be fresh.

    CUDA itself and torch's autograd, which imports sympy, are started before.
    """
    one = torch.ones(1, device="cuda", requires_grad=True)
    torch.autograd.grad(one + 1, one, torch.ones_like(one))
    times, clock = {}, time.perf_counter

    def measure(name, function):
        start = clock()
        result = function()
        torch.cuda.synchronize()
        times[name] = clock() - start
        return result

    measure("import gla_ext", lambda: __import__("gla_ext"))
    from gla_ext import chunk_gla

    x = draw((2, 256, 4, 128, 256))
    torch.cuda.synchronize()
    with torch.no_grad():
        measure("first forward", call(chunk_gla, x, False))
    measure("first forward + backward", call(chunk_gla, x, True))
    measure("second forward + backward", call(chunk_gla, x, True))
    return times


def first_call_in_a_fresh_process() -> dict[str, float]:
    command = [sys.executable, __file__, "first-call"]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def once(shape):
    """One forward + backward after a first one, between cudaProfilerStart and Stop."""
    import gla_ext

    run = call(gla_ext.chunk_gla, draw(shape), True)
    run()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    run()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["first-call", "once"])
    parser.add_argument("shape", nargs="?", type=parse_shape, default=SHAPES[MAIN])
    arguments = parser.parse_args()
    if arguments.what == "once":
        once(arguments.shape)
    else:
        print(json.dumps(first_call()))


if __name__ == "__main__":
    main()
