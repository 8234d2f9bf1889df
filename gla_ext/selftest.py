"""Checks an installation: `python -m gla_ext.selftest`.

Compares `chunk_gla`, forward and every gradient, with the recurrence of `gla_ext.reference` in
fp64, on CPU and, where the operators and a GPU are there, on CUDA. Prints one row a case with the
relative RMS errors, and exits with 1 if any is over its bound. Takes seconds.
"""

import argparse
import dataclasses
import functools
import sys
import time

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from gla_ext import reference
from gla_ext.ops.chunk import chunk_gla

# Bounds of the relative RMS error against the fp64 recurrence, by the dtype of q, k and v. Rounding
# a result already costs .0017 in bf16 and .0002 in fp16, and on tensor cores operands are rounded
# once more. fp32 keeps its 24 bits through sums of 64 products and decays 2^b with |b| of tens. dg
# is a difference of long sums, so it has its own bound in the dtypes without such rounding.
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 3e-6,
    torch.bfloat16: 0.004,
    torch.float16: 0.0008,
}
DG_TOLERANCE = TOLERANCE | {torch.float64: 1e-11, torch.float32: 2e-5}
# For fp32 inputs on CUDA if torch allows tf32, which has the mantissa of fp16.
TF32_TOLERANCE = TOLERANCE[torch.float16]

QUANTITIES = ("o", "final_state", "dq", "dk", "dv", "dg", "dh0")


def tolerance(quantity: str, dtype: torch.dtype) -> float:
    """The bound for `quantity` (as in `QUANTITIES`) computed from inputs of `dtype`."""
    return (DG_TOLERANCE if quantity.startswith("dg") else TOLERANCE)[dtype]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """RMS of the difference over RMS of `expected`, in fp64; NaN if either contains NaN."""
    actual, expected = actual.detach().to(expected.device).double(), expected.detach().double()
    return ((actual - expected).norm() / expected.norm()).item()


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    gate: float = 1.0  # gates are logsigmoid(N(0, 1)) times this
    resets: float = 0.0  # share of gates that are -inf
    lengths: tuple[int, ...] | None = None  # of packed sequences; other tokens of 150 follow
    heads: tuple[int, int] = (20, 24)  # K, V


CASES = (
    Case("plain", gate=1 / 16),
    Case("strong gates", gate=10.0),
    Case("resets", resets=0.3),
    Case("packed", lengths=(1, 0, 70, 64, 9)),
    Case("wide heads", gate=1 / 16, heads=(64, 72)),  # on CUDA, bf16's fused path
)


def _inputs(case: Case, dtype: torch.dtype):
    generator = torch.Generator("cpu").manual_seed(0)

    def normal(*shape, dtype=dtype):
        wide = torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")
        return wide.to(dtype)

    B, T, H, K, V = (2 if case.lengths is None else 1), 150, 3, *case.heads
    N = B if case.lengths is None else len(case.lengths)
    state_dtype = torch.promote_types(dtype, torch.float32)
    g = logsigmoid(normal(B, T, H, K, dtype=torch.float64)) * case.gate
    drawn = torch.rand(g.shape, generator=generator, dtype=torch.float32, device="cpu")
    g = g.masked_fill(drawn < case.resets, -torch.inf).to(dtype)
    tensors = (normal(B, T, H, K), normal(B, T, H, K), normal(B, T, H, V), g)
    initial_state, dht = (normal(N, H, K, V, dtype=state_dtype) for _ in range(2))
    cu_seqlens = None
    if case.lengths is not None:
        cu_seqlens = torch.tensor([0, *case.lengths], device="cpu").cumsum(0)
    return (*tensors, initial_state), (normal(B, T, H, V), dht), cu_seqlens


def _results(function, inputs, upstream, cu_seqlens):
    q, k, v, g, initial_state = inputs = [x.detach().requires_grad_() for x in inputs]
    outputs = function(q, k, v, g, initial_state=initial_state, cu_seqlens=cu_seqlens)
    dq, dk, dv, dg, dh0 = torch.autograd.grad(outputs, inputs, upstream)
    return dict(zip(QUANTITIES, (*outputs, dq, dk, dv, dg, dh0), strict=True))


def check(case: Case, dtype: torch.dtype, device: str) -> dict[str, float]:
    """The relative RMS error of every quantity of one case."""
    inputs, upstream, cu_seqlens = _inputs(case, dtype)

    final = functools.partial(chunk_gla, output_final_state=True)
    expected = _results(
        reference.recurrence, *([x.double() for x in xs] for xs in (inputs, upstream)), cu_seqlens
    )
    on_device = ([x.to(device) for x in xs] for xs in (inputs, upstream))
    actual = _results(final, *on_device, None if cu_seqlens is None else cu_seqlens.to(device))
    return {name: relative_error(actual[name], expected[name]) for name in QUANTITIES}


def devices() -> list[str]:
    """The devices that have both operators and hardware."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    cuda = torch.cuda.is_available() and has_kernel("gla_ext::chunk_gla_fwd", "CUDA")
    return ["cpu", "cuda"] if cuda else ["cpu"]


def main(argv: list[str] | None = None) -> int:
    """Runs every case and prints the table. Returns 1 if a case is wrong, else 0."""
    argparse.ArgumentParser(prog="python -m gla_ext.selftest", description=__doc__).parse_args(argv)
    start, wrong = time.perf_counter(), 0
    print(f"{'device':7}{'dtype':10}{'case':14}" + "".join(f"{name:>12}" for name in QUANTITIES))
    for device in devices():
        for dtype in TOLERANCE:
            if device == "cuda" and dtype == torch.float64:
                continue
            for case in CASES:
                errors = check(case, dtype, device)
                bad = [name for name, x in errors.items() if not x <= tolerance(name, dtype)]
                wrong += bool(bad)
                row = f"{device:7}{str(dtype).removeprefix('torch.'):10}{case.name:14}"
                row += "".join(f"{x:12.1e}" for x in errors.values())
                print(row + (f"   WRONG: {', '.join(bad)}" if bad else ""))
    verdict = f"{wrong} cases are wrong" if wrong else "all right"
    print(f"torch {torch.__version__}, {time.perf_counter() - start:.1f} s: {verdict}")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
