"""A decoded token of the 374 M model: tokens/s by batch, and the GPU time of every launch.

    python benchmarks/bench_decode.py                    # B 1 to 256, and their launches
    python benchmarks/bench_decode.py --batches 1 8 --no-launches

bf16, random weights, fused projections, greedily, one CUDA graph a step. Each batch is decoded with
the kernels of `gla_ext.model.step`, up to 32 rows whatever a model does, and, as "modules", without
them, in one run. Before anything is
timed both ways' logits are compared with a model in fp32. Beside tokens/s stands how much of the
limit by bytes that is: weights read once a step, states read and written, at the rate of a copy.
The times of launches that overlap count waiting for the launch before.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
import sys
from collections.abc import Iterator
from unittest import mock

import torch
from parts import bench_generate, bench_model
from parts.bench_generate import emptied
from shared.contenders import Ours
from shared.gate import WrongResults, require_close
from torch import nn

WAYS = ("modules", "step")
CHECKED_BATCHES = (1, 8, 13, 32)
MOST_ROWS = 32  # that the kernels take, of which a model may use fewer
TOLERANCE = bench_model.LOGITS_TOLERANCE


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured."""

    model: dict
    batches: tuple[int, ...] = (1, 8, 16, 32, 256)
    prompt: int = 64
    steps: int = 100
    samples: int = 7
    copied: int = 1 << 30  # bytes of the copy that gives the rate


SIZES = Sizes(bench_model.MODEL)


@contextlib.contextmanager
def way(name: str) -> Iterator[None]:
    """Inside, tokens are decoded so."""
    from gla_ext.model import step

    with mock.patch.object(step, "MOST_ROWS", MOST_ROWS if name == "step" else 0):
        yield


def build(model: dict, device: str) -> nn.Module:
    from gla_ext.model import fuse_projections

    return fuse_projections(bench_model.build_ours(model, device).eval())


@torch.no_grad()
def check(sizes: Sizes, device: str) -> None:
    """Raises WrongResults where a way's logits are not those of fp32, or a graph's tokens not those
    of eager steps.
    """
    few = bench_model.of_few_layers(sizes.model)
    model = build(few, device)
    for B in CHECKED_BATCHES:
        prompts = bench_generate.draw_prompts(_generated(sizes, few), B, device)
        for name in WAYS:
            with way(name):
                ours = Ours(model, B)
                drawn = [ours.first(prompts).clone()]
                drawn += [ours.step().clone() for _ in range(8)]
                tokens = torch.cat([prompts, torch.stack(drawn, 1)], 1)
                cache = _cache_of(model, prompts)
                found = []
                for t in range(prompts.shape[1], tokens.shape[1] - 1):
                    ids = tokens[:, t : t + 1]
                    found.append(model(ids, past_key_values=cache, use_cache=True).logits)
                logits = torch.cat(found, 1)
            where = f"{name}, B {B}"
            exact = bench_model.exact_logits(few, tokens[:, :-1], logits_to_keep=logits.shape[1])
            require_close({"logits": logits}, {"logits": exact}, TOLERANCE, where)
            if not torch.equal(logits.argmax(-1), tokens[:, prompts.shape[1] + 1 :]):
                raise WrongResults(f"{where}: a CUDA graph draws other tokens than eager steps")
            print(f"{where}: logits and tokens agree", flush=True)


def _cache_of(model: nn.Module, prompts: torch.Tensor):
    from gla_ext.cache import StaticGLACache

    cache = StaticGLACache(prompts.shape[0])
    with cache.prefill():
        model(prompts, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


def _generated(sizes: Sizes, model: dict) -> bench_generate.Sizes:
    return bench_generate.Sizes(
        model, prompt=sizes.prompt, steps=sizes.steps, samples=sizes.samples
    )


def copy_rate(count: int) -> float:
    """Bytes a second that a copy on the device reads and writes."""
    x = torch.empty(count, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    y.copy_(x)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(10):
        y.copy_(x)
    end.record()
    end.synchronize()
    return 10 * 2 * count / (1e-3 * start.elapsed_time(end))


def limit_seconds(model: nn.Module, contender: Ours, rate: float) -> float:
    """A step's bytes at that rate: all weights but the embeddings, and the states twice."""
    weights = sum(p.nbytes for p in model.parameters()) - model.model.embeddings.weight.nbytes
    return (weights + 2 * contender.decoder.nbytes) / rate


def launches(contender: Ours, steps: int = 20) -> list[tuple[str, int, float]]:
    """Name, launches a step and microseconds a launch, longest in all first."""
    from torch.profiler import ProfilerActivity, profile

    contender.step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            contender.step()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found.setdefault(_short(event.name), []).append(event.device_time)
    rows = [(name, round(len(us) / steps), sum(us) / len(us)) for name, us in found.items()]
    return sorted(rows, key=lambda row: -row[1] * row[2])


def _short(name: str) -> str:
    name = re.sub(r"\(.*", "", name.replace("(anonymous namespace)::", ""))
    return name.replace("gla_ext::cuda::", "").removeprefix("void ")[:100]


@torch.no_grad()
def measure(sizes: Sizes, with_launches: bool) -> None:
    rate, model = copy_rate(sizes.copied), build(sizes.model, "cuda")
    print(f"{torch.cuda.get_device_name()}, a copy at {rate / 1e12:.2f} TB/s")
    generated = _generated(sizes, sizes.model)
    for B in sizes.batches:
        before = None
        for name in WAYS if B <= MOST_ROWS else WAYS[:1]:
            with emptied(), way(name):
                ours = Ours(model, B)
                ours.first(bench_generate.draw_prompts(generated, B))
                step = bench_generate.step_times(ours, generated)
                limit = limit_seconds(model, ours, rate)
                tokens = 1e3 * B / step.median
                faster = "" if before is None else f", {tokens / before:.2f} times modules"
                before = tokens
                print(
                    f"B {B}, {name}: {tokens:,.0f} tokens/s, {1e3 * step.median:.0f} us a step, "
                    f"{100 * limit / (1e-3 * step.median):.0f} % of the limit{faster}",
                    flush=True,
                )
                if with_launches:
                    for kernel, count, us in launches(ours)[:14]:
                        print(f"    {count:4} x {us:7.2f} us  {kernel}")
                del ours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=list(SIZES.batches))
    parser.add_argument("--no-launches", action="store_true", help="tokens/s alone")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_decode.py: expected a CUDA GPU, found none")
    sizes = dataclasses.replace(SIZES, batches=tuple(args.batches))
    check(sizes, "cuda")
    measure(sizes, not args.no_launches)


if __name__ == "__main__":
    main()
