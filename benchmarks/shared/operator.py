"""`chunk_gla` as the benchmarks draw its inputs, call it, and time it on a GPU."""

import os
from collections.abc import Callable
from unittest import mock

import torch
from shared.inputs import large_inputs
from shared.timing import Timing, cold, host_us

import gla_ext

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
FORWARD, BOTH = MODES = ("forward", "forward + backward")
PATH_VARIABLE = "GLA_EXT_CUDA_PATH"
HOST_SHAPE = (1, 64, 4, 128, 256)

Times = dict[str, dict[str, Timing]]  # by mode and name


def name_of(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def parse_shape(text: str) -> tuple[int, ...]:
    """(B, T, H, K, V) of "32x2048x4x128x256"."""
    shape = tuple(map(int, text.split("x")))
    if len(shape) != 5:
        raise ValueError(f"expected BxTxHxKxV, got {text}")
    return shape


def floor_ms(shape: tuple[int, ...], mode: str, bytes_per_s: float) -> float:
    """Every bf16 input read once and every output written once, at the rate of a copy."""
    B, T, H, K, V = shape
    values = 3 * K + 2 * V + (6 * K + 3 * V if mode == BOTH else 0)
    return 1e3 * B * T * H * 2 * values / bytes_per_s


def draw(shape, gate: float = 1 / 16, lengths: tuple[int, ...] | None = None):
    """bf16 inputs with gates logsigmoid(N(0, 1)) * gate, trained GLA's, drawn on the GPU; lengths:
    of packed sequences.
    """
    return large_inputs(*shape, gate=gate, lengths=lengths)


def implementations(fla: bool) -> dict[str, Callable]:
    """`chunk_gla` of gla_ext and, if wanted, of FLA."""
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
    return mock.patch.dict(os.environ, {PATH_VARIABLE: "steps"})(run)


def variants(functions: dict[str, Callable], x, backward: bool) -> dict[str, Callable]:
    """A call of every function, and of gla_ext on the step path."""
    calls = {name: call(function, x, backward) for name, function in functions.items()}
    return {"gla_ext": calls["gla_ext"], "steps": on_steps(calls["gla_ext"]), **calls}


def time_both_ways(calls: Callable[[bool], dict[str, Callable]]) -> Times:
    """Times of the calls forward, and of those both ways."""
    results = {}
    for mode in MODES:
        with torch.set_grad_enabled(mode == BOTH):
            results[mode] = cold(calls(mode == BOTH))
    torch.cuda.empty_cache()
    return results


def speed(x, functions: dict[str, Callable]) -> Times:
    """Times on inputs x."""
    return time_both_ways(lambda backward: variants(functions, x, backward))


def peak_bytes(x, functions: dict[str, Callable]) -> dict[str, int]:
    """The most that one forward + backward has allocated beside the inputs x."""
    return {name: peak_of(run) for name, run in variants(functions, x, True).items()}


def peak_of(run: Callable[[], object]) -> int:
    """The most bytes that a second call has allocated beside what was there."""
    run()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def host_times(functions: dict[str, Callable]) -> dict[str, dict[str, float]]:
    """Microseconds of host time of a call, by mode and name; a view is what torch itself takes.

    In one thread: torch's engine then runs backward where it is called, and not in the GPU's thread
    of its own, which it hands over to and waits for.
    """
    x = draw(HOST_SHAPE)
    leaf = x.v.detach().requires_grad_()
    calls = {name: call(f, x, True) for name, f in functions.items()}
    calls["a view"] = lambda: torch.autograd.grad(leaf.view(x.do.shape), leaf, x.do)
    with torch.no_grad():
        results = {FORWARD: {n: host_us(call(f, x, False)) for n, f in functions.items()}}
    for mode, threads in ((BOTH, True), (f"{BOTH}, in one thread", False)):
        with torch.autograd.set_multithreading_enabled(threads):
            results[mode] = {name: host_us(run) for name, run in calls.items()}
    return results
