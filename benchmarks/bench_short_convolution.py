"""The short convolution: the operator and plain torch, beside a copy, and a decoded token.

    python benchmarks/bench_short_convolution.py           # an H200: B 32, T 2048, D 512 and 1024
    python benchmarks/bench_short_convolution.py --shapes 1x32768x1024 --taps 3

bf16 without a bias, x a slice of a tensor of twice its channels, as where the layer's projections
are one product. Forward + backward is both, with gradients of x and weight. Results are checked
against fp64 before anything is timed. The floor reads every input once and writes every output once
at the rate of a copy. A token is forward on a cache, with the cache to go on from.
"""

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from shared.gate import require_close
from shared.streaming import add_floor, gradients_of, print_table, time_modes
from shared.timing import Timing, cold, copy_bytes_per_s
from torch import Tensor

SHAPES = ("32x2048x512", "32x2048x1024", "1x2048x1024", "1x32768x1024")  # B x T x D
TOLERANCE = 0.005  # bf16 results of fp32 sums
CHECKED_TOKENS = 300


def plain(x: Tensor, weight: Tensor) -> Tensor:
    """A sum of shifted products, which inductor makes one kernel of."""
    W, T = weight.shape[-1], x.shape[1]
    inputs = F.pad(x, (0, 0, W - 1, 0))
    taps = weight[:, 0].to(torch.promote_types(x.dtype, torch.float32))
    y = sum(inputs.narrow(1, j, T) * taps[:, j] for j in range(W))
    return F.silu(y).to(x.dtype)


def operator(x: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.gla_ext.short_convolution_fwd(x, weight, None, None, None, False)[0]


def contenders() -> dict[str, Callable]:
    """By name, functions of x and weight."""
    import gla_ext  # noqa: F401  registers the operator

    return {
        "operator": operator,
        "plain": plain,
        "plain, compiled": torch.compile(plain, dynamic=False),
        "operator, compiled": torch.compile(operator, dynamic=False),
    }


def measure_tokens(B: int, T: int, D: int, W: int) -> dict[str, dict[str, Timing]]:
    """Timings by mode and name."""
    torch.compiler.reset()  # each shape is compiled for itself
    functions = contenders()
    wide = torch.randn(B, T, 2 * D, device="cuda", dtype=torch.bfloat16)
    x, dy = wide[..., :D].detach().requires_grad_(), torch.randn_like(wide[..., :D])
    weight = torch.randn(D, 1, W, device="cuda", dtype=torch.bfloat16).requires_grad_()
    few = {"x": x[:1, :CHECKED_TOKENS].detach().requires_grad_(), "weight": weight}
    doubles = {name: t.detach().double().requires_grad_() for name, t in few.items()}
    expected = gradients_of(plain, doubles, dy[:1, :CHECKED_TOKENS].double())
    for name, function in functions.items():
        found = gradients_of(function, few, dy[:1, :CHECKED_TOKENS])
        require_close(found, expected, TOLERANCE, f"convolution, {name}, {B}x{T}x{D}")
    return time_modes(functions, [x, weight], dy)


def measure_decoding(B: int, D: int, W: int) -> Timing:
    """Of the operator, for one token of each row."""
    x = torch.randn(B, 1, D, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(D, 1, W, device="cuda", dtype=torch.bfloat16)
    cache = torch.randn(B, D, W, device="cuda", dtype=torch.bfloat16)
    call = torch.ops.gla_ext.short_convolution_fwd
    with torch.no_grad():
        return cold({"operator": lambda: call(x, weight, None, cache, None, True)})["operator"]


def measure(shapes: tuple[str, ...] = SHAPES, W: int = 4) -> dict[str, dict]:
    """By shape: timings by mode and name, the floor among them."""
    rate, table = copy_bytes_per_s(), {}
    for shape in shapes:
        B, T, D = map(int, shape.split("x"))
        table[shape] = measure_tokens(B, T, D, W)
        for mode, row in table[shape].items():
            tensors = 2 if mode == "forward" else 5
            add_floor(row, 2 * tensors * B * T * D, rate)
        table[shape]["a token"] = {"operator": measure_decoding(B, D, W)}
        torch.cuda.empty_cache()
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="BxTxD")
    parser.add_argument("--taps", type=int, default=4, help="W. Default: 4")
    arguments = parser.parse_args()
    names = ("floor", "operator", "plain", "plain, compiled", "operator, compiled")
    print_table("B x T x D", names, measure(tuple(arguments.shapes), arguments.taps))


if __name__ == "__main__":
    main()
