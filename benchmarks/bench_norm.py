"""The norm with its output gate: the operator, plain torch, and FLA's kernel, beside a copy.

    python benchmarks/bench_norm.py                      # an H200: 262,144 rows of 256
    python benchmarks/bench_norm.py --shapes 131072x64 65536x1024 --fla

bf16 with a bf16 weight and a gate by swish, except where a row says without. Forward + backward is
both, with gradients of x, gate and weight; "y again" is the same where backward makes y again, as
that of the layer's output map does. Results are checked against fp64 before anything is
timed. The floor reads every input once and writes every output once at the rate of a copy.
"""

import argparse
from collections.abc import Callable

import bench_fla
import torch
from shared.gate import require_close
from shared.streaming import add_floor, gradients_of, print_table, time_modes
from shared.timing import Timing, cold, copy_bytes_per_s

SHAPES = ("262144x256", "262144x128", "1048576x64", "65536x1024")  # rows x V
TOLERANCE = 0.005  # bf16 results of fp32 sums
EPS = 1e-5
AGAIN = "forward + backward, y again"


def contenders(V: int, gated: bool, fla: bool) -> dict[str, Callable]:
    """By name, functions of x, weight and gate."""
    from gla_ext.layers.norms import plain_rms_norm, rms_norm

    def operator(x, weight, gate):
        return rms_norm(x, weight, EPS, gate)

    def plain(x, weight, gate):
        return plain_rms_norm(x, weight, EPS, gate)

    functions = {
        "operator": operator,
        "plain": plain,
        "plain, compiled": torch.compile(plain, dynamic=False),
    }
    if gated:  # the other one is plain inside torch.compile
        functions["operator, compiled"] = torch.compile(operator, dynamic=False)
    if fla and gated:
        from fla.modules import FusedRMSNormGated

        norm = FusedRMSNormGated(V, eps=EPS).to("cuda", torch.bfloat16)
        functions["FLA"] = lambda x, weight, gate: torch.func.functional_call(
            norm, {"weight": weight}, (x, gate)
        )
    return functions


def measure_rows(rows: int, V: int, gated: bool, fla: bool) -> dict[str, dict[str, Timing]]:
    """Timings by mode and name."""
    torch.compiler.reset()  # each shape is compiled for itself
    x, gate, dy = (torch.randn(rows, V, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    weight = torch.randn(V, device="cuda", dtype=torch.bfloat16).requires_grad_()
    leaves = [x.requires_grad_(), weight, gate.requires_grad_() if gated else None]
    functions = contenders(V, gated, fla)
    few = [t if t is None or t is weight else t[:4096].detach().requires_grad_() for t in leaves]
    doubles = [None if t is None else t.detach().double().requires_grad_() for t in few]
    names = ("x", "w", "gate")
    expected = gradients_of(
        functions["plain"], dict(zip(names, doubles, strict=True)), dy[:4096].double()
    )
    for name, function in functions.items():
        found = gradients_of(function, dict(zip(names, few, strict=True)), dy[:4096])
        require_close(found, expected, TOLERANCE, f"norm, {name}, {rows}x{V}")
    timings = time_modes(functions, leaves, dy)
    if gated:
        inputs = [t.detach() for t in leaves]
        timings[AGAIN] = cold({"operator": lambda: both_ways_with_y_again(*inputs, dy)})
    return timings


def both_ways_with_y_again(x, weight, gate, dy):
    operators = torch.ops.gla_ext
    _, rstd = operators.rms_norm_gate_fwd(x, weight, gate, "swish", EPS)
    return operators.rms_norm_gate_bwd(dy, x, weight, gate, rstd, "swish", True)


def moved_bytes(rows: int, V: int, gated: bool, mode: str) -> int:
    tensors = (3 if gated else 2) if mode == "forward" else (8 if gated else 5) + (mode == AGAIN)
    return 2 * tensors * rows * V


def measure(fla: bool, shapes: tuple[str, ...] = SHAPES) -> dict[str, dict]:
    """By shape, with and without a gate: timings by mode and name, the floor among them."""
    rate, table = copy_bytes_per_s(), {}
    for shape in shapes:
        rows, V = map(int, shape.split("x"))
        for gated in (True, False):
            timings = measure_rows(rows, V, gated, fla)
            for mode, row in timings.items():
                add_floor(row, moved_bytes(rows, V, gated, mode), rate)
            table[shape if gated else f"{shape} without"] = timings
            torch.cuda.empty_cache()
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="ROWSxV")
    parser.add_argument("--fla", action="store_true", help="time FLA's beside it")
    arguments = parser.parse_args()
    if arguments.fla and not bench_fla.installed():
        raise SystemExit("bench_norm: --fla, but flash-linear-attention is not installed")
    names = ("floor", "operator", "plain", "plain, compiled", "operator, compiled", "FLA")
    print_table("rows x V", names, measure(arguments.fla, tuple(arguments.shapes)))


if __name__ == "__main__":
    main()
