"""A decoded token of the 374 M model: tokens/s by batch, and the GPU time of every launch.

    python benchmarks/bench_decode.py                    # B 1 to 256, and their launches
    python benchmarks/bench_decode.py --batches 1 8 --no-launches
    python benchmarks/bench_decode.py --buffers          # one operator, with buffers and without

bf16, random weights, fused projections, greedily, one CUDA graph a step. Each batch is decoded with
the kernels of `gla_ext.model.step`, up to 32 rows whatever a model does, and, as "modules", without
them, in one run. Before anything is timed both ways' logits are compared with those of a forward
over all tokens. Beside tokens/s stands how much of the limit by bytes that is: weights read once a
step, states read and written, at the rate of a copy. The times of launches that overlap count
waiting for the launch before.
"""

import argparse
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from unittest import mock

import torch
from parts import bench_buffered, bench_generate
from parts.bench_generate import Sizes, emptied
from shared.models import Ours
from shared.timing import copy_bytes_per_s

from gla_ext.model import fuse_projections, step

WAYS = ("modules", "step")
CHECKED_BATCHES = (1, 8, 13, 32)
MOST_ROWS = 32  # that the kernels take, of which a model may use fewer


def way(name: str) -> AbstractContextManager[object]:
    """Inside, tokens are decoded so."""
    return mock.patch.object(step, "MOST_ROWS", MOST_ROWS if name == "step" else 0)


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


@torch.no_grad()
def measure(sizes: Sizes, with_launches: bool) -> None:
    rate, model = copy_bytes_per_s(), fuse_projections(sizes.build())
    print(f"{torch.cuda.get_device_name()}, a copy at {rate / 1e12:.2f} TB/s")
    weights = sum(p.nbytes for p in model.parameters()) - model.model.embeddings.weight.nbytes
    for B in sizes.batches:
        before = None
        for name in WAYS if B <= MOST_ROWS else WAYS[:1]:
            with emptied(), way(name):
                ours = Ours(model, B)
                ours.first(sizes.draw(B))
                ms = bench_generate.step_times(ours, sizes).median
                tokens, limit = 1e3 * B / ms, 1e3 * (weights + 2 * ours.decoder.nbytes) / rate
                faster = "" if before is None else f", {tokens / before:.2f} times modules"
                before = tokens
                print(
                    f"B {B}, {name}: {tokens:,.0f} tokens/s, {1e3 * ms:.0f} us a step, "
                    f"{100 * limit / ms:.0f} % of the limit{faster}",
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
    if not torch.cuda.is_available():
        sys.exit("bench_decode.py: expected a CUDA GPU, found none")
    if args.buffers:
        return bench_buffered.main()
    sizes = Sizes(prompt=64, batches=tuple(args.batches))
    check(sizes)
    measure(sizes, not args.no_launches)


if __name__ == "__main__":
    main()
