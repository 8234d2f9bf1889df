"""A decoded token of the 374 M model: tokens/s by batch, and the GPU time of every launch.

    python benchmarks/bench_decode.py                    # B 1 to 256, and their launches
    python benchmarks/bench_decode.py --batches 1 8 --no-launches
    python benchmarks/bench_decode.py --buffers          # one operator, with buffers and without

bf16, random weights, fused projections, greedily, one CUDA graph a step. Each batch is decoded in
three ways in one run, whatever a model does: with the kernels of `gla_ext.model.step` (up to 32
rows), with the newest tokens in buffers (`gla_ext.cache._tokens`), and, as "modules", without both.
Before anything is timed each way's logits are compared with those of a forward over all tokens.
Beside tokens/s stands how much of the limit by bytes that is: weights read once a step, states read
and written (with buffers, written once in so many steps, and the buffers read), at the rate of a
copy; and the slowest of consecutive steps. The times of launches that overlap count waiting for the
launch before.
"""

import argparse
import contextlib
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from parts import bench_buffered, bench_generate
from parts.bench_generate import Sizes, emptied
from shared.machine import require_gpu
from shared.models import Ours
from shared.timing import copy_bytes_per_s

from gla_ext.cache import _tokens
from gla_ext.decode import Decoder
from gla_ext.model import fuse_projections, step

WAYS = ("modules", "step", "buffers")
CHECKED_BATCHES = (1, 8, 13, 32)
MOST_ROWS = 32  # that the kernels take, of which a model may use fewer


@contextlib.contextmanager
def way(name: str) -> Iterator[None]:
    """Inside, tokens are decoded so."""
    most = 0 if name == "modules" else MOST_ROWS
    fewest = 1 if name == "buffers" else sys.maxsize
    with (
        mock.patch.object(step, "MOST_ROWS", most),
        mock.patch.object(_tokens, "FEWEST_ROWS", fewest),
    ):
        yield


def check(sizes: Sizes) -> None:
    """Raises WrongResults where a way's logits are not those of a forward over all tokens, or a
    graph's tokens not those of eager steps.
    """
    model = fuse_projections(sizes.build(checked=True))
    for B in CHECKED_BATCHES:
        for name in WAYS:
            with way(name):
                bench_generate.check_ours(model, sizes.draw(B))
            print(f"{name}, B {B}: logits and tokens agree", flush=True)


def kernel_times(run: Callable[[], object], calls: int = 20) -> list[tuple[float, float, str]]:
    """The kernels of a call by torch's profiler, the longest in all first: launches a call, and
    microseconds of one.
    """
    run()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
    events = [e for e in profile.key_averages() if e.self_device_time_total > 0]
    events.sort(key=lambda e: -e.self_device_time_total)
    return [(e.count / calls, e.self_device_time_total / e.count, short(e.key)) for e in events]


def short(kernel: str) -> str:
    """A kernel's name without return type, namespaces and parameters."""
    name = re.sub(r"^void |gla_ext::cuda::|\(anonymous namespace\)::|__nv_", "", kernel)
    return re.sub(r"\((\w+)\)(\d+)", r"\1 \2", name).split("(")[0]


def slowest(run: Callable[[], object], steps: int = 3 * _tokens.LENGTH) -> float:
    """Milliseconds of the slowest of consecutive steps."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    for event in events[:-1]:
        event.record()
        run()
    events[-1].record()
    torch.cuda.synchronize()
    return max(a.elapsed_time(b) for a, b in itertools.pairwise(events))


def bytes_moved(decoder: Decoder) -> float:
    """What a step reads and writes of states and buffers, which are half full on average."""
    buffers = decoder._loop.cache.buffers
    if buffers is None:
        return 2 * decoder.nbytes
    states = decoder.nbytes - buffers.nbytes
    return (1 + 1 / _tokens.LENGTH) * states + buffers.nbytes / 2


@torch.no_grad()
def measure(sizes: Sizes, with_launches: bool) -> None:
    rate, model = copy_bytes_per_s(), fuse_projections(sizes.build())
    print(f"{torch.cuda.get_device_name()}, a copy at {rate / 1e12:.2f} TB/s")
    weights = sum(p.nbytes for p in model.parameters()) - model.model.embeddings.weight.nbytes
    for B in sizes.batches:
        of_modules = None
        for name in WAYS if B <= MOST_ROWS else ("modules", "buffers"):
            with emptied(), way(name):
                ours = Ours(model, B)
                ours.first(sizes.draw(B))
                ms = bench_generate.step_times(ours, sizes).median
                tokens, limit = 1e3 * B / ms, 1e3 * (weights + bytes_moved(ours.decoder)) / rate
                of_modules = of_modules or tokens
                print(
                    f"B {B}, {name}: {tokens:,.0f} tokens/s, {1e3 * ms:.0f} us a step (slowest "
                    f"{1e3 * slowest(ours.step):.0f}), {100 * limit / ms:.0f} % of the limit, "
                    f"{tokens / of_modules:.2f} times modules",
                    flush=True,
                )
                for count, us, kernel in kernel_times(ours.step)[:14] if with_launches else ():
                    print(f"    {count:4.0f} x {us:7.2f} us  {kernel[:100]}")
                del ours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 16, 32, 256])
    parser.add_argument("--no-launches", action="store_true", help="tokens/s alone")
    parser.add_argument("--buffers", action="store_true", help="a step with buffers, nothing else")
    args = parser.parse_args()
    require_gpu()
    if args.buffers:
        return bench_buffered.main()
    sizes = Sizes(prompt=64, batches=tuple(args.batches))
    check(sizes)
    measure(sizes, not args.no_launches)


if __name__ == "__main__":
    main()
