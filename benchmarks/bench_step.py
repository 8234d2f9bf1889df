"""The operators of a training step around attention, beside torch's operations and a copy.

    python benchmarks/bench_step.py                    # those of the 374 M and the 1.3 B model
    python benchmarks/bench_step.py --only loss

bf16. Forward + backward is both, with gradients of all inputs. Results are checked against fp64 on
a part before anything is timed. The floor reads every input once and writes every output once at
the rate of a copy; that of `linear loss` is its three products at the rate of one of 8192^3.

- norm: a residual stream and its norm, `stream = residual + x`, `norm(stream)`, both with a
  gradient; "fp32 stream" is that of autocast, x and the norm in bf16
- loss: cross entropy of logits, "in place" with backward over them
- linear loss: the same with the output matrix, all logits never there
- FLA: its norm and losses, where it is installed; for the gate it takes torch's, "plain"
- gate: `logsigmoid(h W^T + b) / 16` of rank 16, h a part of wider rows as the joint projection's
- h: that joint product with h's 16 columns in it, and q, k, v, g's beside h's by itself
"""

import argparse
from collections.abc import Callable

import bench_fla
import torch
import torch.nn.functional as F
from shared.gate import require_close
from shared.streaming import add_floor, gradients_of, print_table, time_modes
from shared.timing import Timing, cold, copy_bytes_per_s
from torch import Tensor

from gla_ext.layers.gate_projection import gate_projection, plain_gate_projection
from gla_ext.layers.norms import rms_norm, rms_norm_residual
from gla_ext.losses import cross_entropy_loss, fused_linear_cross_entropy_loss

TOLERANCE = 0.01
CHECKED_ROWS = 512
OF = {"device": "cuda", "dtype": torch.bfloat16}
MODELS = {"374 M": (32768, 1024, 512), "1.3 B": (16384, 2048, 1024)}  # tokens, width, keys
VOCABULARY = 32000


def both_outputs(function: Callable) -> Callable:
    """Of y and stream one tensor, so that both have a gradient."""

    def f(*leaves: Tensor) -> Tensor:
        return torch.cat([t.to(leaves[0].dtype) for t in function(*leaves)], -1)

    return f


