"""The operators around attention, beside torch's operations, FLA's and a copy, at the sizes of a
374 M model's training step; part of `check_gpu.py`.
"""

import dataclasses
import functools
from collections.abc import Callable

import bench_fla
import torch
import torch.nn.functional as F
from shared.gate import require_close
from shared.operator import MODES
from shared.timing import Timing, cold
from torch import Tensor

from gla_ext.losses import cross_entropy_loss
from gla_ext.ops.gate_projection import gate_projection, plain_gate_projection
from gla_ext.ops.rms_norm import plain_rms_norm, rms_norm, rms_norm_residual
from gla_ext.ops.swiglu import swiglu

TOLERANCE = 0.01  # bf16 results of fp32 sums, of which torch's are rounded twice
CHECKED = 2**20  # elements of a leaf
VOCABULARY = 32000
EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class Row:
    """An operator.

    Attributes:
        sizes: of its leaves, in bf16.
        ours, plain, fla: functions of the leaves, to a tensor or several; `plain` is torch's.
        moved: what the floor reads and writes, in sizes of the first leaf: forward, both ways.
        wide: the number of a leaf in fp32.
    """

    sizes: tuple[tuple[int, ...], ...]
    ours: Callable
    plain: Callable
    moved: tuple[float, float]
    fla: Callable | None = None
    wide: int | None = None

    def draw(self, device: str = "cuda") -> list[Tensor]:
        generator = torch.Generator(device).manual_seed(0)
        leaves = [torch.randn(x, generator=generator, device=device) for x in self.sizes]
        return [x if i == self.wide else x.bfloat16() for i, x in enumerate(leaves)]


def rows() -> dict[str, Row]:
    """By name."""

    def norm(x, weight, gate=None):
        return rms_norm(x, weight, EPS, gate)

    def plain_norm(x, weight, gate=None):
        return plain_rms_norm(x, weight, EPS, gate)

    def plain_residual(x, residual, weight):
        stream = residual + x
        y = F.rms_norm(stream, stream.shape[-1:], weight.to(stream.dtype), EPS)
        return y.to(x.dtype), stream

    def convolution(x, weight):
        return torch.ops.gla_ext.short_convolution_fwd(x, weight, None, None, None, False)[0]

    def loss(logits):
        return cross_entropy_loss(logits, targets(logits))[0].mean()

    def plain_loss(logits):
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(wide, targets(logits))

    T, D, K = 32768, 1024, 512
    residual = Row(((T, D), (T, D), (D,)), rms_norm_residual, plain_residual, (4, 8), fla_residual)
    return {
        "norm and gate, 262,144 x 256": Row(
            ((262144, 256), (256,), (262144, 256)), norm, plain_norm, (3, 8), fla_norm
        ),
        "norm, 262,144 x 256": Row(((262144, 256), (256,)), norm, plain_norm, (2, 5)),
        "residual and norm, 32,768 x 1,024": residual,
        "the same with an fp32 stream": dataclasses.replace(residual, moved=(6, 14), wide=1),
        "SwiGLU, 65,536 x 2,816": Row(
            ((65536, 2816),) * 2, swiglu, lambda gate, up: F.silu(gate) * up, (3, 8)
        ),
        "short convolution, 32 x 2,048 x 1,024": Row(
            ((32, 2048, D), (D, 1, 4)), convolution, plain_convolution, (2, 5)
        ),
        "gate's second map, 32,768 x 512": Row(
            ((T, 16), (K, 16), (K,)),
            gate_projection,
            plain_gate_projection,
            (1 + K / 16, 3 + 2 * K / 16),
        ),
        "cross entropy, 32,768 x 32,000": Row(
            ((T, VOCABULARY),), loss, plain_loss, (1, 3), fla_loss
        ),
    }


def targets(logits: Tensor) -> Tensor:
    return 7919 * torch.arange(len(logits), device=logits.device) % VOCABULARY


