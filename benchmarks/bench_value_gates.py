"""What gates on values cost on a GPU: `chunk_gla` with every combination of gates, beside
`fused_recurrent_gla`.

    python benchmarks/bench_value_gates.py
"""

import argparse
import functools
import os

import torch
from shared.timing import cold
from torch.nn.functional import logsigmoid

from gla_ext import chunk_gla, fused_recurrent_gla

SHAPES = ((32, 2048, 4, 128, 256), (8, 2048, 4, 128, 128), (1, 8192, 4, 128, 256))
GATINGS = {
    "g": (True, False),
    "g and gv": (True, True),
    "gv": (False, True),
    "none": (False, False),
}


def make_call(function, shape, dtype, gates, backward: bool, path: str = ""):
    """A call of `function` without arguments, by one of CUDA's paths."""
    B, T, H, K, V = shape
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(D):
        return torch.randn(B, T, H, D, generator=generator, device="cuda").to(dtype)

    q, k, v, do = (normal(D) for D in (K, K, V, V))
    g, gv = (
        logsigmoid(normal(D)) / 16 if there else None
        for D, there in zip((K, V), gates, strict=True)
    )
    leaves = [x.requires_grad_(backward) for x in (q, k, v, g, gv) if x is not None]

    def call():
        os.environ["GLA_EXT_CUDA_PATH"] = path
        if function is chunk_gla:
            o, _ = chunk_gla(q, k, v, g, gv=gv)
        else:
            o, _ = fused_recurrent_gla(q, k, v, g, gv)
        return torch.autograd.grad(o, leaves, do) if backward else o

    return call


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16", help="of every tensor")
    dtype = getattr(torch, parser.parse_args().dtype)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {dtype}, ms by CUDA events")
    for shape in SHAPES:
        for backward in (False, True):
            make = functools.partial(make_call, shape=shape, dtype=dtype, backward=backward)
            calls = {
                f"chunk, {name}": make(chunk_gla, gates=gates) for name, gates in GATINGS.items()
            }
            calls["chunk, g, steps"] = make(chunk_gla, gates=(True, False), path="steps")
            calls["recurrent, g and gv"] = make(fused_recurrent_gla, gates=(True, True))
            mode = "forward + backward" if backward else "forward"
            print(f"\nB {shape[0]}, T {shape[1]}, H {shape[2]}, K {shape[3]}, V {shape[4]}, {mode}")
            for name, timing in cold(calls).items():
                print(f"  {name:22}{timing}")


if __name__ == "__main__":
    main()
