"""Compiles the layer with AOTInductor into a package that runs in C++, without Python.

    python examples/aot_inductor.py [OUT]
    cmake -S . -B build && cmake --build build --target run_package

The command it prints then runs the package in examples/run_package.cpp, on CPU, at several lengths,
and compares with what the layer gave here. Compiling takes a minute.
"""

import argparse
import shlex
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gla_ext import GatedLinearAttention
from gla_ext.cache import GLACache

BOUND = 1e-5  # largest error over the largest element, in fp32
# The package looks for libtorch.so, which the program itself does not load.
LIBRARIES = Path(torch.__file__).parent / "lib"


class Segment(nn.Module):
    """The layer with its states as tensors: a stretch of tokens, after what came before.

    Called with x `[B, T, hidden_size]`, a padding mask `[B, T]`, the recurrent state
    `[B, H, V, K]` and, of a layer with short convolutions, their three states; gives y, shaped as
    x, and the states after it.
    """

    def __init__(self, layer: GatedLinearAttention) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, mask: Tensor, state: Tensor, *conv_state: Tensor):
        cache = GLACache()
        cache.update(layer_idx=0, recurrent_state=state, conv_state=conv_state or None)
        y, _, cache = self.layer(x, mask, cache, use_cache=True)
        return y, cache[0]["recurrent_state"], *(cache[0]["conv_state"] or ())


def make_inputs(layer: GatedLinearAttention, T: int) -> tuple[Tensor, ...]:
    """Two sequences of T tokens, a third of the second one padding, on states of some past."""
    generator = torch.Generator().manual_seed(T)
    shapes = [(2, T, layer.hidden_size), (2, layer.num_heads, layer.head_v_dim, layer.head_k_dim)]
    if layer.use_short_conv:
        convs = (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d)
        shapes += [(2, conv.hidden_size, layer.conv_size) for conv in convs]
    x, *states = (torch.randn(shape, generator=generator) for shape in shapes)
    mask = (torch.arange(T) >= torch.tensor([[0], [T // 3]])).long()
    return x, mask, *states


@torch.no_grad()
def package(segment: Segment, path: Path) -> str:
    """Compiles for every T from 2 to 4096; returns the path of what it wrote."""
    T = torch.export.Dim("T", min=2, max=4096)
    inputs = make_inputs(segment.layer, 20)
    shapes = [{1: T}, {1: T}, None]
    if len(inputs) > 3:
        shapes.append((None,) * (len(inputs) - 3))  # of *conv_state
    exported = torch.export.export(segment, inputs, dynamic_shapes=shapes)
    return torch._inductor.aoti_compile_and_package(exported, package_path=str(path))


@torch.no_grad()
def make_cases(segment: Segment) -> list[dict[str, Any]]:
    """What run_package reads: inputs of several lengths and what the layer makes of them."""
    inputs = [make_inputs(segment.layer, T) for T in (2, 20, 99)]
    return [{"inputs": [*x], "expected": [*segment(*x)], "bound": BOUND} for x in inputs]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, nargs="?", default=Path("runs/package"))
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--short-conv", action="store_true", help="short convolutions")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    sizes = {"hidden_size": args.hidden_size, "num_heads": args.heads}
    layer = GatedLinearAttention(**sizes, use_short_conv=args.short_conv, layer_idx=0)
    segment = Segment(layer).eval()
    args.out.mkdir(parents=True, exist_ok=True)
    cases = args.out / "cases.pt"
    torch.save(make_cases(segment), cases)
    path = package(segment, args.out / "layer.pt2")
    command = shlex.join(["build/run_package", str(path), str(cases)])
    print(f"LD_LIBRARY_PATH={shlex.quote(str(LIBRARIES))} {command}")


if __name__ == "__main__":
    main()
