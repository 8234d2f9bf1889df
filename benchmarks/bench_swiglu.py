"""SwiGLU alone and with its linear map: the operators and plain torch, beside a copy.

    python benchmarks/bench_swiglu.py                      # an H200: 16,384 and 65,536 rows of 2816
    python benchmarks/bench_swiglu.py --shapes 131072x2816 1x2816

bf16. "swiglu" is the product alone, "halves" that of two halves of one tensor, as fused projections
give them, "with down_proj" has a linear map to 4/11 of the width after it, 1024 of 2816. Forward +
backward is both, with gradients of all inputs. Results are checked against fp64 before anything is
timed. The floor of the product reads every input once and writes every output once at the rate of a
copy. What is kept for backward is what stays allocated beside inputs and output.
"""

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from shared.gate import require_close
from shared.streaming import add_floor, gradients_of, print_table, time_modes
from shared.timing import Timing, copy_bytes_per_s
from torch import Tensor

SHAPES = ("16384x2816", "65536x2816", "16384x5632")  # rows x D
TOLERANCE = 0.006  # bf16 results of fp32 products, of which torch's are rounded twice
CHECKED_ROWS = 2048
NAMES = ("gate", "up", "weight")


def plain(gate: Tensor, up: Tensor, weight: Tensor | None = None) -> Tensor:
    y = F.silu(gate) * up
    return y if weight is None else F.linear(y, weight)


def operator(gate: Tensor, up: Tensor, weight: Tensor | None = None) -> Tensor:
    from gla_ext.layers.swiglu import swiglu, swiglu_linear

    return swiglu(gate, up) if weight is None else swiglu_linear(gate, up, weight)


def contenders() -> dict[str, Callable]:
    """By name, functions of gate, up and perhaps a weight."""
    return {
        "operator": operator,
        "plain": plain,
        "plain, compiled": torch.compile(plain, dynamic=False),
        "operator, compiled": torch.compile(operator, dynamic=False),
    }


def kept_bytes(function: Callable, leaves: list[Tensor]) -> int:
    """Allocated after forward beside its inputs and its output."""
    function(*leaves)
    before = torch.cuda.memory_allocated()
    y = function(*leaves)
    return torch.cuda.memory_allocated() - before - y.nbytes


def measure_kind(kind: str, rows: int, D: int) -> dict[str, dict[str, Timing]]:
    """Timings by mode and name; prints what each keeps."""
    torch.compiler.reset()  # each shape is compiled for itself
    functions = contenders()
    of = {"device": "cuda", "dtype": torch.bfloat16}
    if kind == "halves":
        gate, up = torch.randn(rows, 2 * D, **of).chunk(2, -1)
    else:
        gate, up = (torch.randn(rows, D, **of) for _ in range(2))
    leaves = [gate.detach().requires_grad_(), up.detach().requires_grad_()]
    N = D
    if kind == "with down_proj":
        N = D * 4 // 11
        leaves.append((torch.randn(N, D, **of) / D**0.5).requires_grad_())
    dy = torch.randn(rows, N, **of)
    few = [t[:CHECKED_ROWS].detach().requires_grad_() for t in leaves[:2]] + leaves[2:]
    doubles = [t.detach().double().requires_grad_() for t in few]
    part = dy[:CHECKED_ROWS]
    names = NAMES[: len(leaves)]
    expected = gradients_of(plain, dict(zip(names, doubles, strict=True)), part.double())
    for name, function in functions.items():
        found = gradients_of(function, dict(zip(names, few, strict=True)), part)
        require_close(found, expected, TOLERANCE, f"swiglu {kind}, {name}, {rows}x{D}")
    kept = {name: f"{kept_bytes(f, leaves) / 2**20:.0f}" for name, f in functions.items()}
    print(f"{rows}x{D} {kind}, MiB kept for backward: {kept}")
    return time_modes(functions, leaves, dy)


def measure(shapes: tuple[str, ...] = SHAPES) -> dict[str, dict]:
    """By shape and kind: timings by mode and name, of the product alone the floor among them."""
    rate, table = copy_bytes_per_s(), {}
    for shape in shapes:
        rows, D = map(int, shape.split("x"))
        for kind in ("swiglu", "halves", "with down_proj"):
            timings = measure_kind(kind, rows, D)
            if kind != "with down_proj":
                for mode, row in timings.items():
                    tensors = 3 if mode == "forward" else 8
                    add_floor(row, 2 * tensors * rows * D, rate)
            table[f"{shape} {kind}"] = timings
            torch.cuda.empty_cache()
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="ROWSxD")
    arguments = parser.parse_args()
    names = ("floor", "operator", "plain", "plain, compiled", "operator, compiled")
    print_table("rows x D", names, measure(tuple(arguments.shapes)))


if __name__ == "__main__":
    main()
