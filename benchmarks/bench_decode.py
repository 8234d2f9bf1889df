"""A decoded token of the 374 M model: tokens/s by batch, and the GPU time of every launch.

    python benchmarks/bench_decode.py                    # B 1 to 256, and their launches
    python benchmarks/bench_decode.py --batches 1 8 --no-launches

bf16, random weights, fused projections, greedily, one CUDA graph a step. Each batch is decoded with
the kernels of `gla_ext.model.step`, up to 32 rows whatever a model does, and, as "modules", without
them, in one run. Before anything is timed both ways' logits are compared with those of a forward
over all tokens. Beside tokens/s stands how much of the limit by bytes that is: weights read once a
step, states read and written, at the rate of a copy. The times of launches that overlap count
waiting for the launch before.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from unittest import mock

import bench_cuda
import torch
from pages.cuda_page import short
from parts import bench_generate, bench_model
from parts.bench_generate import emptied
from shared.contenders import Ours
from shared.timing import copy_bytes_per_s
from torch import nn

WAYS = ("modules", "step")
CHECKED_BATCHES = (1, 8, 13, 32)
MOST_ROWS = 32  # that the kernels take, of which a model may use fewer


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured."""

    model: dict
    batches: tuple[int, ...] = (1, 8, 16, 32, 256)
    prompt: int = 64
    steps: int = 100
    samples: int = 7


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


def check(sizes: Sizes, device: str) -> None:
    """Raises WrongResults where a way's logits are not those of a forward over all tokens, or a
    graph's tokens not those of eager steps.
    """
    few = bench_model.of_few_layers(sizes.model)
    model = build(few, device)
    for B in CHECKED_BATCHES:
        prompts = bench_generate.draw_prompts(_generated(sizes, few), B, device)
        for name in WAYS:
            with way(name):
                bench_generate.check_ours(model, prompts)
            print(f"{name}, B {B}: logits and tokens agree", flush=True)


def _generated(sizes: Sizes, model: dict) -> bench_generate.Sizes:
    return bench_generate.Sizes(
        model, prompt=sizes.prompt, steps=sizes.steps, samples=sizes.samples
    )


def limit_seconds(model: nn.Module, contender: Ours, rate: float) -> float:
    """A step's bytes at that rate: all weights but the embeddings, and the states twice."""
    weights = sum(p.nbytes for p in model.parameters()) - model.model.embeddings.weight.nbytes
    return (weights + 2 * contender.decoder.nbytes) / rate


@torch.no_grad()
def measure(sizes: Sizes, with_launches: bool) -> None:
    rate, model = copy_bytes_per_s(), build(sizes.model, "cuda")
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
                    for row in bench_cuda.kernel_times(ours.step, 20)[:14]:
                        count, us = row["launches"], row["us"] / row["launches"]
                        print(f"    {count:4.0f} x {us:7.2f} us  {short(row['kernel'])[:100]}")
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