def norm_apart(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    stream = residual + x
    return rms_norm(stream, weight).to(x.dtype), stream


def norm_plain(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    stream = residual + x
    return F.rms_norm(stream, stream.shape[-1:], weight.to(stream.dtype), 1e-5).to(x.dtype), stream


def loss_plain(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), target)


def loss_operator(logits: Tensor, target: Tensor, inplace_backward: bool = False) -> Tensor:
    losses, _ = cross_entropy_loss(logits, target, inplace_backward=inplace_backward)
    return losses.sum() / (target != -100).sum()


def fla_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    from fla.modules.layernorm import rms_norm as theirs

    wide = residual.dtype == torch.float32
    return theirs(x, weight, None, residual, 1e-5, prenorm=True, residual_in_fp32=wide)


def fla_loss(logits: Tensor, target: Tensor) -> Tensor:
    from fla.modules.fused_cross_entropy import cross_entropy_loss as theirs

    return theirs(logits, target)[0].sum() / (target != -100).sum()


def fla_linear_loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    from fla.modules.fused_linear_cross_entropy import fused_linear_cross_entropy_loss as theirs

    return theirs(x, target, weight)


def and_fla(functions: dict[str, Callable], theirs: Callable) -> dict[str, Callable]:
    return functions | ({"FLA": theirs} if bench_fla.installed() else {})


def check(functions: dict[str, Callable], leaves: list[Tensor], rows: int, what: str) -> None:
    """Against the first function in fp64, on the first rows of what has rows."""
    few = [t[:CHECKED_ROWS] if t.shape[0] == rows else t for t in leaves]
    names = [f"input {i}" for i in range(len(few))]
    parts = {n: t.detach().clone().requires_grad_() for n, t in zip(names, few, strict=True)}
    doubles = {n: t.detach().double().requires_grad_() for n, t in parts.items()}
    plain = next(iter(functions.values()))
    y = plain(*doubles.values())
    dy = torch.randn(y.shape, device=y.device).to(torch.bfloat16)
    expected = gradients_of(plain, doubles, dy.double())
    for name, function in functions.items():
        if "in place" in name:  # its leaf would be written over
            continue
        found = gradients_of(function, parts, dy.to(function(*parts.values()).dtype))
        require_close(found, expected, TOLERANCE, f"{what}, {name}")


def measure_norm(rows: int, D: int, stream: torch.dtype) -> dict[str, dict[str, Timing]]:
    """Both ways without the concatenation that checks need: two gradients."""
    functions = {"plain": norm_plain, "apart": norm_apart, "operator": rms_norm_residual}
    functions = and_fla(functions, fla_norm)
    x, residual = torch.randn(rows, D, **OF), torch.randn(rows, D, **OF).to(stream)
    leaves = [x, residual, torch.randn(D, **OF)]
    check({n: both_outputs(f) for n, f in functions.items()}, leaves, rows, "norm")
    leaves = [t.requires_grad_() for t in leaves]
    gradients = [torch.randn_like(x), torch.randn_like(residual)]
    table = {
        "forward": cold({n: lambda f=f: f(*leaves) for n, f in functions.items()}),
        "forward + backward": cold(
            {
                n: lambda f=f: torch.autograd.grad(f(*leaves), leaves, gradients)
                for n, f in functions.items()
            }
        ),
    }
    wide = stream.itemsize
    forward = D * (2 + 2 * wide + 2)  # x residual -> stream y
    backward = D * (2 + 3 * wide + (2 if wide != 2 else 0))  # dy dstream stream -> dresidual (dx)
    return table | {"bytes": {"forward": forward, "forward + backward": forward + backward}}


def measure_loss(rows: int) -> dict[str, dict[str, Timing]]:
    target = torch.randint(VOCABULARY, (rows,), device="cuda")
    few = target[:CHECKED_ROWS]
    functions = and_fla({"plain": loss_plain, "operator": loss_operator}, fla_loss)
    logits = torch.randn(rows, VOCABULARY, **OF)
    check({n: lambda x, f=f: f(x, few) for n, f in functions.items()}, [logits], rows, "loss")
    leaf = logits.requires_grad_()
    calls = {n: lambda x, f=f: f(x, target) for n, f in functions.items()}
    table = time_modes(calls, [leaf], torch.ones((), device="cuda"))
    source = torch.ops.gla_ext
    with torch.no_grad():
        loss, _, lse = source.cross_entropy_fwd(leaf, target, -100, 0.0, 1.0, None, 0.0, False)
        scratch, ones = leaf.detach().clone(), torch.full_like(loss, 1e-6)
        table["backward alone"] = cold(
            {
                "operator": lambda: source.cross_entropy_bwd(
                    ones, leaf.detach(), target, lse, -100, 0.0, 1.0, None, 0.0
                ),
                "in place": lambda: source.cross_entropy_bwd_(
                    ones, scratch, target, lse, -100, 0.0, 1.0, None, 0.0
                ),
                "both in one pass": lambda: source.cross_entropy_with_grad_(
                    scratch, target, -100, 0.0, 1.0, None, 0.0
                ),
            }
        )
    per_row = 2 * VOCABULARY
    return table | {
        "bytes": {
            "forward": per_row,
            "forward + backward": 3 * per_row,
            "backward alone": 2 * per_row,
        }
    }


def measure_linear_loss(rows: int, D: int) -> dict[str, dict[str, Timing]]:
    target = torch.randint(VOCABULARY, (rows,), device="cuda")
    x, weight = torch.randn(rows, D, **OF), torch.randn(VOCABULARY, D, **OF) / D**0.5
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    functions = {
        "plain": lambda x, w: loss_plain(F.linear(x, w), target),
        "loss operator": lambda x, w: loss_operator(F.linear(x, w), target, inplace_backward=True),
        "operator": lambda x, w: fused_linear_cross_entropy_loss(x, target, w),
    }
    functions = and_fla(functions, lambda x, w: fla_linear_loss(x, w, target))
    found = [
        {"y": y.detach(), "dx": dx, "dw": dw}
        for y, dx, dw in (
            (y, *torch.autograd.grad(y, leaves)) for y in (f(*leaves) for f in functions.values())
        )
    ]
    for results, name in zip(found, functions, strict=True):
        require_close(results, {k: v.double() for k, v in found[0].items()}, 2 * TOLERANCE, name)
    del found
    table, peaks = time_modes(functions, leaves, torch.ones((), device="cuda")), {}
    for name, function in functions.items():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(function(*leaves), leaves)
        peaks[name] = f"{(torch.cuda.max_memory_allocated() - before) / 2**20:.0f}"
    print(f"linear loss {rows}x{D}, MiB at the peak of both ways: {peaks}")
    return table | {"flops": 6 * rows * D * VOCABULARY}


def measure_gate(rows: int, D: int, K: int) -> dict[str, dict[str, Timing]]:
    h = torch.randn(rows, 3 * D + 16, **OF)[:, 3 * D :]
    leaves = [h, torch.randn(K, 16, **OF), torch.randn(K, **OF)]
    functions = {"plain": plain_gate_projection, "operator": gate_projection}
    check(functions, leaves, rows, "gate")
    leaves = [t.detach().requires_grad_() for t in leaves]
    table = time_modes(functions, leaves, torch.randn(rows, K, **OF))
    forward, backward = 2 * (16 + K), 2 * (K + 2 * 16)
    return table | {"bytes": {"forward": forward, "forward + backward": forward + backward}}


def measure_h(rows: int, D: int) -> dict[str, dict[str, Timing]]:
    x = torch.randn(rows, D, **OF).requires_grad_()
    joint = torch.randn(3 * D + 16, D, **OF).requires_grad_()
    four, first = (torch.randn(n, D, **OF).requires_grad_() for n in (3 * D, 16))
    dy = torch.randn(rows, 3 * D + 16, **OF)
    calls = {
        "operator": lambda: torch.autograd.grad(F.linear(x, joint), [x, joint], dy),
        "apart": lambda: torch.autograd.grad(
            [F.linear(x, four), F.linear(x, first)], [x, four, first], dy.split([3 * D, 16], -1)
        ),
        "plain": lambda: torch.autograd.grad(F.linear(x, four), [x, four], dy[:, : 3 * D]),
    }
    return {"forward + backward": cold(calls)}


def product_flops_per_s() -> float:
    a = torch.randn(8192, 8192, **OF)
    return 2 * 8192**3 / (cold({"product": lambda: a @ a})["product"].median * 1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("norm", "loss", "linear loss", "gate", "h"))
    arguments = parser.parse_args()
    table: dict[str, dict] = {}
    for model, (rows, D, K) in MODELS.items():
        cases = {
            "norm": lambda rows=rows, D=D: measure_norm(rows, D, torch.bfloat16),
            "norm, fp32 stream": lambda rows=rows, D=D: measure_norm(rows, D, torch.float32),
            "loss": lambda rows=rows: measure_loss(rows),
            "linear loss": lambda rows=rows, D=D: measure_linear_loss(rows, D),
            "gate": lambda rows=rows, D=D, K=K: measure_gate(rows, D, K),
            "h": lambda rows=rows, D=D: measure_h(rows, D),
        }
        for name, measure in cases.items():
            if arguments.only in (None, name.split(",")[0]):
                timings = measure()
                for mode, moved in timings.pop("bytes", {}).items():
                    add_floor(timings[mode], rows * moved, copy_bytes_per_s())
                if (flops := timings.pop("flops", None)) is not None:
                    add_floor(timings["forward + backward"], flops, product_flops_per_s())
                table[f"{model} {name}"] = timings
                torch.cuda.empty_cache()
    names = ("floor", "plain", "apart", "FLA", "loss operator", "operator", "in place")
    names += ("both in one pass",)
    print_table("model and operator", names, table)


if __name__ == "__main__":
    main()