def plain_convolution(x: Tensor, weight: Tensor) -> Tensor:
    """A sum of shifted products, which inductor makes one kernel of."""
    W, T = weight.shape[-1], x.shape[1]
    inputs = F.pad(x, (0, 0, W - 1, 0))
    taps = weight[:, 0].to(torch.promote_types(x.dtype, torch.float32))
    return F.silu(sum(inputs.narrow(1, j, T) * taps[:, j] for j in range(W))).to(x.dtype)


def fla_norm(x: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
    from fla.modules import FusedRMSNormGated

    norm = FusedRMSNormGated(x.shape[-1], eps=EPS).to(x.device, x.dtype)
    return torch.func.functional_call(norm, {"weight": weight}, (x, gate))


def fla_residual(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    from fla.modules.layernorm import rms_norm

    wide = residual.dtype == torch.float32
    return rms_norm(x, weight, None, residual, EPS, prenorm=True, residual_in_fp32=wide)


def fla_loss(logits: Tensor) -> Tensor:
    from fla.modules.fused_cross_entropy import cross_entropy_loss

    return cross_entropy_loss(logits, targets(logits))[0].mean()


def outputs(function: Callable, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    y = function(*leaves)
    return y if isinstance(y, tuple) else (y,)


def both_ways(function: Callable, leaves: list[Tensor], dy: list[Tensor]) -> dict[str, Tensor]:
    """Outputs, and the gradients of the leaves."""
    y = outputs(function, leaves)
    gradients = torch.autograd.grad(y, leaves, [d.to(t.dtype) for d, t in zip(dy, y, strict=True)])
    found = {f"output {i}": t.detach() for i, t in enumerate(y)}
    return found | {f"gradient {i}": t for i, t in enumerate(gradients)}


def check(name: str, row: Row, functions: dict[str, Callable], leaves: list[Tensor]) -> None:
    """Raises WrongResults unless every function is torch's in fp64, on the first rows."""
    count = max(1, CHECKED // leaves[0][0].numel())
    few = [t[:count] if len(t) == len(leaves[0]) else t for t in leaves]
    few = [t.detach().requires_grad_() for t in few]
    doubles = [t.detach().double().requires_grad_() for t in few]
    dy = [torch.randn_like(y).bfloat16() for y in outputs(row.plain, doubles)]
    expected = both_ways(row.plain, doubles, dy)
    for who, function in functions.items():
        require_close(both_ways(function, few, dy), expected, TOLERANCE, f"{name}, {who}")


def contenders(row: Row, fla: bool) -> dict[str, Callable]:
    """Functions of the leaves."""
    compiled = torch.compile(row.plain, dynamic=False)
    found = {"gla_ext": row.ours, "torch": row.plain, "torch, compiled": compiled}
    return found | ({"FLA": row.fla} if fla and row.fla else {})


def measure(fla: bool, bytes_per_s: float) -> dict[str, dict[str, dict[str, Timing]]]:
    """Milliseconds by operator, mode and name, the floor among them."""
    results = {}
    for name, row in rows().items():
        torch.compiler.reset()  # each is compiled for itself
        functions, leaves = contenders(row, fla and bench_fla.installed()), row.draw()
        check(name, row, functions, leaves)
        leaves = [t.requires_grad_() for t in leaves]
        dy = [torch.randn_like(y) for y in outputs(row.ours, leaves)]
        ways = (outputs, functools.partial(both_ways, dy=dy))
        results[name] = {}
        for mode, way, moved in zip(MODES, ways, row.moved, strict=True):
            floor = 1e3 * moved * 2 * leaves[0].numel() / bytes_per_s
            calls = {who: functools.partial(way, f, leaves) for who, f in functions.items()}
            results[name][mode] = {"floor": Timing(floor, floor, floor, 0)} | cold(calls)
        torch.cuda.empty_cache()
    return results
